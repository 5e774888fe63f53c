"""Several groups are scored at once, and reach the inbox in the order of their stream."""

import asyncio
import dataclasses
import random
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from heterorl.common.errors import RewardError, StaleEpoch, Unreachable
from heterorl.common.process.backoff import Backoff
from heterorl.common.process.clock import SystemClock
from heterorl.common.tasks.task import Prompt
from heterorl.common.types.rollout import RewardPart
from heterorl.learner.checks.findings import VerificationConfig
from heterorl.learner.checks.verifier import Limits, VerificationContext, Verifier
from heterorl.learner.run.inbox import Inbox, feed
from heterorl.learner.sample_notes import SampleNotes
from tests.support.learner_world import GROUP_SIZE, VOCAB, queued
from tests.support.limits import WAIT_S
from tests.support.plain_task import PlainTask


class SlowTask(PlainTask):
    """A task whose reward of some prompts waits for the test; every other reward is the one that was sent."""

    num_prompts = 1000

    def __init__(self, *, num_workers, waits_for=(), fails_for=()):
        self.num_workers, self.fails_for = num_workers, fails_for
        self.gates = {index: threading.Event() for index in waits_for}
        self.begun, self.changed, self.most, self.now = [], threading.Condition(), 0, set()

    def prompt(self, index):
        return Prompt(index=index, text="", answer="")

    def score(self, prompt, completion):
        with self.changed:
            self.begun.append(prompt.index)
            self.now.add(prompt.index)
            self.most = max(self.most, len(self.now))
            self.changed.notify_all()
        if prompt.index in self.gates:
            assert self.gates[prompt.index].wait(WAIT_S)
        with self.changed:
            self.now.discard(prompt.index)
            self.changed.notify_all()
        if prompt.index in self.fails_for:
            raise RewardError("no answer in 10 s")
        return (RewardPart(name="correct", value=0.0),)


def groups_of(*numbers, forged=()):
    found = []
    for number in numbers:
        group = queued(number).group
        reward = 1.0 if number in forged else 0.0
        rollouts = tuple(dataclasses.replace(each, reward=reward, reward_parts=()) for each in group.rollouts)
        found.append(
            dataclasses.replace(
                queued(number), group=dataclasses.replace(group, prompt_index=number, rollouts=rollouts)
            )
        )
    return found


class Api:
    """A coordinator that streams these groups, one stream after another, as far as credits go; then the inbox closes."""

    def __init__(self, inbox, *streams, ends_with=None):
        self.inbox, self.streams, self.ends_with = inbox, list(streams), ends_with
        self.held, self.rejected, self.abandoned, self.sent = [], [], [], []

    async def stream_groups(self, *, epoch, held, credits):
        self.held.append([group_id.sequence for group_id in held])
        granted = 0
        groups = self.streams.pop(0)
        for entry in groups:
            while granted == 0:
                granted += await anext(credits)
            granted -= 1
            self.sent.append(entry.group.id.sequence)
            yield entry
        if self.streams:
            raise Unreachable("cut")
        if self.ends_with is not None:
            raise self.ends_with
        # Nothing more comes; the test closes the inbox.
        async for _ in credits:
            pass

    async def reject_groups(self, *, epoch, rejections):
        self.rejected += [rejection.id.sequence for rejection in rejections]

    async def abandon_groups(self, *, epoch, ids, reason):
        self.abandoned += [group_id.sequence for group_id in ids]


def feeding(api, inbox, task):
    prompter = SimpleNamespace(
        encode_prompt=lambda prompt: np.array([1, 2, 3], np.int32), completion=lambda ids, prompt: ""
    )
    verifier = Verifier(
        verification=VerificationContext(config=VerificationConfig(), task=task, prompter=prompter),
        versions=None,
        rng=random.Random(0),
    )
    return asyncio.create_task(
        feed(
            api, inbox, epoch=1, limits=Limits(group_size=GROUP_SIZE, vocab_size=VOCAB, max_sequence_tokens=0),
            backoff=Backoff(clock=SystemClock(), rng=random.Random(0), base_s=1e-9, cap_s=1e-9), verifier=verifier,
            notes=SampleNotes(),
        )
    )  # fmt: skip


async def until(task, condition):
    def wait():
        with task.changed:
            assert task.changed.wait_for(condition, WAIT_S)

    await asyncio.to_thread(wait)


async def taken(inbox, count):
    return [entry.group.id.sequence for entry in await inbox.take(count)]


