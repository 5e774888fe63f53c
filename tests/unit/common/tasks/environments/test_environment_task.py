"""A task with an environment: prompts of its episodes, its score, its digest, and its place in a mixture."""

import json
from types import SimpleNamespace

import pytest

from heterorl.common.errors import ConfigError, EnvironmentFailed, PromptRefused, RewardError, ServiceUnreachable
from heterorl.common.model.model_loading import TokenLimits
from heterorl.common.process.config_file import load
from heterorl.common.tasks.environments import episode_worker, episodes, verifiers
from heterorl.common.tasks.environments.environment import Action, ToolCall
from heterorl.common.tasks.environments.environment_task import (
    EnvironmentTask,
    EpisodeLimits,
    environment_problem,
    numbers_task,
    seed_of,
)
from heterorl.common.tasks.rewards.worker_pool import NoAnswer
from heterorl.common.tasks.task import Message, Prompt
from heterorl.common.tasks.task_config import TaskConfig, build_task
from heterorl.common.text.conversation import try_prompts, try_reward
from heterorl.common.text.prompter import Prompter
from heterorl.learner.learner_config import LearnerConfig
from tests.support import tokenizers

pytestmark = pytest.mark.process

GAME = """
import random
from pathlib import Path

class Game:
    def reset(self, row, *, seed):
        self.row = row
        if "prompt" in row:
            return None
        assert row == {"seed": seed}
        return f"game {random.randint(0, 10**9)}"

    def step(self, action):
        self.said = action.text
        return "on"

    def score(self):
        if self.said == "raise":
            raise KeyError("lamp")
        return {"right": float(self.said == self.row.get("answer")), "length": len(self.said)}

class Broken:
    def reset(self, row, *, seed):
        raise OSError("no board")
    step = score = reset

class Asking(Game):
    def reset(self, row, *, seed):
        super().reset(row, seed=seed)
        return [{"role": "user", "content": f"Q {row['prompt']}"}, {"role": "tool", "name": "look", "content": "a door"}]

class Dated(Game):
    is_deterministic = False

    def reset(self, row, *, seed):
        self.row = row
        return Path(__file__).with_name("date").read_text()

class Silent(Game):
    def reset(self, row, *, seed):
        self.row = row
"""
TOOLS = '''
def add(a: int, b: int) -> int:
    """Add."""
    return a + b

def score(messages, answer, level):
    return float(messages[-1]["content"] == answer) * level
'''


