"""Small parts of the learner: threads, backoff, admission, the feed, the directory."""

import asyncio
import dataclasses
import random
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from heterorl.common.errors import (
    ConfigError,
    CorruptData,
    Draining,
    InvalidRequest,
    LeaseHeld,
    QuotaExceeded,
    RemoteError,
    StaleEpoch,
    StoreFull,
    Unreachable,
)
from heterorl.common.process.backoff import REMIND_S, Backoff, is_transient
from heterorl.common.process.threads import in_thread
from heterorl.common.types.policy import LeaseGrant
from heterorl.learner import learner_app
from heterorl.learner.checks.verifier import Limits, judge
from heterorl.learner.learner_config import LearnerConfig
from heterorl.learner.run.inbox import Inbox, feed
from heterorl.learner.run.state_directory import hold_directory, renew
from heterorl.learner.sample_notes import SampleNotes
from heterorl.learner.step_metrics import StepTimer
from tests.support.learner_world import GROUP_SIZE, VOCAB, make_contract, make_group, queued
from tests.support.limits import WAIT_S
from tests.support.plain_task import PlainTask

LIMITS = Limits(group_size=GROUP_SIZE, vocab_size=VOCAB, max_sequence_tokens=0)


class NotingClock:
    """Time that passes by sleeping."""

    def __init__(self):
        self.slept = []

    def wall(self):
        return 0.0

    def monotonic(self):
        return sum(self.slept)

    async def sleep(self, seconds):
        self.slept.append(seconds)


def backoff(clock=None, **changes):
    values = {"clock": clock or NotingClock(), "rng": random.Random(0), "base_s": 1.0, "cap_s": 8.0, "asked_cap_s": 8.0}
    return Backoff(**{**values, **changes})


async def test_cancelled_caller_waits_for_its_thread():
    entered, proceed, log = threading.Event(), threading.Event(), []

    def work():
        entered.set()
        assert proceed.wait(WAIT_S)
        log.append("thread")

    async def caller():
        try:
            await in_thread(work)
        finally:
            log.append("caller")

    task = asyncio.create_task(caller())
    assert await asyncio.to_thread(entered.wait, 30)
    task.cancel()
    await asyncio.sleep(0)
    proceed.set()
    with pytest.raises(asyncio.CancelledError):
        await task

    assert log == ["thread", "caller"]


async def test_error_of_a_thread_reaches_its_caller():
    with pytest.raises(ZeroDivisionError):
        await in_thread(lambda: 1 // 0)


async def test_waits_grow_to_their_cap_and_begin_anew_after_a_success():
    clock = NotingClock()
    waiting = backoff(clock, rng=random.Random(3))
    upper = [1.0, 2.0, 4.0, 8.0, 8.0]

    for _ in upper:
        await waiting.wait()
    waiting.reset()
    await waiting.wait()

    assert all(slept <= bound for slept, bound in zip(clock.slept, [*upper, 1.0], strict=True))
    # With this seed the fourth wait is above the third bound's half: growth is there at all.
    assert max(clock.slept) > 2.0


async def test_peers_own_delay_is_respected_up_to_the_cap():
    clock = NotingClock()

    await backoff(clock).wait(Unreachable("gone", retry_after_s=5.0))
    await backoff(clock).wait(Unreachable("gone", retry_after_s=1e9))

    # The drawn part is below 1 s here; 1e9 s is cut to 8 s.
    assert 5.0 <= clock.slept[0] <= 6.0
    assert 8.0 <= clock.slept[1] <= 9.0


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (Unreachable("x"), True),
        (Draining("x"), True),
        (TimeoutError(), True),
        (QuotaExceeded("x", retry_after_s=1.0), True),
        (QuotaExceeded("x"), False),
        (StaleEpoch("x"), False),
        (LeaseHeld("x"), True),
        (RemoteError("a reason that this release does not know"), True),
        (CorruptData("x"), False),
        (InvalidRequest("x"), False),
    ],
)
def test_only_what_waiting_can_change_is_repeated(error, expected):
    assert is_transient(error) is expected


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (Unreachable("no answer in 30 s"), "no answer in 30 s (check the address"),
        (TimeoutError(), "it does not answer"),
        (LeaseHeld("other holds the lease for 9.9 s", retry_after_s=9.9), "other holds the lease for 9.9 s (wait for"),
    ],
)
async def test_a_wait_is_said_with_its_error(caplog, error, said):
    await backoff().wait(error)

    (record,) = caplog.records
    assert record.getMessage().startswith(f"the coordinator is asked again: {said}")


