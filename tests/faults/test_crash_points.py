"""A crash at every effect on the disk of publish, snapshot, deletion, pull and push: nothing acknowledged is lost.

Each scenario runs the real code once under tests.support.crashes.Disk; then every state that a crash could have left is
opened by the real recovery, and the invariants are checked there.
"""

import asyncio
import contextlib
import dataclasses
import os
import random
import shutil
import tempfile
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from heterorl.common.identity.signing import Trust
from heterorl.common.process.backoff import Backoff
from heterorl.common.process.clock import Bell, SystemClock
from heterorl.common.pull.puller import Puller
from heterorl.common.types.policy import PayloadKind
from heterorl.common.types.run import Heartbeat
from heterorl.common.weights.payload import file_digest
from heterorl.common.wire.policy_messages import manifest_digest, manifest_from_bytes
from heterorl.coordinator.payloads import payload_index
from heterorl.coordinator.versions.chain import Chain
from heterorl.learner.run import state_directory as incarnation
from heterorl.sampler.delay import NoDelay, Visibility
from heterorl.sampler.outbox.delivery import Delivery
from heterorl.sampler.outbox.outbox import Outbox
from heterorl.sampler.trust_record import TrustRecord
from heterorl.sampler.weight_sync import WeightSync
from tests.support.crashes import Disk, Image
from tests.support.learner_world import LAYOUT, NumpyBackend, fill, learn, learner_config, open_coordinator
from tests.support.limits import WAIT_S
from tests.support.merging import LARGER, RandomRun, keeping, published, puller, stored_files
from tests.support.run import INCARNATION, SITE, Run

pytestmark = pytest.mark.timeout(300)


def files(directory: Path) -> list[str]:
    return [path.name for path in directory.rglob("*") if path.is_file()]


@pytest.fixture
def tmp_path(tmp_path: Path) -> Iterator[Path]:
    """In memory where that is possible: thousands of fsyncs need no disk, since what they do is modelled."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=memory, prefix="heterorl-") as directory:
        yield Path(directory)


@pytest.fixture(autouse=True)
def same_disk(monkeypatch):
    """What a crash leaves is on the same disk, though it is a copy here: the learner knows its directory again."""
    monkeypatch.setattr(incarnation, "_inode", lambda file: 1)


async def check_each(disk: Disk, directory: Path, check: Callable[[Path, Image], Awaitable[None]]) -> None:
    """Open what each crash left, and say which one it was when something is wrong."""
    for number, image in enumerate(disk.images):
        place = image.write(directory / f"image-{number}")
        try:
            await check(place, image)
        except BaseException as error:
            error.add_note(f"the crash: {image}")
            raise
        shutil.rmtree(place)


# publish: versions 0 and 1 from an empty state directory; the recovered learner makes version 2

STEPS = 2


class Acknowledging:
    """A coordinator's api that notes what was promised: versions to the learner, groups to a sampler."""

    def __init__(self, api, acknowledged):
        self._api, self._acknowledged = api, acknowledged

    def __getattr__(self, name):
        return getattr(self._api, name)

    async def publish_version(self, request):
        version = await self._api.publish_version(request)
        self._acknowledged.append(("version", version, manifest_digest(request.manifest)))
        return version

    async def push_groups(self, groups):
        outcomes = await self._api.push_groups(groups)
        self._acknowledged.append(("groups", len(groups)))
        return outcomes


async def roots_of(core) -> dict[int, str]:
    def operation(connection):
        return dict(connection.execute("SELECT version, state_root FROM versions").fetchall())

    return await core.database.run(operation)


async def learn_on(core, directory, api, *, max_steps, backend=None):
    """The learner from where it is to `max_steps`, and the groups that it needs, unless they were pushed before."""
    backend = backend or NumpyBackend()
    # Steps are small beside such weights: version 1 is a delta.
    backend.weights *= np.float32(16.0)
    tasks = [learn(learner_config(directory, max_steps=max_steps), api, backend)]
    if (await core.get_status()).ledger.acked == 0:
        tasks.append(fill(api, STEPS * 2))
    result, *_ = await asyncio.gather(*tasks)
    assert result.is_finished