@pytest.fixture
def place(tmp_path):
    (tmp_path / "games.py").write_text(GAME)
    (tmp_path / "tools.py").write_text(TOOLS)
    rows = [{"prompt": f"{n} + 1?", "answer": n + 1, "level": 2} for n in range(6)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


@pytest.fixture
def made(place):
    """Makes tasks over the files above, and ends them."""
    tasks = []

    def make(environment="games:Game", **changes):
        keys = {"name": "seeds", "size": 5, "evaluation_size": 3, "environment_path": str(place), **changes}
        config = TaskConfig(environment=environment, **keys)
        tasks.append(build_task(config))
        return tasks[-1]

    yield make
    for each in tasks:
        each.close()


def test_prompts_are_the_first_messages_of_episodes_with_seeds_of_their_own(made):
    task, other = made(), made(size=4, evaluation_size=2, seed=1)
    texts = [task.prompt(index).text for index in range(5)] + [task.evaluation_prompt(index).text for index in range(3)]

    assert (task.num_prompts, task.num_evaluation_prompts) == (5, 3)
    assert len({*texts, *(other.prompt(index).text for index in range(4))}) == 12
    assert [task.prompt(index).text for index in range(5)] == texts[:5] == [made().prompt(i).text for i in range(5)]
    assert task.prompt(2) == task.prompt(2) != task.prompt(3)
    assert task.prompt(2).columns == {"seed": task.prompt(2).seed}
    assert not task.prompt(2).messages


def test_no_held_out_seed_is_a_training_seed_whatever_their_number():
    seeds = [
        seed_of(index, is_held_out=held_out, seed=seed)
        for seed in (0, 1, 7) for held_out in (False, True) for index in range(1000)
    ]  # fmt: skip

    assert len(set(seeds)) == len(seeds)
    assert max(seeds) < 1 << 32, "what numpy takes"


def test_numbers_hold_out_the_last_tasks_of_a_data_set():
    def tasks(**changes):
        task = numbers_task(**{"num_rows": 10, "size": 100, "evaluation_size": 3, **changes})
        held = [task.evaluation_prompt(index).columns["task"] for index in range(task.num_evaluation_prompts)]
        return [task.prompt(index).columns["task"] for index in range(task.num_prompts)], held

    assert tasks() == ([*range(7)], [7, 8, 9])
    assert tasks(size=2) == ([0, 1], [7, 8, 9])
    assert tasks(num_rows=None, size=4) == ([0, 1, 2, 3], [4, 5, 6])
    with pytest.raises(ConfigError, match=r"^task.evaluation_size: .* has 10 tasks, and 10 are held out .*below 10"):
        tasks(evaluation_size=10)


def test_a_process_builds_an_endless_data_set_before_its_episodes(monkeypatch):
    built, limits = [], []

    class Endless(verifiers.Played):
        def __init__(self):
            self._tasks, self._more = [], map(self._made, range(9))

        def _made(self, number):
            built.append(number)
            return SimpleNamespace(data=SimpleNamespace(prompt=""))

    played = Endless()
    monkeypatch.setattr(verifiers, "load", lambda name, directory: (None, {"num_rows": None, "build": played.build}))
    monkeypatch.setattr(episode_worker, "_bound_memory", limits.append)
    job = {"what": "verifiers", "name": "sums", "directory": "", "memory_bytes": 1, "max_observation_chars": 9}

    _, facts = episode_worker.load({**job, "num_rows": 7}, None)
    assert built == [*range(7)]
    assert json.dumps(facts)
    # The first held-out task, behind 4 for training, builds no other.
    number = numbers_task(num_rows=None, size=4, evaluation_size=3).evaluation_prompt(0).columns["task"]
    played.task(number)
    assert built == [*range(7)]
    with pytest.raises(ValueError, match="its data set ends after 9 tasks of 12: lower task.size"):
        episode_worker.load({**job, "num_rows": 12}, None)


def test_members_of_a_group_open_the_episode_that_gave_the_prompt(made):
    task = made()
    prompt = task.evaluation_prompt(1)
    spec = task.environment_of(prompt)

    assert (spec.limits.max_turns, spec.limits.trajectory_s, spec.row) == (8, 600.0, {"seed": spec.seed})
    with spec.open() as one, spec.open() as other:
        assert one.first == other.first == (Message(role="user", content=prompt.text),)
    assert task.environments == (spec.episodes,)
    assert build_task(TaskConfig(digits=1)).environment_of(prompt) is None
    assert build_task(TaskConfig(digits=1)).environments == ()


def test_first_messages_that_change_with_the_day_cost_one_group_and_no_later_one(made, place):
    (place / "date").write_text("today")
    task = made("games:Dated")
    old = task.environment_of(task.prompt(0))
    (place / "date").write_text("tomorrow")

    with pytest.raises(EnvironmentFailed, match="other first messages than before"):
        old.open()
    assert task.prompt(0).text == "tomorrow"
    task.environment_of(task.prompt(0)).open().close()


def test_rows_with_prompts_keep_them_and_reach_the_environment(made, place):
    task = made(name=f"jsonl:{place}/rows.jsonl")
    prompt = task.prompt(0)

    assert prompt.text.endswith(" + 1?")
    assert task.environment_of(prompt).row == {
        "prompt": prompt.text, "answer": prompt.answer, "level": 2, "messages": [{"role": "user", "content": prompt.text}]
    }  # fmt: skip
    assert {part.name: part.value for part in task.score(prompt, prompt.answer)} == {"right": 1.0, "length": 1.0}
    assert try_reward(task, None) == 2.0


def test_rows_need_no_answer_and_scores_stay_in_the_environments_processes(made, place):
    (place / "bare.jsonl").write_text('{"prompt": "Go."}\n{"prompt": "Stop."}\n')
    task = made(name=f"jsonl:{place}/bare.jsonl")

    row = task.environment_of(task.prompt(0)).row
    assert row == {"prompt": task.prompt(0).text, "messages": [{"role": "user", "content": task.prompt(0).text}]}
    assert task.score(task.prompt(0), "abc")[1].value == 3.0


def test_a_score_that_fails_is_no_score(made):
    task = made()

    with pytest.raises(RewardError, match=r"prompt 3 failed: games:Game, score: KeyError: 'lamp' \(.*games.py, line"):
        task.score(task.prompt(3), "raise")


def test_first_messages_follow_the_system_prompt(made, place):
    rows = {"name": f"jsonl:{place}/rows.jsonl", "system_prompt": "Be brief."}
    system = Message(role="system", content="Be brief.")
    asking, keeping = made("games:Asking", **rows).prompt(0), made(**rows).prompt(0)

    assert asking.messages == (
        system, Message(role="user", content=f"Q {keeping.text}"), Message(role="tool", content="a door", name="look")
    )  # fmt: skip
    assert keeping.messages == (system, Message(role="user", content=keeping.text))
    assert made(system_prompt="Be brief.").prompt(0).messages[0] == system


def test_tools_are_shown_and_the_row_reaches_their_score(made, place):
    task = made("tools.py", name=f"jsonl:{place}/rows.jsonl")
    prompt = task.prompt(0)
    spec = task.environment_of(prompt)

    assert spec.tools[0]["function"]["name"] == "add"
    with spec.open() as episode:
        assert episode.step(Action("", (ToolCall("add", {"a": 1, "b": 2}),))).messages[0].content == "3"
        assert episode.step(Action(prompt.answer)).done
        assert episode.score()[0].value == 2.0
    with pytest.raises(ConfigError, match="the score of tools.py asks for answer, level; the row has seed"):
        made("tools.py")


def test_a_column_of_messages_is_no_part_of_the_conversation(made, place):
    told = [{"role": "user", "content": "0 + 1?"}, {"role": "assistant", "content": "1"}]
    row = {"prompt": "0 + 1?", "answer": "1", "level": 2, "messages": told}
    (place / "chats.jsonl").write_text(f"{json.dumps(row)}\n{json.dumps({**row, 'prompt': 'and 1 + 0?'})}\n")
    any_turn = TOOLS.replace('messages[-1]["content"] == answer', '"1" in [each["content"] for each in messages]')
    (place / "any_turn.py").write_text(any_turn)
    task = made("any_turn.py", name=f"jsonl:{place}/chats.jsonl")

    assert {part.value for part in task.score(task.prompt(0), "I do not know")} == {0.0}
    assert {part.value for part in task.score(task.prompt(0), "1")} == {2.0}


def test_a_row_without_a_column_that_the_score_asks_for_is_refused(made, place):
    rows = [{"prompt": f"{n}?", "answer": "1", **({"level": 2} if n < 7 else {})} for n in range(8)]
    (place / "some.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (place / "none.jsonl").write_text('{"prompt": "Go.", "level": 2}\n{"prompt": "Stop.", "level": 2}\n')
    (place / "kind.py").write_text(TOOLS.replace("answer, level", 'answer="", level=1'))
    task = made("tools.py", name=f"jsonl:{place}/some.jsonl", evaluation_size=1)
    prompts = [*map(task.prompt, range(task.num_prompts)), task.evaluation_prompt(0)]

    (refused,) = [prompt for prompt in prompts if prompt.refusal]
    assert (refused.text, refused.refusal.partition(";")[0]) == ("7?", "the score of tools.py asks for level")
    with pytest.raises(ConfigError, match="the score of tools.py asks for answer; the row has level, messages, prompt"):
        made("tools.py", name=f"jsonl:{place}/none.jsonl")
    assert not made("kind.py", name=f"jsonl:{place}/none.jsonl").prompt(0).refusal


def test_an_outage_that_an_environment_reports_may_be_its_own_mistake():
    error = EnvironmentFailed("the calculator is down")
    error.__cause__ = NoAnswer("no connection")

    hint = r"\(correct it, or start the server that it needs; a service"
    with pytest.raises(ServiceUnreachable, match=f"^task.environment: an episode: the calculator is down {hint}"):
        raise environment_problem("an episode", error)


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ("games:Broken", "no episode of prompt 2 begins: games:Broken, open: OSError: no board"),
        ("games:Silent", "prompt 2 has no text, and reset of games:Silent returned no message"),
    ],
)
def test_a_prompt_of_which_no_episode_begins_is_refused_and_ends_nothing(made, place, tmp_path, environment, words):
    source = {"label": "games", "name": "seeds", "size": 5, "evaluation_size": 2, "environment": environment}
    mixed = build_task(TaskConfig(name="mixture", sources=({**source, "environment_path": str(place)},)))
    tokenizers.words(eos="<|end|>").save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text('{"model_type": "llama"}')
    prompter = Prompter(str(tmp_path / "model"), use_chat_template=False)

    for prompt in (made(environment).prompt(2), mixed.prompt(2)):
        assert prompt.refusal.startswith(words)
        with pytest.raises(PromptRefused, match=words):
            prompter.encode_prompt(prompt)
    with pytest.raises(ConfigError, match="all of 5 prompts that were tried are refused: no|prompt 4 has no text"):
        try_prompts(mixed, prompter, room=TokenLimits(vocab_size=1000, positions=0), max_new_tokens=8)
    mixed.close()


