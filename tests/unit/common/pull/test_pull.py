"""Getting a version: resumed, verified, never half done, and healed by a snapshot."""

import asyncio
import dataclasses

import pytest

from heterorl.common.errors import CorruptData, LimitExceeded, StateMismatch, UnknownVersion, Unreachable
from heterorl.common.pull.fetcher import STALL_S
from heterorl.common.pull.puller import Puller
from heterorl.common.types.policy import PlanKind
from heterorl.common.wire.policy_messages import manifest_digest, manifest_from_bytes, manifest_to_bytes
from heterorl.coordinator.coordinator_config import CoordinatorConfig
from heterorl.coordinator.core import Coordinator
from tests.support.clock import ManualClock
from tests.support.run import LAYOUT, Run


class Flaky:
    """A coordinator whose payload streams can be cut or damaged."""

    def __init__(self, core):
        self._core = core
        self.damage = {}
        self.cut_after = None
        self.cut_payload = {}
        self.offsets = []
        self.reads = []

    def __getattr__(self, name):
        return getattr(self._core, name)

    async def read_payload(self, *, digest, offset):
        self.offsets.append(offset)
        self.reads.append((digest, offset))
        async for frame in self._core.read_payload(digest=digest, offset=offset):
            data = bytearray(frame)
            if self.damage.get(digest):
                self.damage[digest] -= 1
                data[len(data) // 2] ^= 1
            cut = self.cut_payload.pop(digest, self.cut_after)
            if cut is not None:
                self.cut_after = None
                yield bytes(data[:cut])
                return
            yield bytes(data)


@pytest.fixture
async def world(tmp_path):
    clock = ManualClock()
    core = await Coordinator.open(CoordinatorConfig(data_dir=tmp_path / "data"), clock)
    run = Run(core, tmp_path)
    await run.begin()
    for _ in range(4):
        await run.publish()
    api = Flaky(core)
    yield api, run, Puller(api=api, spool=tmp_path / "spool", layout=LAYOUT, clock=clock), clock, tmp_path
    await core.close()


async def test_pull_reaches_the_head_from_nothing_and_from_any_version(world):
    _api, run, puller, _, tmp_path = world
    old = await puller.pull(held=None, want_version=1)
    new = await puller.pull(held=old, want_version=-1)

    assert (old.version, new.version) == (1, 3)
    assert new.arena.state_root() == run.roots[3] == new.manifest.state_root
    assert old.arena.state_root() == run.roots[1], "the held state is not touched"
    assert await puller.pull(held=new, want_version=3) is new
    assert list((tmp_path / "spool").iterdir()) == []
    with pytest.raises(UnknownVersion):
        await puller.pull(held=None, want_version=9)


async def test_broken_download_goes_on_from_the_bytes_on_disk(world):
    api, run, puller, _, _ = world
    api.cut_after = 100
    with pytest.raises(Unreachable, match="ended after 100 bytes"):
        await puller.pull(held=None, want_version=0)

    assert (await puller.pull(held=None, want_version=0)).manifest.state_root == run.roots[0]
    assert api.offsets == [0, 100]


async def test_damaged_delta_is_thrown_away_and_the_version_built_from_a_snapshot(world):
    # T1, T3: a failed apply neither blocks the next version nor leaves a trace.
    api, run, puller, _, _ = world
    held = await puller.pull(held=None, want_version=2)
    delta = (await api.plan_pull(have_version=2, have_root=run.roots[2], want_version=3)).payloads[0]
    api.damage[delta.digest] = 1

    pulled = await puller.pull(held=held, want_version=3)

    assert pulled.manifest.state_root == run.roots[3]
    assert held.arena.state_root() == run.roots[2]


async def test_damage_that_repeats_is_an_error_and_not_a_state(world):
    api, _, puller, _, _ = world
    snapshot = (await api.plan_pull(have_version=-1, have_root="", want_version=0)).payloads[0]
    api.damage[snapshot.digest] = 99

    with pytest.raises(CorruptData):
        await puller.pull(held=None, want_version=0)


async def test_leftovers_of_an_earlier_process_are_checked_before_use(world):
    api, run, puller, _, tmp_path = world
    snapshot = (await api.plan_pull(have_version=-1, have_root="", want_version=0)).payloads[0]
    (tmp_path / "spool" / snapshot.digest).write_bytes(b"x" * snapshot.num_bytes)
    with pytest.raises(CorruptData):
        await puller.pull(held=None, want_version=0)
    (tmp_path / "spool" / snapshot.digest).write_bytes(b"x" * (snapshot.num_bytes + 1))
    with pytest.raises(CorruptData):
        await puller.pull(held=None, want_version=0)

    assert (await puller.pull(held=None, want_version=0)).manifest.state_root == run.roots[0]


async def test_another_layout_is_refused_before_anything_is_applied(world, tmp_path):
    from heterorl.common.weights.arena import Layout, TensorSpec

    api, _, _, clock, _ = world
    other = Layout.build([TensorSpec(name="w", dtype="fp16", shape=(40,))], chunk_elements=16)

    with pytest.raises(StateMismatch, match="layout"):
        await Puller(api=api, spool=tmp_path / "o", layout=other, clock=clock).pull(held=None, want_version=0)


async def test_delta_that_arrives_twice_changes_nothing_and_is_replaced_by_a_snapshot(world):
    """T2: a second application is refused before it happens; the version comes from the snapshot."""
    api, run, puller, _, _ = world
    held = await puller.pull(held=None, want_version=2)
    plans = []

    async def plan_pull(**wanted):
        plan = await api._core.plan_pull(**wanted)
        plans.append(plan.kind)
        if wanted["have_version"] < 0:
            return plan
        return dataclasses.replace(plan, payloads=plan.payloads * 2, manifests=plan.manifests * 2)

    api.plan_pull = plan_pull
    pulled = await puller.pull(held=held, want_version=3)

    assert pulled.arena.state_root() == run.roots[3]
    assert held.arena.state_root() == run.roots[2]
    assert plans[0] is PlanKind.DELTA
    assert len(plans) == 2


async def test_delta_of_another_base_changes_nothing_and_is_replaced_by_a_snapshot(world):
    """T2: the delta of 2 to 3 is sent to a sampler that holds 1."""
    api, run, puller, _, _ = world
    held = await puller.pull(held=None, want_version=1)

    async def plan_pull(*, have_version, have_root, want_version, **_):
        if have_version >= 0:
            have_version, have_root = 2, run.roots[2]
        return await api._core.plan_pull(have_version=have_version, have_root=have_root, want_version=want_version)

    api.plan_pull = plan_pull
    pulled = await puller.pull(held=held, want_version=3)

    assert pulled.arena.state_root() == run.roots[3]
    assert held.arena.state_root() == run.roots[1]


async def test_manifest_of_another_lineage_is_not_followed(world):
    """Each manifest names its parent's digest; right weights under a foreign manifest are not this run's version."""
    api, run, puller, _, _ = world
    held = await puller.pull(held=None, want_version=2)

    async def plan_pull(**wanted):
        plan = await api._core.plan_pull(**wanted)
        if wanted["have_version"] < 0:
            return plan
        foreign = dataclasses.replace(manifest_from_bytes(plan.manifests[-1]), parent_digest="f" * 64)
        return dataclasses.replace(plan, manifests=(*plan.manifests[:-1], manifest_to_bytes(foreign)))

    api.plan_pull = plan_pull
    pulled = await puller.pull(held=held, want_version=3)

    assert pulled.arena.state_root() == run.roots[3]
    assert pulled.manifest_digest == manifest_digest((await api.get_signed_manifest(version=3)).data)


async def test_held_state_that_went_bad_in_memory_is_noticed_and_left_behind(world):
    """T2: the recomputed digest is compared, not what the header claims to start from."""
    _, run, puller, _, _ = world
    held = await puller.pull(held=None, want_version=2)
    held.arena.chunk(1)[3] ^= 1

    pulled = await puller.pull(held=held, want_version=3)

    assert pulled.arena.state_root() == run.roots[3]


async def test_snapshot_after_a_failed_delta_goes_on_over_several_calls(world):
    api, run, puller, _, _ = world
    held = await puller.pull(held=None, want_version=2)
    delta = (await api.plan_pull(have_version=2, have_root=run.roots[2], want_version=3)).payloads[0]
    snapshot = (await api.plan_pull(have_version=-1, have_root="", want_version=0)).payloads[0]
    api.damage[delta.digest] = 1
    api.cut_payload[snapshot.digest] = 100
    api.reads.clear()

    with pytest.raises(Unreachable):
        await puller.pull(held=held, want_version=3)
    pulled = await puller.pull(held=held, want_version=3)

    assert pulled.arena.state_root() == run.roots[3]
    assert api.reads[:3] == [(delta.digest, 0), (snapshot.digest, 0), (snapshot.digest, 100)]


async def test_stalled_download_fails_in_bounded_time_and_is_resumed(world):
    """T20: a peer that is alive and sends nothing cannot hold a weight update for ever."""
    api, run, puller, clock, _ = world
    closed, stalls = [], asyncio.Event()

    async def read_payload(*, digest, offset):
        try:
            yield (await anext(api._core.read_payload(digest=digest, offset=offset)))[:50]
            stalls.set()
            await asyncio.Event().wait()
        finally:
            closed.append(digest)

    api.read_payload = read_payload
    pulling = asyncio.create_task(puller.pull(held=None, want_version=0))
    await stalls.wait()
    clock.advance(STALL_S)
    with pytest.raises(Unreachable, match="no bytes"):
        await pulling
    assert len(closed) == 1

    del api.read_payload
    assert (await puller.pull(held=None, want_version=0)).manifest.state_root == run.roots[0]
    assert api.offsets == [50]


@pytest.mark.parametrize("lie", ["same", "target", "empty", "manifests"])
async def test_plan_that_cannot_lead_to_the_version_is_refused(world, lie):
    api, _, puller, _, _ = world
    held = await puller.pull(held=None, want_version=1)

    async def plan_pull(**wanted):
        plan = await api._core.plan_pull(**wanted)
        return {
            "same": dataclasses.replace(plan, kind=PlanKind.SAME, payloads=(), manifests=()),
            "target": dataclasses.replace(plan, target_version=2),
            "empty": dataclasses.replace(plan, payloads=(), manifests=()),
            "manifests": dataclasses.replace(plan, manifests=plan.manifests[:-1]),
        }[lie]

    api.plan_pull = plan_pull
    with pytest.raises(StateMismatch, match="the plan"):
        await puller.pull(held=held, want_version=3)


async def test_spool_holds_one_plan_at_most(world):
    api, _, puller, _, tmp_path = world
    (tmp_path / "spool" / ("f" * 64)).write_bytes(b"of another plan")
    api.cut_after = 100
    with pytest.raises(Unreachable):
        await puller.pull(held=None, want_version=0)

    snapshot = (await api.plan_pull(have_version=-1, have_root="", want_version=0)).payloads[0]
    assert sorted(path.name for path in (tmp_path / "spool").iterdir()) == sorted([snapshot.digest, "begun"])
    assert puller.begun() == 0


async def test_stream_that_is_longer_than_stated_is_refused_and_closed(world):
    api, _, puller, _, tmp_path = world
    closed = []

    async def read_payload(*, digest, offset):
        try:
            while True:
                yield bytes(1 << 16)
        finally:
            closed.append(digest)

    api.read_payload = read_payload
    with pytest.raises(LimitExceeded) as refused:
        await puller.pull(held=None, want_version=0)

    assert len(closed) == 1, str(refused.value)
    assert list((tmp_path / "spool").iterdir()) == []


def _bare(api, calls, *, page):
    """A coordinator whose plans carry the target's manifest alone, and whose lists are `page` long."""

    async def plan_pull(**wanted):
        plan = await api._core.plan_pull(**wanted)
        return dataclasses.replace(plan, manifests=plan.manifests[-1:])

    async def list_manifests(*, first_version, last_version, variant=""):
        calls.append((first_version, last_version))
        found = await api._core.list_manifests(first_version=first_version, last_version=last_version, variant=variant)
        return found[:page]

    api.plan_pull, api.list_manifests = plan_pull, list_manifests


@pytest.mark.parametrize(("page", "expected"), [(100, [(1, 2)]), (1, [(1, 2), (1, 1)])])
async def test_manifests_of_the_way_are_asked_for_in_pages(world, page, expected):
    api, run, puller, _, _ = world
    held = await puller.pull(held=None, want_version=0)
    calls = []
    _bare(api, calls, page=page)

    pulled = await puller.pull(held=held, want_version=3)

    assert pulled.arena.state_root() == run.roots[3]
    assert calls == expected


async def test_way_that_is_not_shown_ends_and_a_snapshot_is_tried(world):
    api, run, puller, _, _ = world
    held = await puller.pull(held=None, want_version=0)
    _bare(api, [], page=0)

    with pytest.raises(StateMismatch, match="does not list the manifest of version 2"):
        await puller.pull(held=held, want_version=3)
    api.list_manifests = api._core.list_manifests
    assert (await puller.pull(held=held, want_version=3)).arena.state_root() == run.roots[3]


async def test_manifests_that_descent_listed_are_not_asked_for_again(world):
    api, run, puller, _, _ = world
    held = await puller.pull(held=None, want_version=0)
    calls = []
    _bare(api, calls, page=100)

    async def admit(_plan):
        await puller.chain.list(1, 2)

    assert (await puller.pull(held=held, want_version=3, admit=admit)).arena.state_root() == run.roots[3]
    assert calls == [(1, 2)]


async def test_manifests_of_a_way_are_bounded(world, monkeypatch):
    api, _, puller, _, _ = world
    held = await puller.pull(held=None, want_version=0)
    _bare(api, [], page=100)
    monkeypatch.setattr("heterorl.common.pull.puller.MAX_BYTES", 10)
    with pytest.raises(LimitExceeded, match="manifests of"):
        await puller.pull(held=held, want_version=3)
