"""The learner's streams of groups: the newest one leases, and what reaches nobody goes back."""

import asyncio
import contextlib

import pytest

from heterorl.coordinator.coordinator_config import CoordinatorConfig
from heterorl.coordinator.groups import ledger, queue
from heterorl.coordinator.rollout_column import LEASE_BATCH


@pytest.fixture
def config(tmp_path):
    return CoordinatorConfig(
        data_dir=tmp_path / "data", groups_per_version=2 * LEASE_BATCH, max_outstanding_groups=4 * LEASE_BATCH
    )


class Learner:
    """One stream and what came of it."""

    def __init__(self, core, run, *, credits, held=()):
        self.got = []
        self._core, self._run, self._credits, self._held = core, run, credits, held
        self.task = asyncio.create_task(self._read())

    async def _ask(self):
        yield self._credits
        await asyncio.Event().wait()

    async def _read(self):
        stream = self._core.stream_groups(epoch=self._run.epoch, held=self._held, credits=self._ask())
        async with contextlib.aclosing(stream):
            async for queued in stream:
                self.got.append(queued.group.id.sequence)

    async def end(self):
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


async def settle(core):
    """Let everybody run until all wait."""
    for _ in range(10):
        await core.get_status()


async def counts(core):
    found = await core.database.run(ledger.counts)
    return found.pending, found.leased


async def test_stream_of_a_learner_that_dialled_again_leases_nothing_more(core, run):
    old = Learner(core, run, credits=8)
    await settle(core)
    new = Learner(core, run, credits=8)
    await settle(core)

    # The old one ends by itself, although nobody told the coordinator that its link is gone.
    await old.task
    await run.push(8)
    await settle(core)
    assert (old.got, new.got) == ([], [1, 2, 3, 4, 5, 6, 7, 8])
    assert await counts(core) == (0, 8)
    await new.end()


async def test_groups_of_the_dead_link_go_to_the_stream_that_follows(core, run):
    old = Learner(core, run, credits=8)
    await settle(core)
    await run.push(3)
    await settle(core)
    assert old.got == [1, 2, 3]
    # The learner got the first of them only; the rest was on its way when the link died.
    new = Learner(core, run, credits=8, held=[(await _ids(core))[0]])
    await settle(core)
    assert new.got == [2, 3]
    assert await counts(core) == (0, 3)
    await old.end()
    await new.end()
    assert await counts(core) == (0, 3)


async def _ids(core):
    from heterorl.common.types.rollout import GroupId

    rows = await core.database.run(
        lambda c: c.execute("SELECT site, incarnation, sequence FROM groups ORDER BY arrival").fetchall()
    )
    return [GroupId(site=a, incarnation=b, sequence=c) for a, b, c in rows]


async def test_what_a_stream_leased_and_did_not_hand_on_goes_back_at_its_end(core, run):
    await run.push(LEASE_BATCH + 4)

    async def credits():
        yield 2 * LEASE_BATCH
        await asyncio.Event().wait()

    stream = core.stream_groups(epoch=run.epoch, held=(), credits=credits())
    first = await anext(stream)
    assert await counts(core) == (4, LEASE_BATCH)
    await stream.aclose()

    # The first was handed on: whether it arrived is for the learner to say when it comes back.
    assert await counts(core) == (LEASE_BATCH + 3, 1)
    again = Learner(core, run, credits=2 * LEASE_BATCH, held=[first.group.id])
    await settle(core)
    assert again.got == list(range(2, LEASE_BATCH + 5))
    await again.end()


async def test_ended_stream_takes_nothing_from_the_one_that_follows(core, run):
    await run.push(LEASE_BATCH)

    async def credits():
        yield 2 * LEASE_BATCH
        await asyncio.Event().wait()

    old = core.stream_groups(epoch=run.epoch, held=(), credits=credits())
    await anext(old)
    new = Learner(core, run, credits=2 * LEASE_BATCH)
    await settle(core)
    assert len(new.got) == LEASE_BATCH
    await old.aclose()
    await settle(core)

    # Those are the new stream's by now, and come once.
    assert len(new.got) == LEASE_BATCH
    assert await counts(core) == (0, LEASE_BATCH)
    await new.end()


async def test_stream_cut_while_the_store_leases_leaves_nothing_with_nobody(core, run):
    stream = Learner(core, run, credits=4)
    await settle(core)
    await run.push(4)
    # Cancelled at every point between the push and the end of the lease.
    await asyncio.sleep(0)
    await stream.end()
    await settle(core)
    pending, leased = await counts(core)
    assert leased == len(stream.got)
    assert pending == 4 - leased


@pytest.mark.parametrize("lease_bytes", [queue.LEASE_BYTES, 1], ids=["small", "large"])
async def test_what_waits_is_leased_by_few_operations_and_by_small_ones_where_groups_are_large(
    core, run, monkeypatch, lease_bytes
):
    monkeypatch.setattr(queue, "LEASE_BYTES", lease_bytes)
    await run.push(LEASE_BATCH)
    sizes = []
    lease = queue.Queue.lease

    def counting(self, connection, **options):
        leased = lease(self, connection, **options)
        sizes.append(len(leased))
        return leased

    monkeypatch.setattr(queue.Queue, "lease", counting)

    learner = Learner(core, run, credits=LEASE_BATCH)
    while len(learner.got) < LEASE_BATCH:
        await core.get_status()

    # Each operation waits behind the calls of all sites: by 16 groups each, 1,000 sites let a learner starve.
    assert max(sizes) == sizes[0] == (LEASE_BATCH if lease_bytes > 1 else queue.LEASE_STEP)
    await learner.end()
