"""A node's metrics on their way to the coordinator.

    push      waits for its interval; unblocked by time

A push that fails is forgotten: the next one has newer numbers.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

from prometheus_client import CollectorRegistry

from heterorl.common.errors import HeterorlError, RemoteError
from heterorl.common.federation.series import series_of
from heterorl.common.process.clock import Clock
from heterorl.common.types.common import Series

_LOG = logging.getLogger(__name__)
UNWANTED_S = 300.0
"""Between two attempts at a coordinator that keeps no metrics of this node."""


Push = Callable[[Sequence[Series]], Awaitable[bool]]
"""Sends numbers once; tells whether the coordinator keeps them."""


@contextlib.asynccontextmanager
async def pushing(push: Push, *, registry: CollectorRegistry, interval_s: float, clock: Clock) -> AsyncIterator[None]:
    """Push a registry's numbers beside the body; see `push_metrics`."""
    task = asyncio.create_task(push_metrics(push, registry=registry, interval_s=interval_s, clock=clock))
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def push_metrics(
    push: Push,
    *,
    registry: CollectorRegistry,
    interval_s: float,
    clock: Clock,
) -> None:
    """Send a registry's numbers for ever; returns at once where the interval is 0.

    Args:
        push: see `Push`.
        registry: of this process.
        interval_s: seconds between two pushes.
        clock: the source of time.
    """
    wanted = True
    while interval_s:
        try:
            kept = await push(series_of(registry))
            problem = "" if kept else "it keeps those of so many other nodes"
        except HeterorlError as error:
            # What a coordinator of an earlier release or one that was told otherwise says, it says again.
            kept, problem = isinstance(error, RemoteError) and error.is_transient, str(error)
            _LOG.debug("metrics were not pushed: %s", error)
        if wanted and not kept:
            _LOG.warning("the coordinator does not take this node's metrics: %s", problem)
        wanted = kept
        await clock.sleep(interval_s if kept else UNWANTED_S)