async def test_wait_is_said_again_when_it_is_for_something_else_or_after_a_while(caplog):
    clock = NotingClock()
    waiting = backoff(clock)
    full, silent = StoreFull("full", retry_after_s=5.0), Unreachable("gone")

    for error in (full, full, silent, silent, full):
        await waiting.wait(error)
    assert [record.getMessage().split()[5] for record in caplog.records] == ["full", "gone", "full"]
    clock.slept.append(REMIND_S)
    await waiting.wait(full)
    await waiting.wait(full)

    assert len(caplog.records) == 4, "reminded once"


async def test_retry_repeats_until_answered():
    answers = [Unreachable("lost"), TimeoutError(), 7]

    async def call():
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    assert await backoff().retry(call) == 7


def _with(value, **changes):
    return dataclasses.replace(value, **changes)


def test_group_is_admitted_when_it_has_no_advantage():
    group = make_group(1)
    flat = _with(group, rollouts=tuple(_with(rollout, reward=1.0) for rollout in group.rollouts))

    assert judge(flat, LIMITS).is_sound


def test_group_is_not_admitted_when_it_cannot_be_trained():
    group = make_group(1)
    nothing = np.zeros(0, np.int32)
    longest = 3 + max(rollout.token_ids.size for rollout in group.rollouts)
    first = _with(group.rollouts[0], token_ids=nothing, sampler_logprobs=np.zeros(0, np.float32), spans=())
    empty = _with(group, rollouts=(first, *group.rollouts[1:]))
    foreign = _with(group, prompt_token_ids=np.array([VOCAB], np.int32))

    assert "group size" in judge(_with(group, rollouts=group.rollouts[:1]), LIMITS).detail
    assert "a rollout has no token" in judge(empty, LIMITS).detail
    assert "vocabulary" in judge(foreign, LIMITS).detail
    assert judge(group, dataclasses.replace(LIMITS, max_sequence_tokens=longest)).is_sound
    assert "max_sequence_tokens" in judge(group, dataclasses.replace(LIMITS, max_sequence_tokens=longest - 1)).detail


class Streams:
    """An api whose streams are scripted: each is a list of groups and how it ends."""

    def __init__(self, inbox, *scripts):
        self.inbox, self.scripts, self.opened, self.abandoned = inbox, list(scripts), [], []

    async def stream_groups(self, *, epoch, held, credits):
        self.opened.append([group_id.sequence for group_id in held])
        if not self.scripts:
            await self.inbox.close()
            return
        groups, end = self.scripts.pop(0)
        for entry in groups:
            yield entry
        if end is not None:
            raise end

    async def abandon_groups(self, *, epoch, ids, reason):
        self.abandoned += [group_id.sequence for group_id in ids]


async def test_feed_opens_the_stream_again_with_what_is_held():
    inbox = Inbox(8)
    api = Streams(inbox, ([queued(1), queued(2)], Unreachable("cut")), ([queued(3)], None))

    await feed(api, inbox, epoch=1, limits=LIMITS, backoff=backoff(), notes=SampleNotes())

    assert api.opened == [[], [1, 2], [1, 2, 3]]


