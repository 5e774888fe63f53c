"""Work in a thread is waited for; what ended a group of tasks is one failure, however deep it lies."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from heterorl.common.process.threads import cause_of, in_thread, in_thread_of, opened_in_thread
from tests.support.limits import WAIT_S


async def test_cause_is_the_failure_that_ended_the_others():
    async def fail():
        raise ZeroDivisionError("first")

    async def nested():
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(fail())
            tasks.create_task(asyncio.Event().wait())

    async def outer():
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(nested())
            tasks.create_task(asyncio.Event().wait())

    with pytest.raises(BaseExceptionGroup) as raised:
        await outer()

    assert isinstance(cause_of(raised.value), ZeroDivisionError)


@pytest.mark.parametrize("has_pool", [False, True])
async def test_caller_that_is_cancelled_twice_still_waits_for_its_thread(has_pool):
    begun, proceed, ended = threading.Event(), threading.Event(), threading.Event()

    def work():
        begun.set()
        assert proceed.wait(WAIT_S)
        ended.set()

    call = in_thread_of(ThreadPoolExecutor(1), work) if has_pool else in_thread(work)
    task = asyncio.create_task(call)
    assert await asyncio.to_thread(begun.wait, WAIT_S)
    for _ in range(2):
        task.cancel()
        # To the wait inside, and on.
        for _ in range(5):
            await asyncio.sleep(0)
    assert not task.done()
    proceed.set()

    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()


async def test_file_that_a_thread_opens_for_a_caller_that_has_gone_is_closed(tmp_path):
    begun, proceed, opened = threading.Event(), threading.Event(), []

    def open_():
        begun.set()
        proceed.wait(WAIT_S)
        opened.append((tmp_path / "file").open("wb"))
        return opened[0]

    task = asyncio.create_task(opened_in_thread(open_))
    assert await asyncio.to_thread(begun.wait, WAIT_S)
    task.cancel()
    await asyncio.sleep(0)
    proceed.set()

    with pytest.raises(asyncio.CancelledError):
        await task
    assert opened[0].closed
