"""One try of a call: timed by its outcome, and its failure turned into the typed error that it stands for."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVar

import grpc.aio

from heterorl.common.errors import HeterorlError, Unreachable
from heterorl.common.process.metrics import RPC_SECONDS
from heterorl.common.rpc.status import from_rpc_error, reason_of

ResultT = TypeVar("ResultT")


async def once(name: str, attempt: Callable[[], Awaitable[ResultT]]) -> ResultT:
    """Try once.

    Raises:
        HeterorlError: the peer's typed refusal, or Unreachable.
    """
    try:
        return await attempt()
    except grpc.aio.AioRpcError as error:
        raise typed(name, error) from error


def typed(name: str, error: grpc.aio.AioRpcError) -> HeterorlError:
    """The error that the server raised; Unreachable for a failure of the transport."""
    return from_rpc_error(error) or Unreachable(f"{name}: {error.code().name}: {error.details()}", retry_after_s=1.0)


@contextlib.contextmanager
def timed(name: str) -> Iterator[None]:
    """Observe how long the body takes and how it ends."""
    # A counter that appears with its first failure has not increased, for whoever watches rates: an outage of a site
    # that nobody could scrape meanwhile would not be seen after it.
    RPC_SECONDS.labels("client", name, grpc.StatusCode.UNAVAILABLE.name)
    started = time.perf_counter()
    code = "OK"
    try:
        yield
    except grpc.aio.AioRpcError as error:
        refusal = from_rpc_error(error)
        code = reason_of(refusal) if refusal is not None else error.code().name
        raise
    finally:
        RPC_SECONDS.labels("client", name, code).observe(time.perf_counter() - started)
