"""Work that has a limit by the given clock."""

import asyncio

import pytest

from heterorl.common.process.clock import ends_within
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
