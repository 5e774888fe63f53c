"""Groups from assignments: real engine and tokenizer, a task whose answers the test knows."""

import dataclasses
import os
import signal
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from heterorl.common.errors import RewardError
from heterorl.common.generation.hf_engine import HfEngine
from heterorl.common.generation.inference_engine import generate_all
from heterorl.common.generation.tiny_model import EOS, write_tiny_model
from heterorl.common.model.tensors import store
from heterorl.common.process import logs
from heterorl.common.process.clock import SystemClock
from heterorl.common.tasks.task_config import TaskConfig, build_task
from heterorl.common.text.prompter import Prompter
from heterorl.common.types.common import Digest, LogprobMode, SamplingSemantics, SiteId
from heterorl.common.types.rollout import FinishReason, RewardPart, WorkAssignment  # fmt: skip
from heterorl.common.weights.arena import Arena
from heterorl.sampler.rollout.completion_collector import WorkLog
from heterorl.sampler.rollout.group_builder import GroupBuilder
from tests.support.limits import WAIT_S
from tests.support.plain_task import PlainTask
from tests.support.sampler_world import World

ROOT = Digest("ab" * 32)
BROKEN = 13


class LengthTask(PlainTask):
    """Rewards length in two parts; its verifier breaks on prompt 13."""

    def __init__(self):
        self.seen = []

    def score(self, prompt, completion):
        self.seen.append((prompt.index, completion))
        if prompt.index == BROKEN and len(self.seen) % 2 == 0:
            raise RewardError("the verifier broke")
        return (RewardPart(name="length", value=len(completion) / 8), RewardPart(name="bonus", value=0.25))


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    model_dir = write_tiny_model(tmp_path_factory.mktemp("model"), seed=0, hidden_size=32, num_layers=1)
    prompter = Prompter(str(model_dir), use_chat_template=False)
    engine = HfEngine(
        model_dir=str(model_dir), published_dtype="fp32", compute_dtype="fp32", device="cpu", batch_rows=64,
        end_token_ids=prompter.end_token_ids,
        sampling=SamplingSemantics(
            temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=8, logprob_mode=LogprobMode.PROCESSED
        ),
    )  # fmt: skip
    arena = Arena(engine.layout)
    store(engine.model, arena)
    engine.load(arena, 5)
    return engine, prompter


def maker_of(parts):
    _, prompter = parts
    return GroupBuilder(
        task=LengthTask(), prompter=prompter, site=SiteId("eu-1"), incarnation="abcd", group_size=4,
        clock=SystemClock(),
    )  # fmt: skip


def work(*indices):
    return [WorkAssignment(id=100 + index, prompt_index=index, seed=1000 + index, lease_s=60.0) for index in indices]


def test_prompts_that_begin_episodes_begin_them_together(parts):
    together = threading.Barrier(3)

    class Reset(LengthTask):
        def prompt(self, index):
            together.wait(WAIT_S)
            return super().prompt(index)

    conversations = SimpleNamespace(max_live=8, of=lambda prompt: None)
    builder = dataclasses.replace(maker_of(parts), task=Reset(), conversations=conversations)
    drafts, _ = builder.begin(work(2, 0, 1))

    assert [draft.prompt.index for draft in drafts] == [2, 0, 1]


def made(parts, builder, assignments):
    """Their groups, and the assignments that gave none."""
    engine, _ = parts
    drafts, _ = builder.begin(assignments)
    members = generate_all(
        engine,
        [draft.prompt_token_ids for draft in drafts],
        seeds=[draft.seed for draft in drafts],
        num_per_prompt=builder.group_size,
    )
    groups, failed = [], []
    for draft, completions in zip(drafts, members, strict=True):
        draft.completions = dict(enumerate(completions))
        try:
            draft.scores = {
                number: builder.score_all(draft.prompt, [one])[0] for number, one in draft.completions.items()
            }
        except RewardError:
            failed.append(draft.assignment.id)
            continue
        groups.append(builder.group(draft, state_roots={5: ROOT}))
    return groups, failed


def test_each_assignment_gives_one_group_that_says_where_it_comes_from(parts):
    builder = maker_of(parts)

    groups, failed = made(parts, builder, work(3, 7))

    assert failed == []
    assert {(group.id.site, group.id.incarnation) for group in groups} == {("eu-1", "abcd")}
    assert [(group.assignment, group.prompt_index) for group in groups] == [(103, 3), (107, 7)]
    assert [builder.prompter.decode(group.prompt_token_ids) for group in groups] == ["3+1=", "7+1="]
    assert all(group.state_root == ROOT and group.oldest_version == 5 for group in groups)
    assert all(len(group.rollouts) == 4 for group in groups)


