"""The keeper over real files and a real store: snapshots when due, deletion that hurts nobody, a bounded disk."""

import asyncio
import threading

import pytest
import xxhash
from pydantic import ValidationError

from heterorl.common.errors import PayloadMissing, StoreFull, UnknownPayload, UnknownVersion, UntrustedVersion
from heterorl.common.process.metrics import DAMAGED_PAYLOADS
from heterorl.common.types.policy import PayloadKind, PlanKind
from heterorl.common.types.run import Heartbeat
from heterorl.common.weights.arena import Arena
from heterorl.common.weights.manifest import build_manifest
from heterorl.common.weights.payload import write_delta, write_snapshot
from heterorl.common.wire.policy_messages import manifest_from_bytes
from heterorl.coordinator.coordinator_config import CoordinatorConfig
from heterorl.coordinator.core import Coordinator
from heterorl.coordinator.payloads import payload_index
from heterorl.coordinator.versions.chain import Chain
from tests.support.clock import ManualClock
from tests.support.merging import Counted, keeping, published, puller, stored_files
from tests.support.run import INCARNATION, LAYOUT, SITE


async def named(core):
    graph = await core.database.run(lambda connection: payload_index.graph(Chain(connection)))
    return {(payload.kind, payload.to_version) for payload in graph.payloads}


async def in_use(core, run, version, *, incarnation=INCARNATION):
    await run.register(incarnation=incarnation)
    beat = Heartbeat(
        site=SITE, incarnation=incarnation, policy_version=version, state_root=run.roots[version], tokens_per_s=0.0,
    )  # fmt: skip
    await core.heartbeat(beat)


async def grow(core, run, count):
    for _ in range(count):
        await run.publish()
        await core.collector.work()


async def worked(core):
    await core.merger.settle()
    await core.collector.work()


async def test_snapshots_are_written_when_due_and_what_is_behind_them_goes(tmp_path):
    async with keeping(tmp_path) as (core, _):
        run = await published(core, tmp_path, 0)
        for _ in range(30):
            await run.publish()
            await worked(core)

        left = await named(core)
        snapshots = sorted(version for kind, version in left if kind is PayloadKind.SNAPSHOT)
        status = await core.get_status()
        joiner = Counted(core)
        pulled = await puller(joiner, tmp_path / "new").pull(held=None, want_version=-1)
        behind = await puller(core, tmp_path / "behind").pull(held=None, want_version=28)

    assert 0 not in snapshots
    assert 2 <= len(snapshots) <= 3
    assert (PayloadKind.DELTA, 5) not in left
    assert {(PayloadKind.DELTA, version) for version in range(27, 31)} <= left
    assert pulled.arena.state_root() == run.roots[30]
    assert behind.arena.state_root() == run.roots[28]
    assert joiner.kinds[PayloadKind.SNAPSHOT] == 1
    assert status.snapshot_version == snapshots[-1]
    assert status.reclaimed_bytes > 0
    sizes = [path.stat().st_size for path in (tmp_path / "data" / "blobs").rglob("*") if path.is_file()]
    assert status.store_bytes == sum(sizes)


async def test_snapshot_by_the_coordinator_has_the_bytes_of_one_by_the_learner(tmp_path):
    async with keeping(tmp_path, snapshot_ratio=0.001) as (core, _):
        run = await published(core, tmp_path, 3)
        await worked(core)
        (payload,) = [
            p for p in (await core.database.run(lambda connection: payload_index.graph(Chain(connection)))).payloads
            if p.kind is PayloadKind.SNAPSHOT and p.to_version == 3
        ]  # fmt: skip
        mine = core.blobs.path(payload.digest).read_bytes()

    info = write_snapshot(tmp_path / "theirs", run.arena)
    assert (tmp_path / "theirs").read_bytes() == mine
    assert info.digest == payload.digest


async def test_version_in_use_keeps_its_way_until_its_site_is_gone(tmp_path):
    async with keeping(tmp_path, merged_bytes=0, snapshot_ratio=0.005) as (core, clock):
        run = await published(core, tmp_path, 6)
        held = await puller(core, tmp_path / "a").pull(held=None, want_version=5)
        await in_use(core, run, 5)
        # So dear that deltas are the better way for whoever holds anything.
        await core.database.run(
            lambda c: c.execute("UPDATE payloads SET num_bytes = num_bytes * 50 WHERE kind = 'snapshot'")
        )
        await grow(core, run, 20)
        # Every lease is over; the site is not.
        clock.advance(601)
        await in_use(core, run, 5)
        await core.collector.work()
        assert (PayloadKind.DELTA, 6) in await named(core)
        assert (PayloadKind.DELTA, 5) not in await named(core)
        api = Counted(core)
        pulled = await puller(api, tmp_path / "a").pull(held=held, want_version=-1)
        assert api.kinds == {PayloadKind.DELTA: 21}
        assert pulled.arena.state_root() == run.roots[26]

        clock.advance(601)
        await core.collector.work()
        assert (PayloadKind.DELTA, 6) not in await named(core)
        assert (await puller(core, tmp_path / "a").pull(held=held, want_version=-1)).version == 26


