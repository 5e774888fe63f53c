"""A policy and a file of tools: calls are read of drawn ids, results become given ids, the same ones at every node."""

import contextlib
import json
from types import SimpleNamespace

import numpy as np
import pytest

from heterorl.common.errors import ConfigError, EnvironmentFailed
from heterorl.common.tasks.environments.environment import Observation
from heterorl.common.tasks.environments.environment_task import EnvironmentSpec, EpisodeLimits
from heterorl.common.tasks.task import Prompt
from heterorl.common.tasks.task_config import TaskConfig, build_task
from heterorl.common.text.conversation import Conversations
from tests.support.conversations import CHATML, QWEN3, prompter_of, words_of
from tests.support.conversations import TOOLS as FAMILY_TOOLS
from tests.support.plain_task import plain_task

pytestmark = pytest.mark.process
TOOLS = """
def multiply(a: int, b: int) -> int:
    \"\"\"Multiply two numbers.

    Args:
        a: the first one.
        b: the second one.
    \"\"\"
    return a * b


def score(messages, answer):
    return float(messages[-1]["content"].strip() == answer)
"""


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    place = tmp_path_factory.mktemp("tools")
    (place / "calc.py").write_text(TOOLS)
    (place / "rows.jsonl").write_text("".join(
        json.dumps({"prompt": f"What is {n} times 7?", "answer": str(7 * n)}) + "\n" for n in range(20)
    ))  # fmt: skip
    made = build_task(TaskConfig(
        name=f"jsonl:{place / 'rows.jsonl'}", evaluation_size=2, environment="calc.py", environment_path=str(place),
        environment_workers=2,
    ))  # fmt: skip
    yield made
    made.close()


@pytest.fixture(scope="module")
def prompter(tmp_path_factory):
    return prompter_of(tmp_path_factory.mktemp("qwen"), QWEN3, words_of(eos="<|im_end|>"))


def conversations(task, prompter):
    return Conversations(task, prompter)


def turn(prompter, text, *, is_cut=False):
    """Ids that a policy might have drawn."""
    return np.array([*prompter.tokens(text), *([] if is_cut else prompter.end_token_ids[-1:])], np.int32)


def test_tool_is_called_and_its_result_is_given(task, prompter):
    prompt = task.prompt(3)
    of_sampler, of_learner = (conversations(task, prompter).of(prompt) for _ in range(2))
    number = int(prompt.answer) // 7
    call = f'<tool_call>{{"name": "multiply", "arguments": {{"a": {number}, "b": 7}}}}</tool_call>'
    assert "multiply" in prompter.tokenizer.decode(of_sampler.encode(prompt))

    given = []
    for conversation in (of_sampler, of_learner):
        with conversation.spec.open() as episode:
            given.append(conversation.step(episode, turn(prompter, call)))
            assert conversation.step(episode, turn(prompter, prompt.answer)) is None
            assert episode.score()[0].value == 1.0

    assert given[0].tolist() == given[1].tolist()
    text = prompter.tokenizer.decode(given[0])
    assert f"<tool_response>\n{prompt.answer}\n</tool_response>" in text
    assert text.endswith("<|im_start|>assistant\n")


@pytest.mark.parametrize(
    ("said", "heard"),
    [
        ("<tool_call>{no json</tool_call>", "No tool was called"),
        ('<tool_call>{"name": "divide", "arguments": {}}</tool_call>', "divide"),
        ('<tool_call>{"name": "multiply", "arguments": {"a": "x", "b": 7}}</tool_call>', "a"),
    ],
)
def test_call_that_cannot_be_made_is_something_that_the_policy_reads(task, prompter, said, heard):
    conversation = conversations(task, prompter).of(task.prompt(0))

    with conversation.spec.open() as episode:
        given = conversation.step(episode, turn(prompter, said))
        assert heard in prompter.tokenizer.decode(given)
        assert conversation.step(episode, turn(prompter, "I give up")) is None
        assert episode.score()[0].value == 0.0


class Named:
    """An environment that has a name and tools alone."""

    name, max_live, is_deterministic, tool_parser = "program:agent.py:run", 1, False, "auto"

    def __init__(self, *tools):
        self.tools, self.num_opened = tools, 0

    def open(self, row, seed):
        self.num_opened += 1
        raise EnvironmentFailed("it was opened")


