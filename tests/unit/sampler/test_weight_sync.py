"""Weights are kept where the delay model says, whatever the link does."""

import errno

import pytest

from heterorl.common.errors import (
    Busy,
    ContractMismatch,
    InvalidRequest,
    MalformedPayload,
    RemoteError,
    UnknownPayload,
    UnknownVersion,
    Unreachable,
)
from heterorl.sampler.weight_sync import MAX_SKIPPED
from tests.support.sampler_world import World


@pytest.fixture
async def world(tmp_path):
    world = await World.open(tmp_path)
    yield world
    await world.close()


async def test_version_is_recorded_before_it_is_generated_with(world):
    await world.run.publish()
    world.start()
    record = world.sampler.policy.record
    noted, real = [], record.note

    def note(seen):
        noted.append((seen.version, world.engine.version))
        real(seen)

    record.note = note
    await world.until(lambda: world.engine.version == 0)
    await world.run.publish()
    await world.until(lambda: world.engine.version == 1)

    assert noted == [(0, -1), (1, 0)]
    assert world.engine.loaded == [(0, world.run.roots[0]), (1, world.run.roots[1])]


async def test_abandoned_target_is_passed_over_for_the_next_version_of_the_lineage(world):
    """A sampler held behind an abandoned version would get no work, and without work nothing moves on."""
    world.settings = {"delay": {"kind": "fixed", "unit": "versions", "value": 2}}
    for _ in range(2):
        await world.run.publish()
    world.start()
    await world.until(lambda: world.engine.version == 0)

    async def plan_pull(**wanted):
        if wanted["want_version"] == 1:
            raise UnknownVersion("version 1 was abandoned")
        return await world.core.plan_pull(**wanted)

    world.link.replaced["plan_pull"] = plan_pull
    for _ in range(2):
        await world.run.publish()
    # The head is version 3, the target version 1.
    await world.until(lambda: world.engine.version == 2)

    assert world.engine.loaded[-1] == (2, world.run.roots[2])


@pytest.mark.parametrize(
    ("method", "error"),
    [
        ("plan_pull", Unreachable("cut")),
        ("plan_pull", InvalidRequest("version")),
        ("plan_pull", ContractMismatch("layout")),
        ("plan_pull", MalformedPayload("bad")),
        ("plan_pull", OSError("disk")),
        ("watch_head", Unreachable("cut")),
        ("watch_head", InvalidRequest("version")),
        ("watch_head", MalformedPayload("bad")),
    ],
)
async def test_no_failure_of_the_weight_path_ends_the_sampler(world, method, error):
    await world.run.publish()

    def failing(**wanted):
        raise error

    world.link.replaced[method] = failing
    world.start()
    await world.until(lambda: world.link.calls[method] >= 5, step_s=1.0)

    del world.link.replaced[method]
    await world.until(lambda: world.engine.version == 0, step_s=1.0)


@pytest.mark.slow
async def test_attempts_at_damaged_weights_become_rare(world):
    """Each attempt costs a snapshot, so the delay grows to minutes."""
    await world.run.publish()

    async def read_payload(**wanted):
        yield b"x"
        raise MalformedPayload("bad")

    world.link.replaced["read_payload"] = read_payload
    world.start()
    await world.passed(3600.0, step_s=2.0)

    # Delays of up to 1, 2, 4 ... 256, 300 s: about 9 attempts in the first 256 s, then one in 150 s, so 31; within
    # twice that. At the cap of other failures, 15 s, there would be 480.
    assert 8 <= world.link.calls["read_payload"] <= 62


async def test_broken_downloads_that_make_progress_are_taken_up_again_soon(world):
    """A link that breaks after every few bytes is slow, not dead: each failure counts as the first."""
    await world.run.publish()
    failures = []

    async def read_payload(*, digest, offset):
        failures.append(world.sampler.policy.backoff.num_failures)
        async for frame in world.core.read_payload(digest=digest, offset=offset):
            yield frame[:10]
            break

    world.link.replaced["read_payload"] = read_payload
    world.start()
    await world.until(lambda: world.engine.version == 0)

    assert len(failures) >= 10
    assert set(failures) == {0, 1}, "delays grow although bytes arrive"


async def test_age_of_a_policy_is_counted_from_its_publication(world):
    await world.run.publish()
    world.clock.advance(30.0)
    world.start()
    await world.until(lambda: world.engine.version == 0)
    started = world.clock.monotonic()
    age_s = world.sampler.policy.age_s(0)

    assert age_s >= 30.0
    world.clock.advance(5.0)
    assert world.sampler.policy.age_s(0) == pytest.approx(age_s + world.clock.monotonic() - started)
    assert world.sampler.policy.age_s(7) is None