async def test_open_order_keeps_its_payloads_however_long_the_learner_is_away(tmp_path):
    async with keeping(tmp_path, merged_bytes=0, snapshot_ratio=0.005) as (core, clock):
        run = await published(core, tmp_path, 20)
        await core.rollback(to_version=2, request_id="one")
        clock.advance(10_000)
        await grow(core, run, 10)
        rebuilt = await puller(core, tmp_path / "a").pull(held=None, want_version=2)
        assert rebuilt.arena.state_root() == run.roots[2]

        await core.rollback(to_version=-1, request_id="two")
        clock.advance(10_000)
        await core.collector.work()
        assert 2 not in await core.list_restorable()


async def test_file_of_another_name_among_the_payloads_stops_no_deletion(tmp_path):
    async with keeping(tmp_path) as (core, _):
        run = await published(core, tmp_path, 0)
        stray = [tmp_path / "data" / place / ".nfs00000000000000010" for place in ("blobs/ab", "partial")]
        for path in stray:
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(b"an NFS server's")
        await grow(core, run, 30)
        assert (await core.get_status()).reclaimed_bytes > 0
    (tmp_path / "data" / "merged" / "lost+found").mkdir(parents=True)
    async with keeping(tmp_path) as (core, _):
        assert (await core.get_status()).head_version == 30
    assert all(path.exists() for path in stray)


async def test_plan_under_way_keeps_its_payloads_while_frames_are_fetched(tmp_path):
    async with keeping(tmp_path, merged_bytes=0) as (core, clock):
        run = await published(core, tmp_path, 3)
        plan = await core.plan_pull(have_version=0, have_root=run.roots[0], want_version=3)
        assert len(plan.payloads) == 3
        await grow(core, run, 30)
        for _ in range(3):
            # Longer than one term in all, never silent for one.
            clock.advance(250)
            await core.collector.work()
            assert {p.digest for p in plan.payloads} <= stored_files(tmp_path)
            async for _frame in core.read_payload(digest=plan.payloads[0].digest, offset=0):
                pass
        clock.advance(601)
        await core.collector.collect(missing_bytes=1)

        assert {p.digest for p in plan.payloads}.isdisjoint(stored_files(tmp_path))
        with pytest.raises(UnknownPayload):
            await anext(core.read_payload(digest=plan.payloads[0].digest, offset=0))


async def test_version_that_a_caller_only_claims_to_hold_is_no_start_of_a_pull(tmp_path):
    """Else one site could claim thousands, and each deletion looks for a way from every one of them."""
    async with keeping(tmp_path, merged_bytes=0) as (core, clock):
        run = await published(core, tmp_path, 6)
        for version in (*range(6), 1 << 40):
            await core.plan_pull(have_version=version, have_root="f" * 64, want_version=-1)

        assert core.leases.versions(clock.monotonic()) == frozenset()
        await core.plan_pull(have_version=5, have_root=run.roots[5], want_version=-1)
        assert core.leases.versions(clock.monotonic()) == {5}


async def test_file_that_is_being_read_is_not_deleted(tmp_path):
    async with keeping(tmp_path, merged_bytes=0) as (core, clock):
        run = await published(core, tmp_path, 1)
        delta = (await core.plan_pull(have_version=0, have_root=run.roots[0], want_version=1)).payloads[0]
        frames = core.read_payload(digest=delta.digest, offset=0)
        data = await anext(frames)
        await grow(core, run, 30)
        clock.advance(10_000)
        await core.collector.collect(missing_bytes=1)
        assert delta.digest in stored_files(tmp_path)
        data += b"".join([frame async for frame in frames])
        await core.collector.collect(missing_bytes=1)

        assert len(data) == delta.num_bytes
        assert delta.digest not in stored_files(tmp_path)


