"""Deletion and snapshots under random histories and damaged disks: whoever is alive still reaches the head."""

import asyncio
import contextlib
import random
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from heterorl.common.errors import DigestMismatch, UnknownPayload
from heterorl.common.types.policy import PayloadKind
from heterorl.common.types.run import Heartbeat
from heterorl.coordinator.payloads import payload_index
from heterorl.coordinator.versions.chain import Chain
from tests.support.examples import examples
from tests.support.merging import keeping, published, puller, stored_files
from tests.support.run import INCARNATION, SITE

SMALL = {"merged_bytes": 0, "snapshot_ratio": 0.02, "keep_versions": 2, "max_staleness_versions": 1}


async def beat(core, held, incarnation=INCARNATION):
    state = {"policy_version": held.version, "state_root": held.manifest.state_root}
    await core.heartbeat(Heartbeat(site=SITE, incarnation=incarnation, tokens_per_s=0.0, **state))


class History:
    """A run with samplers that come, pull, hold and go, and a coordinator that dies."""

    def __init__(self, directory):
        self.directory = directory
        self.stack = contextlib.AsyncExitStack()
        self.core, self.clock = None, None
        self.run = None
        self.alive = {}
        self.num_sites = 0

    async def open(self):
        self.core, self.clock = await self.stack.enter_async_context(
            keeping(self.directory, **{**SMALL, "merged_bytes": 1 << 20})
        )
        if self.run is None:
            self.run = await published(self.core, self.directory, 2)
        self.run.api = self.core
        await self.beat()

    async def crash(self):
        await self.stack.aclose()
        self.stack = contextlib.AsyncExitStack()
        await self.open()

    async def beat(self):
        for name, held in self.alive.items():
            await self.run.register(incarnation=name)
            await beat(self.core, held, name)

    async def publish(self):
        await self.run.publish()

    async def learner_snapshot(self):
        await self.run.publish(snapshot=True, lineage_version=self.run.head)

    async def roll_back(self):
        lineage = (await self.core.database.run(lambda connection: payload_index.graph(Chain(connection)))).lineage
        if len(lineage) > 1:
            await self.run.publish(snapshot=True, lineage_version=lineage[-2])

    async def join(self):
        self.num_sites += 1
        self.alive[f"site-{self.num_sites}"] = await self.pull(None)
        await self.beat()

    async def pull(self, held, want=-1):
        spool = Path(tempfile.mkdtemp(dir=self.directory))
        return await puller(self.core, spool).pull(held=held, want_version=want)

    async def advance_one(self):
        if self.alive:
            name = min(self.alive)
            self.alive[name] = await self.pull(self.alive[name])
            await self.beat()

    async def leave(self):
        if self.alive:
            del self.alive[min(self.alive)]

    async def expire(self):
        self.clock.advance(601)
        await self.beat()

    async def work(self):
        await self.core.merger.settle()
        await self.core.collector.work()

    async def squeeze(self):
        await self.core.collector.collect(missing_bytes=1)

    async def check(self):
        """Everybody alive reaches the head, and so does a newcomer; what is offered is there."""
        graph = await self.core.database.run(lambda connection: payload_index.graph(Chain(connection)))
        assert {payload.digest for payload in graph.payloads} <= stored_files(self.directory)
        for held in (None, *self.alive.values()):
            pulled = await self.pull(held)
            assert pulled.version == self.run.head
            assert pulled.arena.state_root() == self.run.roots[self.run.head]


STEPS = ["publish"] * 4 + ["learner_snapshot", "roll_back", "join", "join", "advance_one", "leave", "expire"]
STEPS += ["work", "work", "squeeze", "squeeze", "crash"]


@pytest.mark.timeout(300)
@settings(max_examples=examples(4), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.sampled_from(STEPS), min_size=5, max_size=25))
def test_whoever_is_alive_reaches_the_head_after_any_history(steps):
    async def live(directory):
        history = History(directory)
        await history.open()
        try:
            for step in steps:
                await getattr(history, step)()
                if step in ("squeeze", "work", "crash"):
                    await history.check()
            await history.expire()
            await history.squeeze()
            await history.check()
        finally:
            await history.stack.aclose()

    with tempfile.TemporaryDirectory() as directory:
        asyncio.run(live(Path(directory)))