async def test_head_that_is_only_said_is_not_walked_to_without_a_wait(world):
    """A coordinator that names a head beyond all versions and knows none of them would be asked without an end."""
    await world.run.publish()
    world.start()
    await world.until(lambda: world.engine.version == 0)
    asked = []

    async def plan_pull(**wanted):
        asked.append(wanted["want_version"])
        raise UnknownVersion("what is that?")

    world.link.replaced["plan_pull"] = plan_pull
    policy = world.sampler.policy
    policy.head_version = 2**62
    delays = [await policy._stage(1) for _ in range(2)]

    # Each attempt ends, waits, and goes on behind what is missing: a long way of abandoned versions has an end.
    assert asked == list(range(1, 1 + 2 * MAX_SKIPPED))
    assert min(delays) > 0
    del world.link.replaced["plan_pull"]
    policy.head_version = 0
    await world.run.publish()
    await world.until(lambda: world.engine.version == 1)


async def test_full_disk_under_the_weights_is_said_once_and_tried_again_soon(world, caplog):
    caplog.set_level("INFO")
    await world.run.publish()

    async def read_payload(**wanted):
        raise OSError(errno.ENOSPC, "No space left on device")
        yield b""

    world.link.replaced["read_payload"] = read_payload
    world.start()
    await world.passed(300.0, step_s=1.0)

    assert caplog.text.count("VERSION 0 CANNOT BE STORED") == 1
    assert "no space left under" in world.sampler.policy.problem
    (status,) = (await world.core.get_status()).sites
    assert status.problem.startswith("no space left under")
    # At most 15 s apart, however long the disk was full: not the minutes of weights that are damaged.
    assert world.link.calls["read_payload"] >= 20
    del world.link.replaced["read_payload"]
    await world.until(lambda: world.engine.version == 0)
    assert world.sampler.policy.problem == ""
    assert "the disk has room again: version 0 is here" in caplog.text


class BreakingLine:
    """Carries 60 % of a version's first payload, then breaks; meanwhile a newer snapshot is published."""

    def __init__(self, world):
        self.world = world
        self.num_breaks = 0
        self.is_whole = False
        self.refused = {}
        """Errors of plans and reads of a version."""
        world.link.replaced.update(read_payload=self.read_payload, plan_pull=self.plan_pull)

    async def plan_pull(self, **wanted):
        plan = await self.world.core.plan_pull(**wanted)
        self.planned = plan.target_version
        self.num_left = plan.payloads[0].num_bytes * 3 // 5
        if isinstance(error := self.refused.get(self.planned), RemoteError) and not isinstance(error, Busy):
            raise error
        return plan

    async def read_payload(self, *, digest, offset):
        if self.planned in self.refused:
            raise self.refused[self.planned]
        async for frame in self.world.core.read_payload(digest=digest, offset=offset):
            if self.is_whole or len(frame) <= self.num_left:
                yield frame
                continue
            yield frame[: self.num_left]
            await self.world.run.publish(snapshot=True)
            await self.world.core.collector.work()
            self.num_breaks += 1
            raise Unreachable("the line broke")


@pytest.mark.parametrize("restarts", [False, True], ids=["goes_on", "restarts"])
async def test_line_that_breaks_within_each_snapshot_still_brings_one(world, restarts):
    """Each newer head has a newer snapshot: pulls of the head would begin anew and never end."""
    await world.run.publish()
    line = BreakingLine(world)
    world.start()
    await world.until(lambda: line.num_breaks == 1)
    if restarts:
        await world.kill()
        world.start()
    await world.until(lambda: world.engine.version >= 0 or line.num_breaks == 9, step_s=1.0)

    assert world.engine.loaded[:1] == [(0, world.run.roots[0])]
    line.is_whole = True
    await world.until(lambda: world.engine.version == world.run.head)
    assert list((world.directory / "site" / "incoming").iterdir()) == []


@pytest.mark.parametrize(
    "error", [UnknownVersion("gone"), UnknownPayload("gone"), Busy("unreadable"), MalformedPayload("damaged")]
)
async def test_broken_download_that_cannot_be_finished_makes_room_for_the_head(world, error):
    await world.run.publish()
    line = BreakingLine(world)
    line.refused[0] = error
    world.start()
    incoming = world.directory / "site" / "incoming"
    (incoming / "begun").write_text("0")
    await world.run.publish(snapshot=True)
    line.is_whole = True
    await world.until(lambda: world.engine.version == 1, step_s=1.0)

    assert world.engine.loaded == [(1, world.run.roots[1])]


@pytest.mark.parametrize("begun", ["4", "1", "four", ""])
async def test_download_that_the_delay_hides_or_the_record_forbids_is_not_finished(world, begun):
    world.settings = {"delay": {"kind": "fixed", "unit": "versions", "value": 2}}
    for _ in range(5):
        await world.run.publish(snapshot=True)
    world.start()
    await world.until(lambda: world.engine.version == 2)
    await world.kill()
    (world.directory / "site" / "incoming" / "begun").write_text(begun)
    world.start()
    await world.until(lambda: world.engine.version >= 0)

    assert world.engine.loaded == [(2, world.run.roots[2])]
