"""Work that has a limit by the given clock, and a bell that wakes in turn."""

import asyncio

import pytest

from heterorl.common.process.clock import SlowBell, ends_within
from tests.support.clock import ManualClock


async def test_work_ends_in_time_or_is_cancelled_and_its_error_is_raised():
    clock, cancelled = ManualClock(), asyncio.Event()

    async def hang():
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    async def fail():
        raise ValueError("of the work")

    assert await ends_within(asyncio.sleep(0), clock=clock, seconds=3.0)
    with pytest.raises(ValueError, match="of the work"):
        await ends_within(fail(), clock=clock, seconds=3.0)
    hanging = asyncio.create_task(ends_within(hang(), clock=clock, seconds=3.0))
    await asyncio.sleep(0.01)
    assert not hanging.done()
    clock.advance(3.0)
    assert not await hanging
    assert cancelled.is_set()


async def wait_at(bell, woken, number):
    with bell.ticket() as ticket:
        await ticket
        woken.append(number)


async def settled():
    for _ in range(5):
        await asyncio.sleep(0)


async def test_those_who_wait_wake_in_their_order_and_who_left_takes_no_turn():
    clock, woken = ManualClock(), []
    bell = SlowBell(clock, at_once=2, pause_s=1.0)
    waiting = [asyncio.create_task(wait_at(bell, woken, number)) for number in range(7)]
    await settled()
    for number in (0, 3):
        waiting[number].cancel()
    await settled()

    bell.ring()
    await settled()
    assert woken == [1, 2]
    late = asyncio.create_task(wait_at(bell, woken, 7))
    for expected in ([1, 2, 4, 5], [1, 2, 4, 5, 6], [1, 2, 4, 5, 6]):
        clock.advance(1.0)
        await settled()
        assert woken == expected

    bell.ring()
    await late
    assert bell.num_rings == 2


async def test_a_ring_at_once_wakes_all():
    woken = []
    bell = SlowBell(ManualClock(), at_once=2)
    waiting = [asyncio.create_task(wait_at(bell, woken, number)) for number in range(9)]
    await settled()
    bell.ring()
    await settled()
    assert len(woken) == 2

    bell.ring_at_once()

    await asyncio.gather(*waiting)
    assert sorted(woken) == list(range(9))