@pytest.mark.parametrize(
    ("changes", "is_other"),
    [
        ({"max_turns": 9}, True),
        ({"trajectory_s": 60.0}, True),
        ({"max_observation_chars": 100}, True),
        ({"tool_parser": "json"}, True),
        ({"seed": 1}, True),
        ({"size": 6}, True),
        ({"environment": "games:Silent", "name": "arithmetic", "digits": 1}, True),
        ({"step_timeout_s": 60.0, "environment_workers": 3, "environment_memory_bytes": 1 << 31}, False),
    ],
)
def test_digest_is_of_what_nodes_must_agree_on(made, changes, is_other):
    assert (made(**changes).digest != made().digest) == is_other


def test_digest_is_of_the_system_prompt_where_the_environment_has_the_rows(made):
    limits, rows = EpisodeLimits(max_turns=2, trajectory_s=9.0), numbers_task(num_rows=9, size=4, evaluation_size=2)
    (game,) = made().environments

    tasks = [EnvironmentTask(rows, game, limits, seed=0, system_prompt=words) for words in ("", "", "Be brief.")]

    assert tasks[0].digest == tasks[1].digest != tasks[2].digest


def test_digest_is_of_the_release_that_words_errors_of_tools(made, place, monkeypatch):
    (place / "clock.py").write_text(f"is_deterministic = False\n{TOOLS}")
    rows, names = f"jsonl:{place}/rows.jsonl", ("tools.py", "clock.py", "games:Game")
    here = [made(name, name=rows).digest for name in names]
    monkeypatch.setattr(episodes, "RELEASE", "Python 3.99")

    # A learner compares no text of the second; the third words its own.
    assert [made(name, name=rows).digest == one for name, one in zip(names, here, strict=True)] == [False, True, True]


