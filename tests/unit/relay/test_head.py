"""The head that a relay passes on: a run that went back ends the watches, so that their callers look again."""

import asyncio

import pytest

from heterorl.common.errors import Unreachable
from heterorl.common.process.clock import SystemClock
from heterorl.common.types.policy import NO_VERSION, HeadUpdate
from heterorl.relay.cached_weights import Head


class Run:
    """A coordinator's head; a restart ends its watches."""

    def __init__(self, version):
        self.version = version
        self.restarted = asyncio.Event()
        self.is_away = False

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
    made = Head(api=run, clock=Quick(), on_change=lambda went_back: None)
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
