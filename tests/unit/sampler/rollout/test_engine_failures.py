"""A sampler whose engine cannot be trusted: it takes no work, says so, and goes on when a swap succeeds."""

import contextlib
from collections import Counter

import numpy as np
import pytest

from heterorl.common.errors import ConfigError, DiskFull, EngineDied, PermissionDenied, StaleWeights, Unreachable
from heterorl.common.generation.inference_engine import ScoredText
from heterorl.common.process import metrics
from heterorl.common.types.rollout import ReturnReason
from heterorl.sampler.rollout.completion_collector import HUNG_S, HUNG_TIMES, SWAP_S
from heterorl.sampler.rollout.in_flight_groups import MAX_NOTED, NAME, InFlightNote
from heterorl.sampler.trust_record import RunReplaced
from tests.support.run import CONTRACT
from tests.support.sampler_world import World


@pytest.fixture
async def world(tmp_path):
    world = await World.open(tmp_path)
    yield world
    await world.close()


def failures(reason):
    return metrics.ENGINE_FAILURES.labels(reason)._value.get()


async def generating(world):
    await world.run.publish()
    world.start()
    await world.until(lambda: world.engine.num_batches >= 1)


async def test_engine_that_fails_its_canary_gets_the_version_again_and_no_work_meanwhile(world):
    await generating(world)
    stale = StaleWeights(1, difference=0.65, tolerance=1e-4)
    world.engine.load_failures = [stale] * 4
    before = failures("stale")
    await world.run.publish()
    await world.until(lambda: failures("stale") >= before + 3)
    asked, batches = world.link.calls["lease_work"], world.engine.num_batches
    reported = world.sampler.generation.reported()
    assert (reported.policy_version, reported.problem) == (-1, str(stale))

    await world.until(lambda: not world.engine.load_failures)
    assert (world.link.calls["lease_work"], world.engine.num_batches) == (asked, batches)
    await world.until(lambda: world.engine.num_batches > batches)

    assert failures("stale") == before + 4
    assert [version for version, _ in world.engine.loaded] == [0, 1]
    reported = world.sampler.generation.reported()
    assert (reported.policy_version, reported.problem) == (1, "")


@pytest.fixture
async def asked(world):
    """The silence of an engine that has given completions and is asked for more."""
    await generating(world)
    world.engine.proceed.clear()
    await world.until(lambda: world.engine.is_held)
    # A pass takes a second, and the next one hangs.
    await world.passed(1.0)
    world.engine.proceed.set()
    await world.until(lambda: not world.engine.is_held)
    world.engine.proceed.clear()
    await world.until(lambda: world.engine.is_held)
    return world.sampler.generation.collector.silent_s


async def test_engine_that_hangs_is_late_after_many_times_its_longest_completion(world, asked):
    collector, max_tokens = world.sampler.generation.collector, CONTRACT.sampling.max_new_tokens
    limit_s = max(HUNG_S, HUNG_TIMES * max_tokens * collector._token_s)
    await world.passed(limit_s - 20.0, step_s=10.0)
    assert asked() == 0.0
    await world.passed(100.0, step_s=50.0)
    assert asked() > 0.0

    # Completions of an evaluation may be longer.
    collector.evaluation_requests.longest = 10 * max_tokens * round(limit_s / collector._token_s)
    assert asked() == 0.0
    world.engine.proceed.set()
    batches = world.engine.num_batches
    await world.until(lambda: world.engine.num_batches > batches)
    assert asked() == 0.0


async def test_swap_may_take_longer_than_a_pass_and_not_forever(world, asked):
    world.sampler.generation.collector._token_s = 1e-9
    world.engine.may_load.clear()
    await world.sampler.generation.swap.running.acquire()
    await world.passed(HUNG_S + SWAP_S - 300.0, step_s=100.0)
    assert asked() == 0.0
    await world.passed(500.0, step_s=100.0)
    assert asked() > 0.0

    world.sampler.generation.swap.running.release()
    world.sampler.generation.collector.note_swapped()
    assert asked() == 0.0


async def test_first_completions_may_take_any_time(world):
    await world.run.publish()
    world.start()
    world.engine.proceed.clear()
    await world.until(lambda: world.engine.is_held)
    await world.passed(100 * HUNG_S, step_s=HUNG_S)

    assert world.sampler.generation.collector.silent_s() == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("failing", ["load_failures", "score_failures"])
async def test_attempts_become_rare_and_a_success_forgets_them(world, failing):
    world.canary = (ScoredText(prompt=np.array([2], np.int32), completion=np.array([5, 1], np.int32)),)
    await generating(world)
    setattr(world.engine, failing, [EngineDied("gone")] * 12)
    began = world.clock.monotonic()
    await world.run.publish()

    def rung():
        # News of any kind must not make it try sooner.
        world.sampler.generation.bell.ring()
        swap, left = world.sampler.generation.swap, getattr(world.engine, failing)
        return not left and swap.version == 1 and swap._backoff.num_failures == 0

    await world.until(rung, step_s=1.0)

    # twelve draws of at most 1, 2, 4 ... 256, 300, 300, 300 s; at one draw a second it would be twelve
    assert world.clock.monotonic() - began > 60


async def test_engine_that_dies_in_a_batch_hands_its_work_back_and_loads_its_version_again(world):
    await generating(world)
    before, batches = failures("died"), world.engine.num_batches
    abandoned = world.link.calls["abandon_work"]
    world.engine.batch_failures = [EngineDied("killed")]

    await world.until(lambda: failures("died") > before)
    await world.until(lambda: world.engine.num_batches > batches + 1)

    assert world.link.calls["abandon_work"] == abandoned + 1
    assert [version for version, _ in world.engine.loaded] == [0, 0]


