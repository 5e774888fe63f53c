"""Virtual time: it jumps, work is inline and charged, and a run that can never go on is an error."""

import asyncio
import time

import pytest

from heterorl_research.lab.virtual_loop import EPOCH, Deadlock, VirtualClock, run_virtually


def test_a_day_passes_at_once_and_in_order():
    heard = []

    async def body(loop):
        clock = VirtualClock(loop)

        async def say(after, name):
            await clock.sleep(after)
            heard.append((name, clock.monotonic()))

        await asyncio.gather(say(86400.0, "day"), say(60.0, "minute"), say(3600.0, "hour"))
        return clock.wall()

    started = time.monotonic()
    assert run_virtually(body) == pytest.approx(EPOCH + 86400.0)
    assert heard == [("minute", 60.0), ("hour", 3600.0), ("day", 86400.0)]
    assert time.monotonic() - started < 60.0


def test_thread_work_runs_inline_and_answers_after_what_it_charges():
    async def body(loop):
        def work(seconds):
            loop.charge(seconds)
            return loop.now

        slow = asyncio.create_task(asyncio.to_thread(work, 5.0))
        fast = asyncio.create_task(asyncio.to_thread(work, 1.0))
        begun = [await fast, loop.now]
        begun += [await slow, loop.now]
        return begun

    # Both begin at 0 and take their own time.
    assert run_virtually(body) == [0.0, 1.0, 0.0, 5.0]


def test_thread_work_that_raises_raises_where_it_is_awaited():
    async def body(loop):
        def work():
            loop.charge(2.0)
            raise ValueError("no")

        with pytest.raises(ValueError, match="no"):
            await asyncio.to_thread(work)
        return loop.now

    assert run_virtually(body) == 2.0


def test_a_cancelled_waiter_does_not_disturb_the_answer():
    async def body(loop):
        task = asyncio.create_task(asyncio.to_thread(loop.charge, 3.0))
        await asyncio.sleep(1.0)
        task.cancel()
        await asyncio.sleep(5.0)
        return loop.now

    assert run_virtually(body) == 6.0


def test_a_run_in_which_everybody_waits_is_an_error():
    async def body(loop):
        await loop.create_future()

    with pytest.raises(Deadlock, match="every task waits"):
        run_virtually(body)


def test_time_limits_count_virtual_seconds():
    async def body(loop):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(30.0):
                await asyncio.sleep(31.0)
        return loop.now

    assert run_virtually(body) == 30.0
