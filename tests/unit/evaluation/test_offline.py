import dataclasses
import gc
import io
import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from heterorl.cli.models import _show
from heterorl.common.errors import ConfigError, EngineError, InvalidRequest, PromptRefused, PromptTooLong, RewardError
from heterorl.common.evaluation.summary import summarize
from heterorl.common.generation.inference_engine import Completion, Finished
from heterorl.common.tasks.task import AnswerProblem, Prompt
from heterorl.common.tasks.task_config import TaskConfig, build_task
from heterorl.common.types.evaluation import EvaluationDraws, PromptResult, ScoredSample
from heterorl.common.types.rollout import FinishReason, RewardPart, Span
from heterorl.common.wire.rollout_messages import results_from_pb
from heterorl.evaluation.evaluate_sets import Row, as_json, by_source, evaluate_set, tables
from heterorl.evaluation.subject import Subject
from heterorl.sampler.prompt_evaluator import SiteSet, blocks_of, seed_of
from heterorl.v1 import evaluation_pb2
from tests.support.plain_task import PlainTask


def draws(**changes):
    values = {"num_prompts": 5, "num_samples": 20, "temperature": 0.7, "max_new_tokens": 8, **changes}
    return EvaluationDraws(**values)


class Bytes:
    """Tokens are bytes."""

    def encode_prompt(self, prompt):
        return np.frombuffer(prompt.text.encode(), np.uint8).astype(np.int32)

    def decode(self, token_ids):
        return bytes(token_ids.tolist()).decode()

    def completion(self, token_ids, prompt=None):
        return self.decode(token_ids)


class Echo(PlainTask):
    """A task whose completion is right when it is the prompt's index; `fails` raises for it."""

    num_evaluation_prompts = 5
    num_workers = 3
    digest = ""

    def __init__(self, fails=()):
        self.fails = fails

    def evaluation_prompt(self, index):
        return Prompt(index=1000 + index, text=f"p{index}", answer=str(index))

    def score(self, prompt, completion):
        if completion in self.fails:
            raise RewardError("the verifier died")
        return (RewardPart(name="right", value=float(completion == prompt.answer)),)


class Machine:
    """An engine that answers with the prompt's number, members backwards, the last request first."""

    max_running = 16
    version = -1

    def __init__(self, lost=False):
        self.in_flight, self.requests, self.most, self.lost, self.num_cancels = [], [], 0, lost, 0

    def submit(self, request):
        if request.prompt.size > 2:
            raise PromptTooLong("engine.max_model_len", "too long")
        self.in_flight += [(request, member) for member in range(request.num_completions)]
        self.requests.append(request)
        self.most = max(self.most, len(self.in_flight))

    def collect(self):
        if not self.in_flight:
            # A request may be refused while this is asked.
            return []
        request, member = self.in_flight.pop()
        if self.lost:
            raise EngineError("the engine lost it")
        number = request.prompt[1:2]
        reason = FinishReason.LENGTH if member % 2 else FinishReason.EOS
        spans = (Span(version=self.version, start=0, end=1),)
        completion = Completion(token_ids=number, logprobs=None, finish_reason=reason, spans=spans)
        return [Finished(key=request.key, member=member, completion=completion)]

    def cancel(self):
        self.num_cancels += 1
        self.in_flight = []


def evaluated(engine, task=None, *, prompter=None, **changes):
    seen = []
    subject = Subject(name="", version=-1, engine=engine, prompter=prompter or Bytes(), max_trajectory_tokens=100)
    of = SiteSet(name="set", task=task or Echo(), draws=draws(**changes))
    results = evaluate_set(subject, of, on_prompt=seen.append)
    return results, seen


def test_every_completion_is_scored_once_and_in_its_place():
    engine = Machine()
    results, seen = evaluated(engine)

    assert [result.prompt_index for result in results] == [0, 1, 2, 3, 4]
    assert sorted(result.prompt_index for result in seen) == [0, 1, 2, 3, 4]
    for result in results:
        assert [sample.reward for sample in result.samples] == [1.0] * 20
        # Blocks of 8, 8 and 4; every second member of each was cut.
        assert [sample.is_truncated for sample in result.samples] == [False, True] * 10
        assert result.samples[3].text == str(result.prompt_index)