async def test_engine_that_dies_while_it_scores_the_canary_loads_its_version_again(world):
    world.canary = (ScoredText(prompt=np.array([2], np.int32), completion=np.array([5, 1], np.int32)),)
    await generating(world)
    before = failures("died")
    world.engine.score_failures = [EngineDied("killed")]
    await world.run.publish()

    await world.until(lambda: failures("died") > before)
    batches = world.engine.num_batches
    await world.until(lambda: world.engine.num_batches > batches)

    assert [version for version, _ in world.engine.loaded] == [0, 1, 1]
    assert world.sampler.generation.reported().policy_version == 1


async def test_assignments_that_an_engine_lost_in_an_outage_return_with_the_link(tmp_path):
    world = await World.open(tmp_path, max_outstanding_groups=2, work_lease_s=120.0)
    try:
        await world.run.publish()
        world.start()
        await world.lose_engine_in_outage(lasts_s=40.0)
        # The leases of two minutes still run.
        await world.passed(40.0, step_s=0.5)

        assert await world.ledger_acked()
    finally:
        await world.close()


async def killed_in_a_batch(world):
    """A process that is killed while its engine computes."""
    world.start()
    world.engine.proceed.clear()
    await world.until(lambda: world.engine.is_held)
    held = [draft.assignment.id for draft in world.sampler.generation.collector.drafts]
    await world.kill()
    world.engine.proceed.set()
    return held


async def test_a_row_under_which_three_processes_are_killed_is_closed(world):
    await world.run.publish()
    counts = Counter()

    for _ in range(20):
        counts.update(await killed_in_a_batch(world))
        closed = (await world.core.get_status()).ledger.closed
        if closed.get(ReturnReason.ENGINE_FAILED):
            break

    # The fourth process says of the third one that it was killed.
    assert closed.get(ReturnReason.ENGINE_FAILED) == sum(count >= 3 for count in counts.values())
    assert max(counts.values()) == 3


async def test_a_process_that_ends_in_order_accuses_no_row(world):
    await generating(world)
    world.stop.set()
    await world.end()
    assert not (world.directory / "site" / NAME).exists()

    world.start()
    before = world.link.calls["abandon_work"]
    await world.until(lambda: world.engine.num_batches >= 1)

    assert world.link.calls["abandon_work"] == before


def test_note_of_what_is_under_way(tmp_path):
    assert InFlightNote(tmp_path).left == ()
    InFlightNote(tmp_path).note(range(MAX_NOTED + 2))
    left = InFlightNote(tmp_path).left
    assert (left[0], len(left)) == (MAX_NOTED + 1, MAX_NOTED)

    for damaged in (b"", b"[1, ", b"{}", b'["1", true, -1, 1.5]', b"\xff"):
        (tmp_path / NAME).write_bytes(damaged)
        assert InFlightNote(tmp_path).left == ()
    InFlightNote(tmp_path).clear()
    InFlightNote(tmp_path).clear()
    assert InFlightNote(tmp_path / "gone").note([1]) is None


@pytest.mark.parametrize("error", [PermissionDenied("revoked"), RunReplaced("older"), DiskFull("/site")])
async def test_a_process_that_ends_by_an_error_of_no_prompt_accuses_no_row(world, error):
    await world.run.publish()
    reasons = []

    async def abandon_work(**given):
        reasons.append(given.get("reason"))
        await world.core.abandon_work(**given)

    world.link.replaced["abandon_work"] = abandon_work
    held, seen = await _ended_in_a_batch(world, error)
    note = world.directory / "site" / NAME
    assert len(held) == 2
    assert not note.exists()

    world.start()
    await world.until(lambda: len(world.engine.submitted) >= 2)
    assert ReturnReason.ENGINE_FAILED not in reasons
    # They are handed out again at once.
    assert {request.seed for request in world.engine.submitted[:2]} == seen


async def test_a_process_that_ends_by_an_error_of_a_prompt_leaves_its_note(world):
    await world.run.publish()

    await _ended_in_a_batch(world, ConfigError("task.reward", "the reward of a row is no number"))

    assert (world.directory / "site" / NAME).exists()


@pytest.mark.parametrize("error", [PermissionDenied("revoked"), None])
async def test_an_end_before_the_first_registration_keeps_the_note_of_a_killed_process(world, error):
    await world.run.publish()
    held = await killed_in_a_batch(world)
    note = world.directory / "site" / NAME
    written = note.read_bytes()

    async def refuse(*_, **given):
        world.stop.set()
        raise error or Unreachable("the coordinator is away")

    world.link.replaced.update(abandon_work=refuse, register=refuse)
    world.start()
    with pytest.raises(PermissionDenied) if error else contextlib.nullcontext():
        await world.end()

    assert held
    assert note.read_bytes() == written


def test_a_note_is_not_written_after_the_end(tmp_path):
    note = InFlightNote(tmp_path)
    note.note([1])
    note.clear()
    note.note([2])
    note.note_held_out({("set", 1): 2})

    assert list(tmp_path.iterdir()) == []


async def _ended_in_a_batch(world, error):
    """A process that an error of a heartbeat ends while its engine computes."""
    world.start()
    world.engine.proceed.clear()
    await world.until(lambda: world.engine.is_held)
    held = [draft.assignment.id for draft in world.sampler.generation.collector.drafts]

    async def heartbeat(report):
        raise error

    world.link.replaced["heartbeat"] = heartbeat
    with pytest.raises(type(error)):
        await world.end()
    world.engine.proceed.set()
    del world.link.replaced["heartbeat"]
    return held, {request.seed for request in world.engine.submitted}