async def test_nothing_is_retired_before_plans_of_an_earlier_process_have_ended(tmp_path):
    async with keeping(tmp_path, merged_bytes=0) as (core, _):
        run = await published(core, tmp_path, 20)
        # Snapshots to go by, and no time to retire anything.
        core.leases._is_known_from = float("inf")
        await grow(core, run, 10)
        before = stored_files(tmp_path)
    clock = ManualClock()
    config = CoordinatorConfig(
        data_dir=tmp_path / "data", keep_versions=4, max_staleness_versions=2, snapshot_ratio=0.05
    )
    core = await Coordinator.open(config, clock)
    clock.advance(599)
    await core.collector.work()
    assert before <= stored_files(tmp_path)
    clock.advance(1)
    await core.collector.work()
    assert not before <= stored_files(tmp_path)
    await core.close()


def test_deltas_are_kept_at_least_as_long_as_samplers_may_ask_for_them():
    with pytest.raises(ValidationError, match="keep_versions is below max_staleness_versions"):
        CoordinatorConfig(keep_versions=7, max_staleness_versions=8)
    assert CoordinatorConfig(keep_versions=8, max_staleness_versions=8).merge_window_versions == 8
    # 0: as many as four times the staleness, 256 at least.
    assert CoordinatorConfig(max_staleness_versions=100).merge_window_versions == 400


@pytest.mark.files
async def test_full_quota_deletes_before_it_refuses_and_names_its_key(tmp_path):
    async with keeping(tmp_path, merged_bytes=0, keep_versions=40) as (core, _):
        run = await published(core, tmp_path, 20)
        await core.collector.work()
        # A window of 40 keeps every delta; the snapshots before the second newest are the first to go.
        for _ in range(12):
            await run.publish(snapshot=True, lineage_version=run.head)
        used = core.blobs.used_bytes
        core.blobs._space_bytes = used + 1000
        await core.collector._verify_newest("")
        await run.publish(snapshot=True, lineage_version=run.head)
        assert core.blobs.used_bytes < used
        assert (await core.get_status()).reclaimed_bytes > 0

        core.blobs._space_bytes = 1000
        with pytest.raises(StoreFull, match=r"payload_space_bytes = 1000.* nothing more can be deleted"):
            await run.publish(snapshot=True, lineage_version=run.head)


async def test_snapshot_that_lies_is_put_aside_and_nothing_is_retired_on_its_word(tmp_path):
    async with keeping(tmp_path, merged_bytes=0, snapshot_ratio=1e9) as (core, _):
        run = await published(core, tmp_path, 10)
        request = await run.prepare(snapshot=True)
        manifest = manifest_from_bytes(request.manifest)
        # Right in its own bytes, of another state than its manifest says.
        lie = {"chunk_digests": (b"\x01" * 16, *manifest.chunk_digests[1:])}
        run.head, run.arena = 10, run.arena
        await run.publish(snapshot=True, step_id="lie", manifest=lie)
        damaged = DAMAGED_PAYLOADS._value.get()
        await core.collector.work()

        assert DAMAGED_PAYLOADS._value.get() == damaged + 1
        assert (PayloadKind.SNAPSHOT, 11) not in await named(core)
        assert (PayloadKind.DELTA, 1) in await named(core)
        assert len(list((tmp_path / "data" / "damaged").iterdir())) == 1


@pytest.mark.files
async def test_damaged_delta_on_the_way_stops_retirement_and_is_named(tmp_path):
    async with keeping(tmp_path, merged_bytes=0, snapshot_ratio=1e9, keep_versions=30) as (core, _):
        await published(core, tmp_path, 33)
        await core.collector._verify_newest("")
        victim = next(
            p for p in (await core.database.run(lambda connection: payload_index.graph(Chain(connection)))).payloads
            if (p.kind, p.to_version) == (PayloadKind.DELTA, 20)
        )  # fmt: skip
        path = core.blobs.path(victim.digest)
        data = bytearray(path.read_bytes())
        data[-3] ^= 4
        path.write_bytes(data)
        before = stored_files(tmp_path)
        await core.collector.work()

        assert before - stored_files(tmp_path) == {victim.digest}
        assert (tmp_path / "data" / "damaged" / victim.digest).read_bytes() == data
        assert (PayloadKind.DELTA, 20) not in await named(core)