async def test_feed_abandons_what_cannot_be_trained():
    inbox = Inbox(8)
    bad = queued(2)
    bad = _with(bad, group=_with(bad.group, rollouts=bad.group.rollouts[:1]))
    api = Streams(inbox, ([queued(1), bad, queued(3)], None))

    await feed(api, inbox, epoch=1, limits=LIMITS, backoff=backoff(), notes=SampleNotes())

    assert api.abandoned == [2]
    assert [group_id.sequence for group_id in inbox.held] == [1, 3]


async def test_feed_ends_when_the_epoch_is_over():
    inbox = Inbox(8)
    api = Streams(inbox, ([], StaleEpoch("superseded")), ([queued(1)], None))

    with pytest.raises(StaleEpoch):
        await feed(api, inbox, epoch=1, limits=LIMITS, backoff=backoff(), notes=SampleNotes())


def test_state_directory_has_one_holder_at_a_time_and_is_its_users_alone(tmp_path):
    path = tmp_path / "a"

    with hold_directory(path), pytest.raises(ConfigError, match="another learner"), hold_directory(path):
        pass

    with hold_directory(path):
        assert path.stat().st_mode & 0o777 == 0o700


async def test_state_directory_that_cannot_be_made_is_told_before_the_model_is_loaded(tmp_path):
    (tmp_path / "file").touch()
    config = LearnerConfig(state_dir=tmp_path / "file" / "a", model_dir=str(tmp_path / "none"))

    with pytest.raises(ConfigError, match="state_dir: .*file/a cannot be used: File exists"):
        await learner_app.main(config)


def test_learner_configuration_has_defaults_and_refuses_a_cap_below_the_base():
    assert LearnerConfig().loss.kind == "gepo"
    with pytest.raises(ValueError, match="retry_cap_s"):
        LearnerConfig(retry_base_s=2.0, retry_cap_s=1.0)


async def test_lease_is_waited_for_also_when_its_holder_names_no_end():
    class Holding:
        def __init__(self):
            grant = LeaseGrant(epoch=2, holder="a", ttl_s=9.0, head_version=-1)
            self.answers = [LeaseHeld("another holds it"), grant]

        async def acquire_lease(self, *, holder, contract, request_id, **changes):
            answer = self.answers.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer

    holding = Holding()
    grant = await backoff().retry(lambda: holding.acquire_lease(holder="a", contract=make_contract(), request_id="r"))

    assert grant.epoch == 2


async def test_overload_of_the_coordinator_ends_neither_renewal_nor_lease():
    """What gRPC says when all its calls are taken is weather, however often it is said."""
    overloaded = [Unreachable("RESOURCE_EXHAUSTED: Concurrent RPC limit exceeded", retry_after_s=1.0)] * 20

    class Overloaded:
        def __init__(self):
            self.answers = [*overloaded]

        async def answer(self):
            if self.answers:
                raise self.answers.pop()
            return LeaseGrant(epoch=2, holder="a", ttl_s=9.0, head_version=-1)

        async def acquire_lease(self, **values):
            return await self.answer()

        async def renew_lease(self, *, epoch, progress):
            return await self.answer()

    api = Overloaded()
    grant = await backoff().retry(api.acquire_lease)
    api.answers = [*overloaded]

    async def heard(renewed):
        assert renewed.epoch == 2
        raise StaleEpoch("enough")

    with pytest.raises(StaleEpoch, match="enough"):
        await renew(
            api, grant=grant, clock=NotingClock(), backoff=backoff(), on_grant=heard,
            progress=StepTimer(clock=NotingClock()),
        )  # fmt: skip

    assert api.answers == []


def test_no_site_foresees_which_groups_are_checked():
    """A draw that a seed of the run or of the process decides could be repeated elsewhere."""
    parts = SimpleNamespace(verification=SimpleNamespace(task=PlainTask(), replayer=None))
    verifier = learner_app._verifier(LearnerConfig(), parts, api=None, backoff=None, trust=None, busy=None)

    assert type(verifier.rng) is random.SystemRandom