def test_scored_text_is_the_completion_without_its_end_and_the_reward_is_the_sum_of_its_parts(parts):
    builder = maker_of(parts)

    groups, _ = made(parts, builder, work(*range(8)))

    rows = [(group.prompt_index, row) for group in groups for row in group.rollouts]
    assert {row.finish_reason for _, row in rows} == {FinishReason.EOS, FinishReason.LENGTH}
    assert [index for index, _ in builder.task.seen] == [index for index, _ in rows]
    for (_, text), (_, row) in zip(builder.task.seen, rows, strict=True):
        assert EOS not in text
        assert [(part.name, part.value) for part in row.reward_parts] == [("length", len(text) / 8), ("bonus", 0.25)]
        assert row.reward == len(text) / 8 + 0.25
        assert row.spans[0].start == 0
        assert row.spans[-1].end == row.token_ids.size == row.sampler_logprobs.size


def test_broken_verifier_gives_no_group(parts):
    # T13: a reward error is not a zero reward.
    groups, failed = made(parts, maker_of(parts), work(3, BROKEN, 7))

    assert failed == [100 + BROKEN]
    assert [group.prompt_index for group in groups] == [3, 7]


@pytest.mark.process
async def test_a_reward_that_hangs_costs_its_own_group_only(parts, tmp_path, caplog, monkeypatch):
    # Every failure has its line.
    monkeypatch.setattr(logs, "RARELY_S", 0.0)
    # Hangs on a completion of one prompt while there is no mark, crashes on every one of another.
    (tmp_path / "mine.py").write_text(
        "import os, time\n"
        "def score(prompt, completion, answer):\n"
        "    if prompt == HANGS:\n"
        "        try:\n            mark = open(MARK, 'x')\n"
        "        except FileExistsError:\n            return 1.0\n"
        "        print(os.getpid(), file=mark, flush=True)\n"
        "        time.sleep(1000)\n"
        "    if prompt == CRASHES:\n        os._exit(1)\n"
        "    return float(len(completion))\n"
    )
    plain = build_task(TaskConfig(digits=1))
    mark = tmp_path / "mark"
    source = (tmp_path / "mine.py").read_text().replace("MARK", repr(str(mark)))
    for name, index in (("HANGS", 2), ("CRASHES", 4)):
        source = source.replace(name, repr(plain.prompt(index).text))
    (tmp_path / "mine.py").write_text(source)
    task = build_task(
        TaskConfig(digits=1, reward="mine:score", reward_path=str(tmp_path), reward_timeout_s=600.0, reward_workers=2)
    )
    builder = dataclasses.replace(maker_of(parts), task=task)
    world = await World.open(tmp_path / "world")
    world.task, world.prompter = task, builder.prompter
    world.settings = {"work_ahead_s": 10.0, "swap": "in_flight"}
    await world.run.publish()

    async def lease_work(**wanted):
        grant = await world.core.lease_work(**wanted)
        numbered = [dataclasses.replace(assignment, prompt_index=assignment.id % 6) for assignment in grant.assignments]
        return dataclasses.replace(grant, assignments=tuple(numbered))

    world.link.replaced["lease_work"] = lease_work
    failed = []

    async def abandon_work(*, assignments, reason, **named):
        # Those without a reason only ran out.
        failed.extend(assignments if reason is not None else ())
        await world.core.abandon_work(assignments=assignments, reason=reason, **named)

    world.link.replaced["abandon_work"] = abandon_work
    world.start()
    try:
        # Others are spooled while it hangs, however slow they are: its limit is far.
        await world.until(lambda: mark.exists() and mark.read_text().endswith("\n"))
        begun = world.outbox.next_sequence
        await world.until(lambda: world.outbox.next_sequence > begun + 1)
        assert 2 not in {number % 6 for number in failed}
        os.kill(int(mark.read_text()), signal.SIGKILL)
        await world.until(lambda: {number % 6 for number in failed} == {2, 4})
        # It hangs again, now until its limit.
        for worker in task._reward.pool.workers:
            worker.timeout_s = 0.5
        mark.unlink()
        await world.until(lambda: "the reward function failed on prompt 2: no answer in 0.5 s" in caplog.text)
    finally:
        await world.close()
        task.close()

    assert "the reward function failed on prompt 2: the process was ended by SIGKILL" in caplog.text


def test_group_is_the_same_whatever_shares_its_batch(parts):
    alone = made(parts, maker_of(parts), work(7))[0][0]
    among = made(parts, maker_of(parts), work(1, 2, 7, 4))[0][2]

    for left, right in zip(alone.rollouts, among.rollouts, strict=True):
        assert left.token_ids.tolist() == right.token_ids.tolist()
        # Shapes of the matrix products differ, so float32 rounds otherwise.
        np.testing.assert_allclose(left.sampler_logprobs, right.sampler_logprobs, atol=1e-5)


def test_log_says_groups_and_speed_once_a_minute(caplog):
    caplog.set_level("INFO")
    log = WorkLog()
    log.num_groups = 2

    for now in (0.0, 1.0):
        log.say(tokens_per_s=1234.0, now=now, version=1, head=3)

    assert caplog.messages == ["the sampler made 2 groups, 1,234 tokens/s; version 1, 2 behind the head"]