def test_the_engine_has_little_more_than_it_computes_at_once():
    engine = Machine()
    evaluated(engine)

    # 16 rows, a quarter more, and the block that went over the brim.
    assert 16 <= engine.most <= 16 + 4 + 8


def test_draws_depend_on_seed_prompt_and_block_alone():
    engine, alone = Machine(), Machine()
    evaluated(engine)
    evaluated(alone, num_prompts=4)

    of_3, of_3_alone = (
        {request.seed for request in each.requests if request.prompt[1] == ord("3")} for each in (engine, alone)
    )
    assert of_3_alone == of_3
    assert len({request.seed for request in engine.requests}) == 15
    assert seed_of(draws(seed=1), prompt_index=3, first=0) not in of_3
    assert [(block.start, len(block)) for block in blocks_of(draws())] == [(0, 8), (8, 8), (16, 4)]
    assert {request.sampling.temperature for request in engine.requests} == {0.7}


def test_temperature_zero_takes_the_most_likely_token():
    sampling = draws(temperature=0.0, top_p=0.5).sampling

    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (1.0, 1.0, 1)


def test_a_reward_that_fails_is_left_out():
    results, _ = evaluated(Machine(), Echo(fails=("2",)))

    assert {sample.reward for sample in results[2].samples} == {None}
    assert {sample.reward for sample in results[1].samples} == {1.0}


@pytest.mark.parametrize("value", [1.1e6, 1e200, -1e200, float("inf"), float("nan")])
def test_a_reward_beyond_all_bounds_is_left_out_and_no_coordinator_takes_it(value):
    class Huge(Echo):
        def score(self, prompt, completion):
            return (RewardPart(name="right", value=value),)

    results, _ = evaluated(Machine(), Huge())
    sample = evaluation_pb2.ScoredSample(reward=value, num_tokens=1)

    assert {sample.reward for result in results for sample in result.samples} == {None}
    with pytest.raises(InvalidRequest, match="reward of prompt 3 is not a number of at most 1e"):
        results_from_pb([evaluation_pb2.PromptResult(prompt_index=3, samples=[sample])])


def test_an_engine_that_gives_up_is_said_once_and_left_empty(caplog):
    engine = Machine(lost=True)

    with pytest.raises(EngineError):
        evaluated(engine)
    gc.collect()
    # asyncio logs an error that nothing took.
    assert [record.getMessage() for record in caplog.records] == []
    assert engine.num_cancels
    assert engine.in_flight == []


class Long(Echo):
    def evaluation_prompt(self, index):
        return Prompt(index=index, text=f"p{index}" + "p" * (index == 2), answer=str(index))


class Refusing(Bytes):
    def encode_prompt(self, prompt):
        if prompt.text == "p3":
            raise PromptRefused("use_chat_template", "roles must alternate")
        return super().encode_prompt(prompt)


def test_prompts_that_are_refused_have_no_reward_and_the_others_have_theirs(caplog):
    results, seen = evaluated(Machine(), Long(), prompter=Refusing())

    assert [[sample.reward for sample in result.samples] for result in results] == [
        [1.0] * 20, [1.0] * 20, [None] * 20, [None] * 20, [1.0] * 20,
    ]  # fmt: skip
    assert len(seen) == 5
    lines = [record.getMessage() for record in caplog.records if "cannot be drawn" in record.getMessage()]
    assert sorted(line.split()[2] for line in lines) == ["2", "3"], "each prompt once"
    assert summarize(results, num_samples=20).num_errors == 40


@pytest.mark.parametrize("index", [2, 3])
def test_a_set_that_is_refused_altogether_says_why(index):
    class Only(Long):
        def evaluation_prompt(self, number):
            return super().evaluation_prompt(index + number)

    with pytest.raises(PromptRefused, match="too long" if index == 2 else "roles must alternate"):
        evaluated(Machine(), Only(), prompter=Refusing(), num_prompts=1)


