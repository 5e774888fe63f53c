"""Work beside each other: threads that are never left running behind their caller, chunks in order, own processes."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import os
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

ArgumentsT = ParamSpec("ArgumentsT")
ResultT = TypeVar("ResultT")


async def in_thread(
    function: Callable[ArgumentsT, ResultT], *args: ArgumentsT.args, **kwargs: ArgumentsT.kwargs
) -> ResultT:
    """Run a function in a thread; a cancelled caller still waits for its end.

    A thread cannot be stopped. Were it left alone, its caller's successor would touch the same weights beside it.
    """
    return await _to_its_end(asyncio.ensure_future(asyncio.to_thread(functools.partial(function, *args, **kwargs))))


async def in_thread_of(
    executor: ThreadPoolExecutor,
    function: Callable[ArgumentsT, ResultT],
    *args: ArgumentsT.args,
    **kwargs: ArgumentsT.kwargs,
) -> ResultT:
    """`in_thread` of a pool of its own, for work that may hang and must not keep others from a thread."""
    call = functools.partial(contextvars.copy_context().run, functools.partial(function, *args, **kwargs))
    return await _to_its_end(asyncio.get_running_loop().run_in_executor(executor, call))


async def _to_its_end(work: asyncio.Future[ResultT]) -> ResultT:
    await settle(work)
    return work.result()


async def settle(*tasks: asyncio.Future[Any]) -> None:
    """Wait for tasks to end, however often the caller is cancelled meanwhile; then the cancellation goes on.

    For what ends by itself soon and must not be left behind: a thread that writes to a file, say.
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
    """The failures themselves, of groups of groups too."""
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in leaves_of(inner)]
    return [error]


def most_serious(group: BaseExceptionGroup[BaseException], *, mildest: type[BaseException]) -> BaseException:
    """The first failure of a group that is not of the mildest kind; one of that kind where nothing else failed."""
    leaves = leaves_of(group)
    return next((error for error in leaves if not isinstance(error, mildest)), leaves[0])


def cause_of(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The one failure that ended the other tasks of a group."""
    first = group.exceptions[0]
    return cause_of(first) if isinstance(first, BaseExceptionGroup) else first


ItemT = TypeVar("ItemT")


def num_threads(threads: int) -> int:
    """What a configured number of threads means: 0 is one for each core that this process may use."""
    if threads:
        return threads
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def in_order(work: Callable[[ItemT], ResultT], items: Iterable[ItemT], *, threads: int) -> Iterator[ResultT]:
    """Results of `work` for each item, in the items' order, from `threads` threads; 1 uses the caller's.

    numpy, zstandard and xxhash let go of the interpreter while they work, so threads share the cores. Memory is that of
    `threads` items in work, and one result that is written. `items` is read by the caller's thread, at most threads + 1
    ahead. The first error in the order of the items is raised; what is under way then ends first.
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
    """The words that run one of our modules as a program, whatever the working directory and PYTHONPATH have."""
    return [sys.executable, "-P", "-m", module, *arguments]