async def test_reward_that_hangs_holds_back_what_is_behind_it_and_others_are_scored_meanwhile():
    task, inbox = SlowTask(num_workers=2, waits_for=[2]), Inbox(6)
    running = feeding(Api(inbox, groups_of(1, 2, 3, 4, 5, 6)), inbox, task)

    await until(task, lambda: {1, 3, 4, 5, 6} <= set(task.begun) and task.now == {2})
    assert await taken(inbox, 1) == [1]
    assert len(inbox._waiting) == 0, "in stream order: 1 alone is before the one that hangs"
    task.gates[2].set()

    assert await taken(inbox, 5) == [2, 3, 4, 5, 6]
    await inbox.close()
    await running


async def test_no_more_groups_are_scored_at_once_than_there_are_workers():
    task, inbox = SlowTask(num_workers=3, waits_for=range(1, 8)), Inbox(8)
    running = feeding(Api(inbox, groups_of(*range(1, 8))), inbox, task)

    await until(task, lambda: len(task.now) == 3)
    for gate in task.gates.values():
        gate.set()

    assert await taken(inbox, 7) == [1, 2, 3, 4, 5, 6, 7]
    assert task.most == 3
    await inbox.close()
    await running


async def test_what_is_scored_and_not_handed_on_takes_room_of_the_inbox():
    task, inbox = SlowTask(num_workers=4, waits_for=[1]), Inbox(3)
    api = Api(inbox, groups_of(1, 2, 3, 4, 5))
    running = feeding(api, inbox, task)

    await until(task, lambda: task.now == {1} and {2, 3} <= set(task.begun))
    assert api.sent == [1, 2, 3]
    task.gates[1].set()

    assert await taken(inbox, 3) == [1, 2, 3]
    assert await taken(inbox, 2) == [4, 5]
    await inbox.close()
    await running


async def test_verdicts_keep_their_order_and_their_meaning():
    task, inbox = SlowTask(num_workers=4, waits_for=[1], fails_for=[3]), Inbox(3)
    api = Api(inbox, groups_of(1, 2, 3, 4, 5, forged=[2]))
    running = feeding(api, inbox, task)
    await until(task, lambda: task.now == {1} and {2, 3} <= set(task.begun))
    assert (api.rejected, api.abandoned) == ([], [])

    task.gates[1].set()

    assert await taken(inbox, 3) == [1, 4, 5]
    assert (api.rejected, api.abandoned) == ([2], [3])
    assert [group_id.sequence for group_id in inbox.held] == [1, 4, 5]
    await inbox.close()
    await running


async def test_what_came_by_a_broken_stream_is_handed_on_before_the_next_one_names_what_is_held():
    task, inbox = SlowTask(num_workers=2, waits_for=[1]), Inbox(4)
    api = Api(inbox, groups_of(1, 2), groups_of(3))
    running = feeding(api, inbox, task)
    await until(task, lambda: task.now == {1} and 2 in task.begun)
    assert api.held == [[]], "the second stream waits"

    task.gates[1].set()

    assert await taken(inbox, 3) == [1, 2, 3]
    assert api.held == [[], [1, 2]]
    await inbox.close()
    await running


async def test_superseded_learner_is_told_though_a_reward_hangs():
    task, inbox = SlowTask(num_workers=2, waits_for=[2]), Inbox(4)
    running = feeding(Api(inbox, groups_of(1, 2), ends_with=StaleEpoch("another")), inbox, task)
    await until(task, lambda: task.now == {2})
    task.gates[2].set()

    with pytest.raises(StaleEpoch):
        await running


async def test_groups_that_nobody_asked_for_wait_at_the_coordinator():
    task, inbox = SlowTask(num_workers=2, waits_for=[1]), Inbox(4)
    api = Api(inbox)
    sent = []

    async def flood(*, epoch, held, credits):
        for entry in groups_of(*range(1, 1000)):
            sent.append(entry)
            yield entry

    api.stream_groups = flood
    running = feeding(api, inbox, task)
    await until(task, lambda: task.now == {1} and 2 in task.begun)
    for _ in range(100):
        await asyncio.sleep(0)

    assert len(sent) <= 4 + 2
    running.cancel()
    task.gates[1].set()
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_feed_that_is_cancelled_waits_for_its_threads():
    task, inbox = SlowTask(num_workers=2, waits_for=[1, 2]), Inbox(4)
    running = feeding(Api(inbox, groups_of(1, 2, 3)), inbox, task)
    await until(task, lambda: task.now == {1, 2})

    running.cancel()
    await asyncio.sleep(0)
    assert not running.done()
    for gate in task.gates.values():
        gate.set()

    with pytest.raises(asyncio.CancelledError):
        await running
    assert task.now == set()
    assert 3 not in task.begun
