"""A coordinator's ring is followed: all of it, in order of use, through faults, and what is new."""

import asyncio
import contextlib
import dataclasses

import pytest

from heterorl.common.errors import UnknownSample, Unreachable
from heterorl.common.types.sample import SampleList
from heterorl.view.live_source import LiveSamples
from heterorl.view.sample_index import SampleIndex
from heterorl.view.sample_query import Query
from tests.support.limits import WAIT_S
from tests.support.samples import make_sample

COUNT = 450


class FakeCoordinator:
    """Keeps samples by id; `is_gone` breaks every call."""

    def __init__(self):
        self.samples = {}
        self.is_gone = False
        self.limit_bytes = 1 << 20
        self.num_reads = 0

    async def list_samples(self, *, wanted, page):
        self._check()
        ids = sorted(n for n in self.samples if n > page.after and (not page.before or n < page.before))
        ids = ids if page.is_oldest_first else ids[::-1]
        chosen = ids[: page.limit]
        following = None
        if len(ids) > len(chosen):
            place = {"after": chosen[-1]} if page.is_oldest_first else {"before": chosen[-1]}
            following = dataclasses.replace(page, **place)
        lines = tuple(self.samples[n].summary for n in chosen)
        return SampleList(
            samples=lines, next_page=following, num_kept=len(self.samples), kept_bytes=0, limit_bytes=self.limit_bytes
        )

    async def get_sample(self, *, sample_id):
        self._check()
        self.num_reads += 1
        if sample_id not in self.samples:
            raise UnknownSample(f"{sample_id} is not kept")
        return self.samples[sample_id]

    def _check(self):
        if self.is_gone:
            raise Unreachable("gone")


class Turns:
    """A clock whose sleeps end when the test says so."""

    def __init__(self):
        self.slept, self.go = asyncio.Event(), asyncio.Event()

    async def sleep(self, seconds):
        self.slept.set()
        await self.go.wait()
        self.go.clear()


class World:
    def __init__(self, directory):
        self.coordinator, self.index, self.turns = (
            FakeCoordinator(),
            SampleIndex(directory, limit_bytes=1 << 30),
            Turns(),
        )

        @contextlib.asynccontextmanager
        async def connect():
            yield self.coordinator

        self.source = LiveSamples("coord:1", self.index, connect, self.turns)

    async def __aenter__(self):
        self.task = asyncio.create_task(self.source._follow())
        return self

    async def turn(self):
        """Until the source sleeps."""
        await self.turns.slept.wait()
        self.turns.slept.clear()

    async def next_turn(self):
        self.turns.go.set()
        await self.turn()

    async def __aexit__(self, *exception):
        self.task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self.task
        self.index.close()


@pytest.fixture
async def world(tmp_path):
    made = World(tmp_path)
    made.coordinator.samples = {n: make_sample(n, rollouts=1, steps=1) for n in range(1, COUNT + 1)}
    async with made:
        yield made


async def test_all_is_read_and_then_what_is_new(world):
    await world.turn()

    held = world.index.held()
    assert (held.num_samples, held.num_read) == (COUNT, COUNT)
    assert world.source.progress.is_done
    assert world.source.progress.total == COUNT
    assert world.coordinator.num_reads == COUNT
    world.coordinator.samples[COUNT + 5] = make_sample(COUNT + 5)
    await world.next_turn()
    assert world.index.find(Query(), limit=1).summaries[0].id == COUNT + 5
    assert world.coordinator.num_reads == COUNT + 1


async def test_a_coordinator_that_is_gone_is_said_and_asked_again(world):
    await world.turn()
    world.coordinator.is_gone = True
    await world.next_turn()
    assert "gone" in world.source.progress.problem
    assert world.index.held().num_samples == COUNT

    world.coordinator.is_gone = False
    world.coordinator.samples[COUNT + 1] = make_sample(COUNT + 1)
    await world.next_turn()

    assert world.source.progress.problem == ""
    assert world.index.held().num_read == COUNT + 1


async def test_what_the_index_does_not_take_is_said_and_reading_goes_on(world):
    await world.turn()
    world.coordinator.samples[1 << 63] = make_sample(1 << 63)
    await world.next_turn()
    assert "the index on this machine: " in world.source.progress.problem

    del world.coordinator.samples[1 << 63]
    world.coordinator.samples[COUNT + 1] = make_sample(COUNT + 1)
    await world.next_turn()

    assert world.source.progress.problem == ""
    assert world.index.held().num_read == COUNT + 1


async def test_what_was_read_stays_when_the_ring_makes_room(world):
    await world.turn()
    del world.coordinator.samples[3]

    await world.next_turn()

    assert world.index.get(3).prompt == make_sample(3).prompt


async def test_what_is_gone_before_it_was_read_is_forgotten(world):
    listed = dict(world.coordinator.samples)
    world.coordinator.get_sample = lambda **call: _get(world, call["sample_id"])

    async def _get(world, sample_id):
        if sample_id == 7:
            raise UnknownSample("7 is not kept")
        return listed[sample_id]

    await world.turn()

    assert world.index.get(7) is None
    assert world.index.held().num_samples == COUNT - 1


async def test_texts_that_the_learner_sends_later_are_read(world):
    bare = make_sample(COUNT + 1)
    world.coordinator.samples[COUNT + 1] = dataclasses.replace(
        bare,
        summary=dataclasses.replace(bare.summary, has_texts=False),
        prompt="",
        rollouts=tuple(dataclasses.replace(one, completion="") for one in bare.rollouts),
    )
    await world.turn()
    assert world.index.get(COUNT + 1).prompt == ""

    world.coordinator.samples[COUNT + 1] = bare
    await world.next_turn()

    assert world.index.get(COUNT + 1).prompt == bare.prompt


async def test_what_was_read_before_its_texts_came_and_is_gone_since_is_not_asked_for_again(world):
    full = make_sample(COUNT + 1)
    bare = dataclasses.replace(full, summary=dataclasses.replace(full.summary, has_texts=False))
    world.coordinator.samples[COUNT + 1] = bare
    await world.turn()
    world.coordinator.samples[COUNT + 1] = full
    num_reads, ask = world.coordinator.num_reads, world.coordinator.get_sample

    async def gone(*, sample_id):
        # The ring makes room between the list and this call.
        world.coordinator.samples.pop(sample_id, None)
        return await ask(sample_id=sample_id)

    world.coordinator.get_sample = gone
    async with asyncio.timeout(WAIT_S):
        await world.next_turn()

    assert world.coordinator.num_reads == num_reads + 1
    assert world.index.get(COUNT + 1).prompt == full.prompt
    assert world.index.held().num_read == COUNT + 1
    assert world.index.unread(1) == ()


async def test_a_ring_of_no_size_is_said(tmp_path):
    world = World(tmp_path)
    world.coordinator.limit_bytes = 0

    async with world:
        await world.turn()
        said = world.source.progress
        assert "samples_bytes" in said.remark
        assert (said.problem, said.is_done) == ("", True)


async def test_one_sample_is_asked_for_ahead_of_its_turn(world):
    await world.turn()
    world.coordinator.samples[9000] = make_sample(9000)

    found = await asyncio.to_thread(world.source.fetch, 9000)

    assert found.summary.id == 9000
    assert world.index.get(9000).prompt == found.prompt
    assert await asyncio.to_thread(world.source.fetch, 9001) is None
