"""Rows of which no group can be made: they cost nothing but themselves, and a person is told where none is left."""

import asyncio
import json

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from heterorl.common.errors import ConfigError, EngineError, PromptTooLong, RewardError, ServiceUnreachable
from heterorl.common.generation.inference_engine import NUM_SEQUENCES, canary_texts
from heterorl.common.model.model_loading import TokenLimits
from heterorl.common.process import metrics
from heterorl.common.tasks.rewards import answer_match
from heterorl.common.tasks.task_config import TaskConfig, build_task
from heterorl.common.text.conversation import try_prompts
from heterorl.common.text.prompter import Prompter
from heterorl.common.types.rollout import ReturnReason, RewardPart
from tests.support.plain_task import PlainTask
from tests.support.run import CONTRACT
from tests.support.sampler_world import World

ALTERNATE = (
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}{{ m['content'] }} {% endfor %}"
)
"""The rule of the templates of Mistral, Gemma and Llama 2."""
REFUSED, LONG = {7, 11, 30}, {19}


@pytest.fixture(scope="module")
def prompter(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    words = Tokenizer(models.WordLevel({"<eos>": 0, "<unk>": 1, "q": 2}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", unk_token="<unk>")
    tokenizer.chat_template = ALTERNATE
    tokenizer.save_pretrained(directory)
    (directory / "config.json").write_text(json.dumps({"model_type": "gpt2", "eos_token_id": 0, "vocab_size": 3}))
    return Prompter(str(directory), use_chat_template=True)


def rows_of(path, *, refused, long=()):
    """A task of CONTRACT.num_prompts training prompts by a file of messages; `refused` and `long` are positions."""
    rows = []
    for index in range(CONTRACT.num_prompts):
        ask = [{"role": "user", "content": f"q {index}" + " q" * (5000 if index in long else 0)}]
        rows.append({"messages": ask * (2 if index in refused else 1), "answer": "2"})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    evaluation_requests = path.with_name("held-out.jsonl")
    evaluation_requests.write_text(
        json.dumps({"messages": [{"role": "user", "content": "q held out"}], "answer": "2"}) + "\n"
    )
    config = TaskConfig(name=f"jsonl:{path}", evaluation_path=str(evaluation_requests), data={"messages": "messages"})
    return build_task(config)


class RunTask(PlainTask):
    """A task's prompts under the digest of the tests' contract; scoring fails for some answers."""

    digest = CONTRACT.task_digest

    def __init__(self, task, unscored=()):
        self.num_prompts, self.num_evaluation_prompts = task.num_prompts, task.num_evaluation_prompts
        self.prompt, self.evaluation_prompt = task.prompt, task.evaluation_prompt
        self.unscored = set(unscored)

    def source_of(self, index):
        return "rows"

    def score(self, prompt, completion):
        if prompt.index in self.unscored:
            raise RewardError("the right answer cannot be parsed")
        return (RewardPart(name="correct", value=1.0),)


@pytest.fixture
async def world(tmp_path, prompter):
    world = await World.open(tmp_path, groups_per_version=8)
    await world.run.publish()
    world.prompter, world.errors_before = prompter, metrics.REWARD_ERRORS.labels("rows")._value.get()
    yield world
    await world.close()


def bound(engine, room):
    """Make the engine refuse prompts as vLLM's adapter does."""
    submit = engine.submit

    def checked(request):
        if request.prompt.size > room:
            raise PromptTooLong("engine.max_model_len", f"{room} holds no prompt of {request.prompt.size}")
        submit(request)

    engine.submit = checked


async def closed(world):
    status = await world.core.get_status()
    assert status.ledger.is_balanced
    return status.ledger.closed


async def acked_prompts(world):
    rows = await world.core.database.run(lambda c: c.execute("SELECT DISTINCT assignment FROM groups").fetchall())
    return len(rows)


async def test_single_rows_end_no_sampler_and_stop_no_run(world, tmp_path, caplog):
    world.task = RunTask(rows_of(tmp_path / "rows.jsonl", refused=REFUSED, long=LONG), unscored={3})
    before = metrics.REFUSED_PROMPTS.labels("rows", "prompt_refused")._value.get()
    world.start()
    bound(world.engine, 4096)
    # Two passes over the prompts.
    await world.until_acknowledged(2 * CONTRACT.num_prompts)
    assert not world.is_ended
    await world.until(lambda: metrics.REFUSED_PROMPTS.labels("rows", "prompt_refused")._value.get() >= before + 9)
    found = await closed(world)

    assert found[ReturnReason.PROMPT_REFUSED] >= len(REFUSED)
    assert found[ReturnReason.PROMPT_TOO_LONG] >= 1
    assert found[ReturnReason.REWARD_FAILED] >= 1
    lines = [record.getMessage() for record in caplog.records if "gives no group (" in record.getMessage()]
    assert sorted(int(line.split()[1]) for line in lines) == sorted(REFUSED | LONG), "each row once"
    assert any("roles must alternate" in line for line in lines)
    assert "NO PROMPT" not in caplog.text


async def test_a_row_that_fails_the_engine_is_closed_and_others_go_on(world, tmp_path):
    world.task = RunTask(rows_of(tmp_path / "rows.jsonl", refused=(), long=LONG))
    world.start()
    engine, collect = world.engine, world.engine.collect

    def failing():
        if any(request.prompt.size > 4096 for request, _ in engine._waiting):
            engine._waiting, engine.version = [], -1
            raise EngineError("the device is out of memory")
        return collect()

    engine.collect = failing
    await world.until_acknowledged(2 * CONTRACT.num_prompts)
    while not (found := await closed(world)).get(ReturnReason.ENGINE_FAILED):
        await world.passed(1.0)

    assert not world.is_ended
    assert set(found) == {ReturnReason.ENGINE_FAILED}


async def test_a_reward_that_no_learner_trains_on_closes_its_row(world, tmp_path):
    class Large(RunTask):
        def score(self, prompt, completion):
            return (RewardPart(name="correct", value=2e6 if prompt.index == 3 else 1e6),)

    world.task = Large(rows_of(tmp_path / "rows.jsonl", refused=()))
    world.start()
    await world.until_acknowledged(2 * CONTRACT.num_prompts)
    while not (await closed(world)).get(ReturnReason.REWARD_FAILED):
        await world.passed(1.0)

    assert not world.is_ended


class MathTask(RunTask):
    """The same with the reward of the task itself."""

    def __init__(self, task):
        super().__init__(task)
        self.score, self.answer_problem = task.score, task.answer_problem


class Speaking:
    """A prompter whose completions are all one text, but for the first ones that are read."""

    def __init__(self, text, *first):
        self.text, self.first = text, list(first)

    def encode_prompt(self, prompt):
        return np.array([2, 3], np.int32)

    def decode(self, token_ids):
        return self.first.pop() if self.first else self.text

    def completion(self, token_ids, prompt=None):
        return self.decode(token_ids)


def math_rows(path, *, unreadable):
    numbers = range(CONTRACT.num_prompts)
    answers = ["x is 5" if number in unreadable else "7" for number in numbers]
    path.write_text("".join(json.dumps({"prompt": f"{n}?", "answer": answers[n]}) + "\n" for n in numbers))
    evaluation_requests = path.with_name("held-out.jsonl")
    evaluation_requests.write_text(json.dumps({"prompt": "held out", "answer": "1"}) + "\n")
    config = TaskConfig(
        name=f"jsonl:{path}", evaluation_path=str(evaluation_requests), match="math_verify", reward_timeout_s=0.5
    )  # fmt: skip
    # Processor time alone, however long it takes by the clock.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(answer_match, "PATIENCE", 1000.0)
        return build_task(config)


@pytest.mark.process
@pytest.mark.slow
async def test_rows_whose_answers_cannot_be_read_are_not_generated(world, tmp_path, caplog):
    task = math_rows(tmp_path / "rows.jsonl", unreadable={5, 6, 40})
    world.task, world.prompter = MathTask(task), Speaking("it is $7$")
    try:
        world.start()
        await world.until_acknowledged(2 * CONTRACT.num_prompts)
        found = await closed(world)
    finally:
        task.close()

    assert found[ReturnReason.REWARD_FAILED] >= 3
    # No reward was asked for in vain: the engine saw none of them.
    assert metrics.REWARD_ERRORS.labels("rows")._value.get() == world.errors_before
    named = {line.getMessage().split()[1] for line in caplog.records if "gives no group (" in line.getMessage()}
    assert named == {"5", "6", "40"}


@pytest.mark.process
@pytest.mark.slow
async def test_completions_that_take_too_long_to_compare_are_wrong_answers(world, tmp_path):
    task = math_rows(tmp_path / "rows.jsonl", unreadable=())
    world.task, world.prompter = MathTask(task), Speaking("$7$", "$\\boxed{9^{9^{9^{9}}}}$")
    try:
        world.start()
        await world.until_acknowledged(2)
        assert not world.prompter.first
        assert await closed(world) == {}
    finally:
        task.close()

    assert metrics.REWARD_ERRORS.labels("rows")._value.get() == world.errors_before


async def test_the_wait_for_groups_ends_with_the_samplers_own_error(world):
    world.start()
    world.running.cancel()
    await asyncio.wait([world.running])

    async def fail():
        raise EngineError("the engine is gone")

    world.running = asyncio.create_task(fail())
    with pytest.raises(EngineError, match="the engine is gone"):
        await world.until_acknowledged(1)


@pytest.mark.slow
async def test_data_that_is_refused_altogether_is_said_loudly_and_does_not_spin(world, tmp_path, caplog):
    world.task = RunTask(rows_of(tmp_path / "rows.jsonl", refused=set(range(CONTRACT.num_prompts))))
    world.start()
    await world.passed(120.0)

    assert not world.is_ended
    assert "NO PROMPT for 8 groups in a row" in caplog.text
    assert world.link.calls["lease_work"] < 200
    (site,) = (await world.core.get_status()).sites
    assert site.problem.startswith("NO PROMPT for")
    # One site whose prompts are all refused closes next to nothing.
    assert sum((await closed(world)).values()) <= 10


async def test_a_reward_that_fails_is_told_with_its_reason_once_a_minute(world, caplog):
    world.task = RunTask(build_task(TaskConfig(name="arithmetic")), unscored=range(10_000))
    world.task.num_prompts = CONTRACT.num_prompts
    world.start()
    await world.passed(3.0)

    lines = [record.getMessage() for record in caplog.records]
    lost = [line for line in lines if "lost member" in line]
    assert len(lost) == len([line for line in lines if "gives no group" in line]) == 1
    assert "(reward_failed): the right answer cannot be parsed (correct task.reward" in lost[0]
    assert metrics.REWARD_ERRORS.labels("rows")._value.get() > world.errors_before + 1


@pytest.mark.slow
async def test_rewards_that_all_fail_are_said_in_the_status(world):
    world.task = RunTask(build_task(TaskConfig(name="arithmetic")), unscored=range(10_000))
    world.task.num_prompts = CONTRACT.num_prompts
    world.start()
    await world.passed(20.0)

    (site,) = (await world.core.get_status()).sites
    assert site.problem.startswith("NO REWARD for")


def test_start_refuses_data_of_which_more_than_half_is_refused(prompter, tmp_path, caplog):
    def tried(path, *, refused=(), long=(), vocab_size=3, max_new_tokens=8):
        task = rows_of(tmp_path / path, refused=refused, long=long)
        try_prompts(
            task, prompter, room=TokenLimits(vocab_size=vocab_size, positions=512), max_new_tokens=max_new_tokens
        )

    every = set(range(CONTRACT.num_prompts))
    half = set(range(CONTRACT.num_prompts // 2))
    tried("some.jsonl", refused=half - {0, 1}, long={1})
    assert "prompts that were tried are refused: " in caplog.text
    with pytest.raises(ConfigError, match="use_chat_template: [0-9]+ of 32 prompts that were tried are refused: "):
        tried("most.jsonl", refused=every - set(range(8)))
    said = "all of 32 prompts that were tried are refused: "
    with pytest.raises(ConfigError, match=f"use_chat_template: {said}.*must alternate"):
        tried("all.jsonl", refused=every)
    with pytest.raises(ConfigError, match=f"model_dir: {said}512 tokens hold no prompt of"):
        tried("long.jsonl", long=every)
    with pytest.raises(ConfigError, match=f"model_dir: {said}the tokenizer writes token 2, and the model has 2"):
        tried("foreign.jsonl", vocab_size=2)
    with pytest.raises(ConfigError, match="sampling.max_new_tokens: 512 new tokens leave no room for a prompt"):
        tried("none.jsonl", max_new_tokens=512)


def test_canary_leaves_out_held_out_prompts_that_are_refused(prompter, tmp_path):
    task = rows_of(tmp_path / "rows.jsonl", refused={0, 2})
    task.evaluation_prompt, task.num_evaluation_prompts = task.prompt, task.num_prompts
    texts = canary_texts(task, prompter)

    wanted = [prompter.encode_prompt(task.prompt(index)).tolist() for index in (1, 3, 4, 5)]
    assert [text.prompt.tolist() for text in texts] == wanted
    assert len(texts) == NUM_SEQUENCES


FLAKY = """
import pathlib

class Flaky:
    def reset(self, row, *, seed):
        path = pathlib.Path("failures")
        left = int(path.read_text())
        if seed == 3 and left:
            path.write_text(str(left - 1))
            raise ConnectionError("the server restarts")
        if seed == 4:
            raise KeyError("a row that no node can play")
        return "q " * seed

    def step(self, action):
        return None

    def score(self):
        return 1.0
"""


@pytest.mark.process
@pytest.mark.parametrize("own", [{"name": "seeds"}, {"name": "mixture", "sources": [{"label": "a", "name": "seeds"}]}])
def test_canary_of_an_environment_is_the_same_after_failures_or_the_start_ends(own, prompter, tmp_path, caplog):
    (tmp_path / "flaky.py").write_text(FLAKY)

    def ids_of(num_failures):
        (tmp_path / "failures").write_text(str(num_failures))
        options = {"environment": "flaky:Flaky", "environment_path": str(tmp_path), "evaluation_size": 8}
        task = build_task(TaskConfig(**own, **options))
        try:
            return [text.prompt.tolist() for text in canary_texts(task, prompter)]
        finally:
            task.close()

    assert ids_of(2) == ids_of(0)
    assert caplog.text.count("held-out prompt 1 is asked for again: no episode of prompt 1 begins") == 2
    with pytest.raises(ServiceUnreachable, match="an episode of held-out prompt 1: .*the server restarts"):
        ids_of(100)
