"""Work beside each other: heavy work in one thread at a time, never left running behind its caller's back; what of
several tasks ended the others."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

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
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        # Of two cancellations in a row the second must not end the wait either.
        while not work.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([work])
        if not work.cancelled():
            work.exception()
        raise


def leaves_of(error: BaseException) -> list[BaseException]:
    """The failures themselves, of groups of groups too."""
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in leaves_of(inner)]
    return [error]


def cause_of(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The one failure that ended the other tasks of a group."""
    first = group.exceptions[0]
    return cause_of(first) if isinstance(first, BaseExceptionGroup) else first