@pytest.mark.files
async def test_payload_that_changed_on_disk_is_never_sent_and_the_next_plan_does_without_it(tmp_path):
    async with keeping(tmp_path, merged_bytes=0) as (core, _):
        run = await published(core, tmp_path, 4)
        await run.publish(snapshot=True, lineage_version=run.head)
        await run.publish()
        held = await puller(core, tmp_path / "a").pull(held=None, want_version=5)
        delta = (await core.plan_pull(have_version=5, have_root=run.roots[5], want_version=6)).payloads[0]
        path = core.blobs.path(delta.digest)
        path.write_bytes(path.read_bytes()[:-1])
        with pytest.raises(UnknownPayload, match="damaged"):
            await anext(core.read_payload(digest=delta.digest, offset=0))
        with pytest.raises(UnknownVersion):
            await puller(core, tmp_path / "a").pull(held=held, want_version=6)
        await run.publish(snapshot=True, lineage_version=run.head)

        pulled = await puller(core, tmp_path / "a").pull(held=held, want_version=-1)
        assert pulled.arena.state_root() == run.roots[7]


@pytest.mark.files
async def test_uploads_that_no_version_names_are_given_up(tmp_path):
    async with keeping(tmp_path, merged_bytes=0, snapshot_ratio=1e9) as (core, _):
        run = await published(core, tmp_path, 2)
        arena = run.arena
        request = await run.prepare()
        (whole,) = manifest_from_bytes(request.manifest).payloads
        await core.upload_payload(epoch=run.epoch, digest="a" * 64, num_bytes=100, offset=0, frames=one(b"x" * 10))
        await core.collector.work()
        assert core.blobs.query("a" * 64) == 10
        # The next versions are others.
        run.arena = arena
        for _ in range(2):
            await run.publish()
        used = core.blobs.used_bytes
        await core.collector.work()
        assert core.blobs.query("a" * 64) == core.blobs.query(whole.digest) == 0
        assert core.blobs.used_bytes == used - 10 - whole.num_bytes
        with pytest.raises(PayloadMissing):
            await core.publish_version(request)


async def one(data):
    yield data


async def test_publication_and_deletion_of_the_same_payload_exclude_each_other(tmp_path):
    async with keeping(tmp_path, merged_bytes=0) as (core, _):
        run = await published(core, tmp_path, 2)
        request = await run.prepare()
        (payload,) = manifest_from_bytes(request.manifest).payloads
        await core.database.run(lambda c: payload_index.retire_digests(c, [payload.digest]))
        entered, opened = threading.Event(), threading.Event()
        real = core.blobs.ensure

        async def slow(**named_payload):
            found = await real(**named_payload)
            entered.set()
            await asyncio.to_thread(opened.wait, 30)
            return found

        core.blobs.ensure = slow
        publishing = asyncio.create_task(core.publish_version(request))
        await asyncio.to_thread(entered.wait, 30)
        await core.collector.collect()
        assert payload.digest in stored_files(tmp_path)
        opened.set()
        assert await publishing == 3
        await core.collector.collect()

        assert payload.digest in stored_files(tmp_path)
        assert await core.database.run(payload_index.retired) == []


async def test_composition_that_went_wrong_is_not_offered(tmp_path, monkeypatch):
    real = payload_index.compose

    def short(paths, target, **rest):
        return real(paths[:-1], target, **rest)

    monkeypatch.setattr(payload_index, "compose", short)
    async with keeping(tmp_path, snapshot_ratio=0.001) as (core, _):
        run = await published(core, tmp_path, 5)
        await worked(core)

        assert {version for kind, version in await named(core) if kind is PayloadKind.SNAPSHOT} == {0}
        assert list((tmp_path / "data" / "rebuilt").iterdir()) == []
        plan = await core.plan_pull(have_version=-1, have_root="", want_version=-1)
        assert (plan.kind, plan.target_version) == (PlanKind.SNAPSHOT, run.head)


async def test_joiner_with_the_base_model_fetches_no_snapshot(tmp_path):
    async with keeping(tmp_path) as (core, _):
        run = await published(core, tmp_path, 0)
        base = run.arena.copy()
        api = Counted(core)
        same = await puller(api, tmp_path / "a", base=lambda: base).pull(held=None, want_version=0)
        assert (same.version, api.num_read) == (0, 0)
        plans = []

        async def admit(plan):
            plans.append(plan)
            raise UntrustedVersion("no")

        with pytest.raises(UntrustedVersion):
            await puller(api, tmp_path / "judged", base=lambda: base).pull(held=None, want_version=0, admit=admit)
        assert plans[0].manifests == ((await core.get_signed_manifest(version=0)).data,)
        for _ in range(5):
            await run.publish()
        pulled = await puller(api, tmp_path / "b", base=lambda: base).pull(held=None, want_version=-1)
        assert api.kinds[PayloadKind.SNAPSHOT] == 0
        assert pulled.arena.state_root() == run.roots[5]
        assert base.state_root() == run.roots[0]

        # Another base than the run's is of no use, and harms nothing.
        base.chunk(0)[0] ^= 1
        pulled = await puller(api, tmp_path / "c", base=lambda: base).pull(held=None, want_version=-1)
        assert api.kinds[PayloadKind.SNAPSHOT] == 1
        assert pulled.arena.state_root() == run.roots[5]