async def test_learner_that_publishes(tmp_path):
    disk = Disk(tmp_path / "run", machines=("coordinator", "learner"))
    with disk.installed():
        core = await open_coordinator(disk.root)
        api = Acknowledging(core, disk.acknowledged)
        with disk.watch():
            await learn_on(core, disk.root, api, max_steps=STEPS - 1)
        await learn_on(core, disk.root, api, max_steps=STEPS)
        reference = await roots_of(core)
        kinds = {
            payload.kind for payload in manifest_from_bytes((await core.get_signed_manifest(version=1)).data).payloads
        }
        await core.close()
    assert kinds == {PayloadKind.DELTA}
    assert set(reference) == set(range(STEPS + 1))
    await check_each(disk, tmp_path, lambda directory, image: check_learner(directory, image, reference))


@pytest.mark.slow
async def test_learner_that_publishes_while_a_step_computes(tmp_path):
    """Version 1 goes out while step 2 computes: a crash then leaves nothing of that step but groups to be had again."""
    disk = Disk(tmp_path / "run", machines=("coordinator", "learner"))
    backend, is_out = NumpyBackend(), threading.Event()
    # Step 2 ends when version 1 is committed, and its own version is not watched.
    backend.on_step = lambda: len(backend.reports) != 1 or is_out.wait(WAIT_S)
    with disk.installed():
        core = await open_coordinator(disk.root)

        class Api(Acknowledging):
            async def publish_version(self, request):
                version = await super().publish_version(request)
                if version == 1:
                    disk.effect("version 1 is acknowledged while step 2 computes")
                    watch.close()
                    is_out.set()
                return version

        with contextlib.ExitStack() as watch:
            watch.enter_context(disk.watch())
            await learn_on(core, disk.root, Api(core, disk.acknowledged), max_steps=STEPS, backend=backend)
        reference = await roots_of(core)
        await core.close()
    assert set(reference) == set(range(STEPS + 1))
    assert [image for image in disk.images if ("version", 0) in [entry[:2] for entry in image.acknowledged]]
    await check_each(disk, tmp_path, lambda directory, image: check_learner(directory, image, reference))


async def check_learner(directory: Path, image: Image, reference: dict[int, str]) -> None:
    core = await open_coordinator(directory)
    try:
        before = await roots_of(core)
        for kind, *facts in image.acknowledged:
            if kind == "version":
                assert manifest_digest((await core.get_signed_manifest(version=facts[0])).data) == facts[1]
            else:
                assert (await core.get_status()).ledger.acked == facts[0]
        offered = (await core.database.run(lambda connection: payload_index.graph(Chain(connection)))).payloads
        assert all(file_digest(core.blobs.path(payload.digest)) == payload.digest for payload in offered)
        for version, root in before.items():
            pull = Puller(api=core, spool=directory / "spool", layout=LAYOUT, clock=SystemClock())
            pulled = await pull.pull(held=None, want_version=version)
            assert pulled.arena.state_root() == root

        await learn_on(core, directory, core, max_steps=STEPS)

        assert await roots_of(core) == reference, "each number has the weights of a run that nothing disturbed"
        assert (await core.get_status()).ledger.consumed == STEPS * 2
        assert files(directory / "learner" / "payloads") == []
        assert list((directory / "learner" / "checkpoints").glob("writing-*")) == []
        assert files(directory / "coordinator" / "partial") == []
    finally:
        await core.close()


# snapshots and deletion: a coordinator whose samplers hold old versions or are fetching

SMALL = {"merged_bytes": 0, "snapshot_ratio": 0.02, "keep_versions": 2, "max_staleness_versions": 1}


async def build_snapshot(core) -> None:
    """Verify the learner's snapshots, compose one of the deltas, verify it, offer it; delete what it makes useless."""
    await core.collector.work()


async def collect_for_room(core) -> None:
    """Delete everything that nobody needs."""
    await core.collector.collect(missing_bytes=1)