def test_a_prompt_whose_answer_cannot_be_read_is_not_drawn(caplog):
    class Unread(Echo):
        def answer_problem(self, prompt):
            problem = AnswerProblem(key="task.rewards[0]", text="cannot be read", action="correct it")
            return problem if prompt.answer == "3" else None

    engine = Machine()
    results, _ = evaluated(engine, Unread())

    assert {sample.reward for sample in results[3].samples} == {None}
    assert {request.prompt.tobytes() for request in engine.requests} == {
        Bytes().encode_prompt(Prompt(index=0, text=f"p{n}", answer="")).tobytes() for n in (0, 1, 2, 4)
    }
    assert (
        "held-out prompt 3 cannot be drawn and stays without a score: task.rewards[0]: '3': cannot be read"
        in caplog.text
    )


@pytest.mark.parametrize("num_samples", [1, 8, 64])
def test_a_table_at_80_columns_shows_each_number_whole(num_samples):
    results, _ = evaluated(Machine(), num_samples=num_samples)
    row = Row(
        subject="../learner/trained", version=-1, seconds=1234.5, results=tuple(results),
        set=SiteSet(name="math500", task=Echo(), draws=draws(num_samples=num_samples)),
        summary=summarize(results, num_samples=num_samples, pass_reward=1.0),
    )  # fmt: skip
    console = Console(width=80, file=io.StringIO())

    console.print(*tables([row], width=80))

    printed = console.file.getvalue()
    assert "…" not in printed
    assert all(word in printed for word in ("avg@n", "unscored", "1234.5", f"{row.summary.average.low:.3f}"))


def test_a_mixture_has_a_line_for_each_source():
    """Their rewards may have different scales, so that one mean says little."""
    sources = ({"label": "sums", "name": "arithmetic", "digits": 1}, {"label": "rows", "name": "progression"})
    task = build_task(TaskConfig(name="mixture", sources=sources))
    of = SiteSet(name="task", task=task, draws=draws(num_prompts=8, num_samples=1))
    results = []
    for index in range(8):
        reward = 1.0 if task.evaluation_source_of(index) == "rows" else 0.25
        samples = (ScoredSample(reward=reward, num_tokens=3, is_truncated=False),)
        results.append(PromptResult(prompt_index=index, samples=samples))
    row = Row(
        subject="trained", version=-1, seconds=1234.5, results=tuple(results), set=of,
        summary=summarize(results, num_samples=1), sources=by_source(of, results),
    )  # fmt: skip
    console = Console(width=80, file=io.StringIO(), markup=False)
    console.print(*tables([row], width=80))

    lines = [" ".join(line.split()) for line in console.file.getvalue().splitlines()]
    assert [line.split(" [")[0] for line in lines if "0 [" in line or "5 [" in line] == [
        "trained task 0.625", "- rows 1.000", "- sums 0.250"
    ]  # fmt: skip
    assert [line for line in lines if line.endswith("1 3 0 0") or "1234.5" in line] == [
        "trained task 8 1 3 0 0 1234.5", "- rows 4 1 3 0 0", "- sums 4 1 3 0 0"
    ]  # fmt: skip
    (written,) = as_json([row], with_texts=False)["evaluations"]
    assert {label: of_source["average"]["mean"] for label, of_source in written["sources"].items()} == {
        "sums": 0.25, "rows": 1.0,
    }  # fmt: skip
    # A task of one source has no such lines.
    assert by_source(dataclasses.replace(of, task=Echo()), results) == ()


def test_a_full_disk_takes_the_file_and_not_what_is_shown(capsys):
    results, _ = evaluated(Machine())
    row = Row(
        subject="trained", version=-1, seconds=1.0, results=tuple(results),
        set=SiteSet(name="math500", task=Echo(), draws=draws()),
        summary=summarize(results, num_samples=1, pass_reward=1.0),
    )  # fmt: skip

    with pytest.raises(ConfigError, match="--out: cannot write: .*No space left"):
        _show([row], out=Path("/dev/full"), is_json=True)

    assert json.loads(capsys.readouterr().out)
