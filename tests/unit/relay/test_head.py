"""The head that a relay passes on: a run that went back ends the watches, so that their callers look again."""

import asyncio

import pytest

from heterorl.common.errors import Unreachable
from heterorl.common.process.clock import SystemClock
from heterorl.common.types.policy import NO_VERSION, HeadUpdate, SignedManifest
from heterorl.relay.cache import CacheDirectory
from heterorl.relay.cached_weights import CachedWeights, Head


class Run:
    """A coordinator's head; a restart ends its watches."""

    def __init__(self, version):
        self.version = version
        self.restarted = asyncio.Event()
        self.is_away = False
        self.num_asked = 0

    async def get_signed_manifest(self, *, version):
        self.num_asked += 1
        return SignedManifest(data=b"answer %d to %d" % (self.num_asked, version), signature=b"")

    async def watch_head(self, *, after_version):
        restarted = self.restarted
        if self.is_away:
            raise Unreachable("the line is down")
        if self.version > after_version:
            yield HeadUpdate(version=self.version, age_s=0.0)
        await restarted.wait()
        raise Unreachable("the line broke")

    def restart(self, version):
        before, self.restarted = self.restarted, asyncio.Event()
        self.version = version
        before.set()


class Quick(SystemClock):
    """Waits between two dials take no time."""

    async def sleep(self, seconds):
        await asyncio.sleep(0)


@pytest.fixture
async def run():
    return Run(12)


@pytest.fixture
async def head(run):
    made = Head(api=run, clock=Quick(), on_change=lambda **_: None)
    watching = asyncio.ensure_future(made.run())
    yield made
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)


async def test_a_run_that_went_back_ends_the_watch_of_a_sampler_that_saw_more(head, run):
    watch = head.watch(after_version=NO_VERSION)
    assert (await anext(watch)).version == 12
    run.restart(10)

    # Else the sampler would hear nothing until the run has passed version 12 again.
    with pytest.raises(Unreachable):
        await anext(watch)

    assert (await anext(head.watch(after_version=NO_VERSION))).version == 10


async def test_a_coordinator_that_only_starts_again_ends_no_watch(head, run):
    watch = head.watch(after_version=NO_VERSION)
    assert (await anext(watch)).version == 12
    run.restart(12)
    for _ in range(10):
        await asyncio.sleep(0)
    run.restart(13)

    assert (await anext(watch)).version == 13


async def test_a_head_from_before_an_outage_is_told_to_no_new_sampler(head, run):
    assert (await anext(head.watch(after_version=NO_VERSION))).version == 12
    run.is_away = True
    run.restart(14)
    watch = head.watch(after_version=NO_VERSION)
    first = asyncio.ensure_future(anext(watch))
    for _ in range(10):
        await asyncio.sleep(0)

    # This sampler has seen version 14 at the coordinator: at version 12 it would end, as at a run that went back.
    assert not first.done()
    run.is_away = False
    assert (await first).version == 14


async def test_a_coordinator_that_comes_back_with_the_same_head_is_heard(head, run):
    await anext(head.watch(after_version=NO_VERSION))
    run.is_away = True
    run.restart(12)
    first = asyncio.ensure_future(anext(head.watch(after_version=NO_VERSION)))
    for _ in range(10):
        await asyncio.sleep(0)
    run.is_away = False

    assert (await first).version == 12


@pytest.mark.parametrize(("restored_to", "is_asked"), [(12, True), (13, True), (None, False)])
async def test_manifests_are_asked_for_again_after_an_outage(run, tmp_path, restored_to, is_asked):
    cache = CacheDirectory(tmp_path, max_bytes=1000)
    weights = CachedWeights(api=run, cache=cache, clock=Quick())
    watching = asyncio.ensure_future(weights.head.run())
    assert (await anext(weights.head.watch(after_version=NO_VERSION))).version == 12
    before = await weights.get_signed_manifest(version=9)
    assert await weights.get_signed_manifest(version=9) == before

    if restored_to is not None:
        # Restored to 9, and trained on past the head that the relay knows, or to it.
        run.restart(restored_to)
        for _ in range(10):
            await asyncio.sleep(0)

    assert (await weights.get_signed_manifest(version=9) != before) == is_asked
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    await weights.close()
    cache.close()