def test_each_source_of_a_mixture_has_its_own_form_of_calls(task, prompter, tmp_path):
    (tmp_path / "calc.py").write_text(TOOLS)
    own = {"name": f"jsonl:{tmp_path}/rows.jsonl", "environment": "calc.py", "environment_path": str(tmp_path)}
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1 times 7?", "answer": "7"}\n{"prompt": "7?", "answer": "7"}\n')
    labels = [{"label": "of_run"}, {"label": "own", "tool_parser": "json"}]
    mixed = build_task(TaskConfig(
        name="mixture", tool_parser="hermes", environment_workers=1, sources=tuple({**own, **each} for each in labels),
    ))  # fmt: skip

    made = conversations(mixed, prompter)
    found = {mixed.source_of(index): made.of(mixed.prompt(index)).parser for index in range(mixed.num_prompts)}

    assert found == {"of_run": "hermes", "own": "json"}
    mixed.close()


def test_environments_of_one_name_in_two_directories_have_their_own_tools(prompter):
    limits = EpisodeLimits(max_turns=2, trajectory_s=1.0)
    with_tools, without = Named(*FAMILY_TOOLS), Named()
    specs = [EnvironmentSpec(episodes=each, limits=limits, row={}, seed=0) for each in (with_tools, without)]
    task = plain_task(
        environments=(with_tools, without), environment_of=lambda prompt: specs[prompt.index % 2], num_prompts=4,
        prompt=lambda index: Prompt(index=index, text="x", answer=""),
    )  # fmt: skip
    made = conversations(task, prompter)

    assert [made.of(task.prompt(index)).parser for index in range(2)] == ["hermes", None]
    with_tools.open = lambda row, seed: contextlib.nullcontext(
        SimpleNamespace(first=None, step=lambda action: Observation((), done=True), score=lambda: ())
    )
    with pytest.raises(ConfigError, match="it was opened"):
        made.try_episodes()
    assert without.num_opened == 1


STATE = """
class Grows:
    seen = []

    def reset(self, row, *, seed):
        self.seen.append(seed)
        return "Go."

    def step(self, action):
        return f"turn {len(self.seen)}"

    def score(self):
        return 0.5

class Notes(Grows):
    is_deterministic = False
"""


def test_environment_that_differs_from_itself_is_refused_and_each_is_tried_once(prompter, tmp_path):
    (tmp_path / "state.py").write_text(STATE)
    config = {"name": "seeds", "size": 64, "environment_path": str(tmp_path), "environment_workers": 1}
    grows, notes = (build_task(TaskConfig(environment=f"state:{name}", **config)) for name in ("Grows", "Notes"))
    asked = []

    with pytest.raises(
        ConfigError, match="state:Grows differs from itself with equal row, seed and turn: keep no state"
    ):
        conversations(grows, prompter).try_episodes()
    told = plain_task(
        environments=notes.environments, environment_of=notes.environment_of, num_prompts=64,
        prompt=lambda index: (asked.append(index), notes.prompt(index))[1],
    )  # fmt: skip
    conversations(told, prompter).try_episodes()
    assert asked == [0]
    for each in (grows, notes):
        each.close()


def test_turn_that_was_cut_gets_its_end_token_first(task, prompter):
    conversation = conversations(task, prompter).of(task.prompt(0))
    call = '<tool_call>{"name": "multiply", "arguments": {"a": 1, "b": 7}}</tool_call>'

    with conversation.spec.open() as episode:
        whole = conversation.step(episode, turn(prompter, call))
    with conversation.spec.open() as episode:
        cut = conversation.step(episode, turn(prompter, call, is_cut=True))

    (end,) = prompter.tokenizer.encode("<|im_end|>", add_special_tokens=False)
    assert cut.tolist() == [end, *whole.tolist()]


def test_template_that_shows_no_tools_is_refused(task, tmp_path):
    prompter = prompter_of(tmp_path / "chatml", CHATML, words_of(eos="<|im_end|>"))

    with pytest.raises(ConfigError, match=r"task.environment: the model.s template leaves out the tools multiply"):
        conversations(task, prompter)
