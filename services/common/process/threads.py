"""Threads, processes and tasks: shielded waits, ordered results, causes of failures."""

import asyncio
import contextvars
import functools
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, BinaryIO, ParamSpec, TypeVar

ArgumentsT = ParamSpec("ArgumentsT")
ResultT = TypeVar("ResultT")


async def in_thread(
    function: Callable[ArgumentsT, ResultT], *args: ArgumentsT.args, **kwargs: ArgumentsT.kwargs
) -> ResultT:
    """Run a function in a thread; a cancelled caller awaits its end.

    A thread cannot be stopped. If the caller left it running, its successor would touch the same weights meanwhile.
    """
    return await _to_its_end(asyncio.ensure_future(asyncio.to_thread(functools.partial(function, *args, **kwargs))))


async def in_thread_of(
    executor: ThreadPoolExecutor,
    function: Callable[ArgumentsT, ResultT],
    *args: ArgumentsT.args,
    **kwargs: ArgumentsT.kwargs,
) -> ResultT:
    """`in_thread` with its own pool, for work that may hang."""
    call = functools.partial(contextvars.copy_context().run, functools.partial(function, *args, **kwargs))
    return await _to_its_end(asyncio.get_running_loop().run_in_executor(executor, call))


async def _to_its_end(work: asyncio.Future[ResultT]) -> ResultT:
    await settle(work)
    return work.result()


async def opened_in_thread(open_: Callable[[], BinaryIO]) -> BinaryIO:
    """The file that a thread opens; a cancelled caller's is closed."""
    opening = asyncio.ensure_future(asyncio.to_thread(open_))
    try:
        await settle(opening)
    except asyncio.CancelledError:
        if not opening.cancelled() and opening.exception() is None:
            opening.result().close()
        raise
    return opening.result()


async def settle(*tasks: asyncio.Future[Any]) -> None:
    """Wait for tasks to end, also under cancellation, which then goes on.

    For short work that must not be left running, such as a thread that writes to a file.
    """
    cancelled: asyncio.CancelledError | None = None
    while waiting := [task for task in tasks if not task.done()]:
        try:
            await asyncio.wait(waiting)
        except asyncio.CancelledError as error:
            cancelled = error
    for task in tasks:
        if not task.cancelled():
            task.exception()
    if cancelled is not None:
        raise cancelled


def leaves_of(error: BaseException) -> list[BaseException]:
    """The single failures of a group, nested groups included."""
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in leaves_of(inner)]
    return [error]


def most_serious(group: BaseExceptionGroup[BaseException], *, mildest: type[BaseException]) -> BaseException:
    """The first failure that is not `mildest`; else the first one."""
    leaves = leaves_of(group)
    return next((error for error in leaves if not isinstance(error, mildest)), leaves[0])


def cause_of(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first failure of a group, which ended the other tasks."""
    return leaves_of(group)[0]


ItemT = TypeVar("ItemT")


def num_threads(threads: int) -> int:
    """Number of threads of a setting; 0 is one for each core."""
    if threads:
        return threads
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def in_order(work: Callable[[ItemT], ResultT], items: Iterable[ItemT], *, threads: int) -> Iterator[ResultT]:
    """Results of `work` in order, from `threads` threads; 1: the caller's.

    numpy, zstandard and blake3 release the GIL, so threads share the cores. Memory holds `threads` items and one
    result. The caller's thread reads `items`, at most threads + 1 ahead. The first error in the order of the items is
    raised, after running items have ended.
    """
    if threads == 1:
        yield from map(work, items)
        return
    with ThreadPoolExecutor(max_workers=threads, thread_name_prefix="weights") as executor:
        waiting: deque[Future[ResultT]] = deque()
        try:
            for item in items:
                waiting.append(executor.submit(work, item))
                if len(waiting) > threads:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


def own_command(module: str, *arguments: str) -> list[str]:
    """Command line of our module, independent of working directory and PYTHONPATH."""
    return [sys.executable, "-P", "-m", module, *arguments]


def how_it_ended(code: int) -> str:
    """How a process ended; a negative code is a signal's number."""
    if code >= 0:
        return f"ended with code {code}"
    known = {entry.value for entry in signal.Signals}
    return f"was ended by {signal.Signals(-code).name if -code in known else f'signal {-code}'}"