@pytest.mark.parametrize("scenario", [pytest.param(build_snapshot, marks=pytest.mark.slow), collect_for_room])
async def test_coordinator_that_writes_and_deletes(tmp_path, scenario):
    disk = Disk(tmp_path / "run")
    work, spool = tmp_path / "work", tmp_path / "spool"
    work.mkdir()
    with disk.installed():
        async with keeping(disk.root, **SMALL) as (core, clock):
            run = RandomRun(core, work)
            await run.begin()
            while run.head < 3:
                await run.publish()
            await run.register()
            # Until the clock moves on, this plan keeps everything since version 1.
            await core.plan_pull(have_version=1, have_root=run.roots[1], want_version=-1)
            for _ in range(4):
                await run.publish()
                await core.collector.work()
            held = [await puller(core, spool).pull(held=None, want_version=version) for version in (5, 6)]
            await run.publish()
            await run.publish()
            if scenario is collect_for_room:
                await core.collector.work()
            clock.advance(601)
            # Version 5 is generated with; somebody who holds version 6 has a plan for the head.
            beat = {"policy_version": 5, "state_root": run.roots[5], "tokens_per_s": 0.0}
            await core.heartbeat(Heartbeat(site=SITE, incarnation=INCARNATION, **beat))
            await core.plan_pull(have_version=6, have_root=run.roots[6], want_version=-1)
            before = stored_files(disk.root)
            disk.acknowledged += run.roots.items()
            with disk.watch():
                await scenario(core)
            after = stored_files(disk.root)
    if scenario is build_snapshot:
        assert after - before, "a snapshot was written"
    else:
        assert before - after, "something was deleted"

    async def check(directory: Path, image: Image) -> None:
        async with keeping(directory, **SMALL) as (core, _):
            # Before anything else: what is offered is there and whole.
            graph = await core.database.run(lambda connection: payload_index.graph(Chain(connection)))
            assert all(file_digest(core.blobs.path(payload.digest)) == payload.digest for payload in graph.payloads)
            assert await core.database.run(payload_index.retired) == []
            assert files(directory / "data" / "rebuilt") == []
            for version, root in image.acknowledged:
                assert manifest_from_bytes((await core.get_signed_manifest(version=version)).data).state_root == root
            for start, want in ((None, run.head - 1), (held[0], -1), (held[1], -1)):
                pulled = await puller(core, directory / "spool").pull(held=start, want_version=want)
                assert pulled.arena.state_root() == run.roots[pulled.version]
            # Versions later nothing is left of the crash.
            later = RandomRun(core, directory)
            await later.begin(request_id="after")
            later.arena, later.head = run.arena, run.head
            for _ in range(3):
                await later.publish()
                await core.collector.work()
            named, _ = await core.database.run(payload_index.named)
            assert stored_files(directory) == named
            assert files(directory / "data" / "rebuilt") + files(directory / "data" / "partial") == []
            assert core.blobs.used_bytes == sum((core.blobs.size(digest) or 0) for digest in named)

    await check_each(disk, tmp_path, check)


# a sampler that holds version 1 and follows the head to version 3 by two deltas


class SmallFrames:
    """A coordinator's api that sends payloads in frames of 2 kB."""

    def __init__(self, api):
        self._api = api

    def __getattr__(self, name):
        return getattr(self._api, name)

    async def read_payload(self, **wanted):
        async for frame in self._api.read_payload(**wanted):
            for start in range(0, len(frame), 2000):
                yield frame[start : start + 2000]


class Following:
    """A sampler's weights as its process keeps them, over one state directory."""

    def __init__(self, api, directory: Path) -> None:
        self.record = TrustRecord(directory / "site" / "versions.jsonl")
        self.bell = Bell()
        self.sync = WeightSync(
            api=api,
            puller=Puller(api=api, spool=directory / "site" / "spool", layout=LARGER, clock=SystemClock()),
            visibility=Visibility(NoDelay(kind="none"), seed=0),
            record=self.record,
            trust=Trust(),
            clock=SystemClock(),
            bell=self.bell,
            rng=random.Random(0),
            backoff=Backoff(clock=SystemClock(), rng=random.Random(0)),
        )

    async def until(self, version: int):
        """Follow the head until the version may be generated with."""
        tasks = [asyncio.create_task(loop()) for loop in (self.sync.watch, self.sync.sync)]
        while (taken := self.sync.take(-1)) is None or taken.version < version:
            ticket = self.bell.ticket()
            done, _ = await asyncio.wait([*tasks, asyncio.create_task(ticket.wait())], return_when="FIRST_COMPLETED")
            for task in done & set(tasks):
                await task
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        return taken