def test_digest_is_of_the_files_bytes(made, place):
    first = made().digest
    (place / "games.py").write_text(GAME + "\n")

    assert made().digest != first


def test_a_mixture_has_sources_with_and_without_environments(place):
    sources = (
        {"label": "sums", "name": "arithmetic", "digits": 1, "environment": ""},
        {"label": "games", "name": "seeds", "size": 100, "evaluation_size": 10},
        {
            "label": "tools",
            "name": f"jsonl:{place}/rows.jsonl",
            "environment": "tools.py",
            "environment_path": str(place),
        },
        {"label": "judged", "name": f"jsonl:{place}/rows.jsonl", "rewards": [{"name": "match", "kind": "match"}]},
    )
    config = TaskConfig(name="mixture", sources=sources, environment="games:Game", environment_path=str(place))
    task = build_task(config)
    found = {}
    for index in range(task.num_prompts):
        found.setdefault(task.source_of(index), index)
    specs = {label: task.environment_of(task.prompt(index)) for label, index in found.items()}

    assert {label: spec and spec.episodes.name for label, spec in specs.items()} == {
        "sums": None, "games": "games:Game", "tools": "tools.py", "judged": None
    }  # fmt: skip
    assert [each.name for each in task.environments] == ["games:Game", "tools.py"]
    with specs["games"].open() as episode:
        assert episode.first[0].content == task.prompt(found["games"]).text
    prompt = task.prompt(found["games"])
    assert task.score(prompt, "abc")[1].value == 3.0
    task.close()


def test_what_does_not_go_together_is_refused(made, place):
    with pytest.raises(ConfigError, match=r"task.environment: the environment gives the reward"):
        made(reward="games:Game")
    with pytest.raises(ConfigError, match=r"task.name: seeds are prompts of an environment \(set task.environment\)"):
        build_task(TaskConfig(name="seeds"))


def test_the_directory_is_that_of_the_configuration_file(place):
    file = place / "learner.toml"
    file.write_text('use_chat_template = true\n[task]\nname = "seeds"\nenvironment = "games:Game"\n')

    assert load(LearnerConfig, file).task.environment_path == str(place)
    assert load(LearnerConfig, file, ["task.environment_path=lib"]).task.environment_path == str(place / "lib")
    assert load(LearnerConfig, file, ["task.environment="]).task.environment_path == ""


def test_a_turn_that_no_rollout_may_hold_is_refused_at_the_start():
    keys = ["use_chat_template=true", "task.name=seeds", "task.environment=games:Game", "sampling.max_new_tokens=8193"]

    with pytest.raises(ConfigError, match="max_new_tokens 8193 is above max_trajectory_tokens 8192"):
        load(LearnerConfig, None, keys)
    # One turn is no trajectory.
    for right in ("sampling.max_trajectory_tokens=8193", "task.max_turns=1", "task.environment="):
        assert load(LearnerConfig, None, [*keys, right]).sampling.max_new_tokens == 8193


def test_a_prompt_is_one_of_this_task(made):
    task = made()

    with pytest.raises(AssertionError, match="a prompt of this task"):
        task.environment_of(Prompt(index=0, text="?", answer=""))