def damage(data, chooser):
    """The bytes with one bit turned over, cut, or with something behind them."""
    kind = chooser.randrange(10)
    if kind == 0:
        return data[: chooser.randrange(len(data))]
    if kind == 1:
        return data + bytes([chooser.randrange(256)])
    place = chooser.randrange(len(data))
    return data[:place] + bytes([data[place] ^ (1 << chooser.randrange(8))]) + data[place + 1 :]


@pytest.mark.files
@pytest.mark.timeout(300)
@pytest.mark.slow
async def test_damage_at_2000_places_is_noticed_and_never_sent(tmp_path, monkeypatch):
    chooser = random.Random(11)
    async with keeping(tmp_path, snapshot_ratio=0.05) as (core, _):
        run = await published(core, tmp_path, 21)
        await core.merger.settle()
        await core.collector.work()
        graph = await core.database.run(lambda connection: payload_index.graph(Chain(connection)))
        found = [(payload, core.blobs.path(payload.digest)) for payload in graph.payloads]
        merged = [payload for version in range(22) for payload in core.merges.into(version)]
        found += [(payload, core.merges.path(payload)) for payload in merged]
        assert {payload.kind for payload, _ in found} == set(PayloadKind)
        noticed = []

        async def note(digest, _problem):
            noticed.append(digest)

        with monkeypatch.context() as patches:
            # Putting aside would change the store each time; the next test does it for real.
            patches.setattr(core.damage, "put_aside", note)
            for number in range(2000):
                payload, path = found[number % len(found)]
                good = path.read_bytes()
                path.write_bytes(damage(good, chooser))
                with pytest.raises(UnknownPayload):
                    await anext(core.read_payload(digest=payload.digest, offset=chooser.randrange(2)))
                path.write_bytes(good)
        assert len(noticed) == 2000
        for payload, _ in found:
            async for _frame in core.read_payload(digest=payload.digest, offset=0):
                pass
        assert (await puller(core, tmp_path / "a").pull(held=None, want_version=-1)).version == run.head


@pytest.mark.files
@pytest.mark.parametrize("seed", range(8))
async def test_damaged_payload_on_the_way_costs_a_detour_and_no_wrong_state(tmp_path, seed):
    chooser = random.Random(seed)
    async with keeping(tmp_path, snapshot_ratio=0.05) as (core, _):
        run = await published(core, tmp_path, 9)
        await core.merger.settle()
        await core.collector.work()
        await run.publish()
        held = await puller(core, tmp_path / "a").pull(held=None, want_version=2)
        plan = await core.plan_pull(have_version=2, have_root=run.roots[2], want_version=9, accept_merged=True)
        victim = chooser.choice(plan.payloads)
        path = core.merges.path(victim) if victim.kind is PayloadKind.MERGED else core.blobs.path(victim.digest)
        path.write_bytes(damage(path.read_bytes(), chooser))

        pulled = await puller(core, tmp_path / "a").pull(held=held, want_version=9)

        assert pulled.arena.state_root() == run.roots[9]
        assert not path.exists()


@pytest.mark.files
async def test_damaged_upload_is_refused_and_sent_again(tmp_path):
    chooser = random.Random(3)
    async with keeping(tmp_path) as (core, _):
        run = await published(core, tmp_path, 0)
        for _ in range(20):
            request = await run.prepare()
            digest = next(iter(stored_files(tmp_path) - (await core.database.run(payload_index.named))[0]))
            data = core.blobs.path(digest).read_bytes()
            core.blobs.path(digest).unlink()
            part = core.blobs._partial / digest
            bad = damage(data[:-5], chooser)
            part.write_bytes(bad)
            if bad == data[: len(bad)]:
                continue
            have = min(core.blobs.query(digest), len(data))
            with pytest.raises(DigestMismatch):
                await run.upload(data, digest, offset=have)
            await run.upload(data, digest)
            run.head = await core.publish_version(request)