async def test_sampler_that_pulls(tmp_path):
    disk = Disk(tmp_path / "run")
    async with keeping(tmp_path, merged_bytes=0) as (core, _):
        run = await published(core, tmp_path, 1)
        api = SmallFrames(core)
        with disk.installed():
            following, seen = None, []

            def look():
                taken = None if following is None else following.sync.take(-1)
                if taken is not None:
                    seen.append((taken.version, taken.arena.state_root()))
                    if taken.version not in disk.acknowledged:
                        disk.acknowledged.append(taken.version)

            disk.on_effect = look
            with disk.watch():
                following = Following(api, disk.root)
                await following.until(1)
                await run.publish()
                await run.publish()
                await following.until(3)

        allowed = {(version, run.roots[version]) for version in (1, 2, 3)}
        assert {(1, run.roots[1]), (3, run.roots[3])} <= set(seen) <= allowed, (
            "the old weights or the new, nothing else"
        )

        async def check(directory: Path, image: Image) -> None:
            again = Following(api, directory)
            newest = again.record.newest
            assert again.record.highest_version >= max(image.acknowledged, default=-1)
            assert newest is None or newest.state_root == run.roots[newest.version]
            taken = await again.until(3)
            assert taken.arena.state_root() == run.roots[3]
            assert files(directory / "site" / "spool") == []

        await check_each(disk, tmp_path, check)


# a site that stores three groups in two calls, delivers them, and forgets them


async def deliver_all(outbox: Outbox, api) -> None:
    """Push until the outbox is empty."""
    bell = Bell()
    delivery = Delivery(api=api, outbox=outbox, clock=SystemClock(), bell=bell, rng=random.Random(0))
    loop = asyncio.create_task(delivery.deliver())
    while outbox.level().num_groups:
        ticket = bell.ticket()
        await asyncio.wait([loop, asyncio.create_task(ticket.wait())], return_when="FIRST_COMPLETED")
        if loop.done():
            await loop
    loop.cancel()
    await asyncio.wait([loop])


def kept_in(outbox: Outbox) -> list[int]:
    groups, _ = outbox.due(1.0, limit=10, max_bytes=1 << 20)
    return [group.id.sequence for group in groups]


async def test_site_that_delivers(tmp_path):
    disk = Disk(tmp_path / "run", machines=("coordinator", "site"))
    with disk.installed():
        core = await open_coordinator(disk.root)
        run = Run(core, tmp_path)
        await run.begin()
        await run.publish()
        outbox = Outbox(disk.root / "site", site=SITE)
        await run.register(incarnation=outbox.incarnation)
        grant = await core.lease_work(site=SITE, incarnation=outbox.incarnation, max_groups=3, policy_version=0)
        groups = [run.group(work) for work in grant.assignments]
        groups = [
            dataclasses.replace(group, id=dataclasses.replace(group.id, incarnation=outbox.incarnation))
            for group in groups
        ]
        with disk.watch():
            for part in (groups[:2], groups[2:]):
                outbox.put(part, release=[0.0] * len(part))
                disk.acknowledged += [("stored", group.id.sequence) for group in part]
            await deliver_all(outbox, Acknowledging(core, disk.acknowledged))
        assert (await core.get_status()).ledger.acked == 3
        outbox.close()
        await core.close()
    assert {("stored", 3), ("groups", 3)} <= set(disk.images[-1].acknowledged)

    async def check(directory: Path, image: Image) -> None:
        core = await open_coordinator(directory)
        outbox = Outbox(directory / "site", site=SITE)
        try:
            run = Run(core, directory)
            delivered = (await core.get_status()).ledger.acked
            assert delivered >= sum(count for kind, count in image.acknowledged if kind == "groups")
            stored = [number for kind, number in image.acknowledged if kind == "stored"]
            waiting = kept_in(outbox)
            assert outbox.next_sequence == max([*waiting, *stored, delivered], default=0) + 1
            assert set(stored) <= {*range(1, delivered + 1), *waiting}
            await run.register(incarnation=outbox.incarnation)
            await deliver_all(outbox, core)
            assert (await core.get_status()).ledger.acked == outbox.next_sequence - 1, "each group entered once"
        finally:
            outbox.close()
            await core.close()

    await check_each(disk, tmp_path, check)