async def test_merged_delta_that_somebody_fetches_outlives_its_use(tmp_path):
    async with keeping(tmp_path) as (core, clock):
        run = await published(core, tmp_path, 4)
        await core.merger.settle()
        plan = await core.plan_pull(have_version=0, have_root=run.roots[0], want_version=4, accept_merged=True)
        (merged,) = plan.payloads

        def leased():
            return core.leases.payloads(clock.monotonic())

        assert await core.merges.evict(head=4, window=0, budget_bytes=0, leased=leased) == []
        assert core.merges.path(merged).exists()
        clock.advance(601)
        await core.merges.evict(head=4, window=0, budget_bytes=0, leased=leased)
        assert not core.merges.path(merged).exists()


# Of the header's bytes: the state it starts from and the one it leads to.
@pytest.mark.parametrize("place", [44, 76], ids=["from", "to"])
def test_payload_of_another_way_is_found_though_its_chunks_lead_to_the_state(tmp_path, place):
    old = Arena(LAYOUT)
    new = old.copy()
    new.chunk(0)[:] += 1
    paths = [tmp_path / "snapshot", tmp_path / "delta"]
    infos = [write_snapshot(paths[0], old), write_delta(paths[1], old, new)]
    manifests = [
        build_manifest(
            run_id="run", epoch=1, version=version, parent_version=version - 1, parent_digest="", layout=arena.layout,
            step=version, info=info, payloads=(),
        )
        for version, (arena, info) in enumerate(zip((old, new), infos, strict=True))
    ]  # fmt: skip
    payload_index.verify_way(paths, manifests, on_chunk=lambda: None)
    data = bytearray(paths[1].read_bytes())
    data[place : place + 32] = bytes(range(32))
    end = 12 + int.from_bytes(data[8:12], "little")
    data[end : end + 8] = xxhash.xxh3_64_intdigest(bytes(data[12:end])).to_bytes(8, "little")
    paths[1].write_bytes(data)

    with pytest.raises(payload_index.DamagedPayload, match="it leads from") as found:
        payload_index.verify_way(paths, manifests, on_chunk=lambda: None)
    assert found.value.index == 1


@pytest.mark.files
async def test_nothing_is_retired_when_the_head_cannot_be_rebuilt(tmp_path):
    async with keeping(tmp_path, merged_bytes=0) as (core, _):
        run = await published(core, tmp_path, 5)
        await run.publish(snapshot=True, lineage_version=4)
        await core.collector._verify_newest("")
        await run.publish()
        victim = (await core.plan_pull(have_version=6, have_root=run.roots[6], want_version=7)).payloads[0]
        await run.publish()
        path = core.blobs.path(victim.digest)
        data = bytearray(path.read_bytes())
        data[-3] ^= 4
        path.write_bytes(data)
        before = stored_files(tmp_path)
        await core.collector.collect(missing_bytes=1)

        # The abandoned version 5 and all before the snapshot of 6 could go, but for the damage behind it.
        assert before - stored_files(tmp_path) == {victim.digest}


async def test_of_the_copies_only_what_the_disk_lacks_goes(tmp_path, monkeypatch):
    async with keeping(tmp_path) as (core, _):
        await published(core, tmp_path, 2)
        asked = []

        async def make_room(missing_bytes):
            asked.append(missing_bytes)

        async def evict(**_):
            asked.append("merged deltas")

        monkeypatch.setattr(core.collector.cache, "make_room", make_room)
        monkeypatch.setattr(core.merger.merges, "evict", evict)
        await core.collector.work()
        # Damaged payloads and merged deltas freed some; then damaged payloads all.
        lacks = iter((1000, 800, 600, 1000, 0, 0))
        core.collector.missing_bytes = lambda: next(lacks)
        await core.collector.work()
        assert asked == ["merged deltas", 600]
        await core.collector.work()

    assert asked == ["merged deltas", 600, 0]
