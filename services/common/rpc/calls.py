"""Calls to a coordinator at an address: repeated, timed, paced; what they mean is `client`'s."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any, Self, TypeVar

import grpc.aio

from heterorl.common.errors import HeterorlError, Unreachable
from heterorl.common.identity.tls import TlsConfig
from heterorl.common.process.clock import Clock, SystemClock
from heterorl.common.process.metrics import BANDWIDTH_CAP, BANDWIDTH_WAIT, RPC_SECONDS
from heterorl.common.rpc import retry
from heterorl.common.rpc.link import Link
from heterorl.common.rpc.options import BandwidthConfig, TokenBucket
from heterorl.common.rpc.retry import Outage, RetryPolicy
from heterorl.common.rpc.status import from_rpc_error, reason_of

CALL_TIMEOUT_S = 20.0
ResultT = TypeVar("ResultT")


class Calls:
    """A link and the ways to call over it."""

    def __init__(
        self,
        address: str,
        *,
        tls: TlsConfig | None = None,
        max_message_bytes: int = 16 << 20,
        policy: RetryPolicy | None = None,
        clock: Clock | None = None,
        rng: random.Random | None = None,
        bandwidth: BandwidthConfig | None = None,
    ) -> None:
        self._link = Link(address, tls=tls or TlsConfig(), max_message_bytes=max_message_bytes)
        self._retry = policy or RetryPolicy()
        self._clock = clock or SystemClock()
        self._rng = rng or random.Random()
        self._outage = Outage(address, clock=self._clock)
        caps = bandwidth or BandwidthConfig()
        self._down = TokenBucket(bytes_per_s=caps.down_bytes_per_s, clock=self._clock)
        self._up = TokenBucket(bytes_per_s=caps.up_bytes_per_s, clock=self._clock)
        for direction, cap in (("down", caps.down_bytes_per_s), ("up", caps.up_bytes_per_s)):
            BANDWIDTH_CAP.labels(direction).set(cap)
            BANDWIDTH_WAIT.labels(direction)

    @property
    def down_bytes_per_s(self) -> float:
        """The cap of what is received; 0 is none. Whoever waits for bytes waits for it too."""
        return self._down.bytes_per_s

    async def close(self) -> None:
        """Close the channel; calls under way are cancelled."""
        await self._link.close()

    async def _pace(self, bucket: TokenBucket, direction: str, num_bytes: int) -> None:
        if waited_s := await bucket.take(num_bytes):
            BANDWIDTH_WAIT.labels(direction).inc(waited_s)

    async def __aenter__(self) -> Self:
        """Use as a context."""
        return self

    async def __aexit__(self, *exception: object) -> None:
        """Close on leaving."""
        await self.close()

    async def _call(self, name: str, request: Any, *, timeout_s: float = CALL_TIMEOUT_S) -> Any:
        async def attempt() -> Any:
            async with self._link.stubs() as stubs:
                with timed(name), self._outage.watching(name):
                    return readable(name, await stubs.method(name)(request, timeout=timeout_s))

        return await self._insist(attempt, name=name)

    async def _once(self, name: str, request: Any, *, timeout_s: float = CALL_TIMEOUT_S) -> Any:
        async def attempt() -> Any:
            async with self._link.stubs() as stubs:
                with timed(name):
                    return readable(name, await stubs.method(name)(request, timeout=timeout_s))

        return await once(name, attempt)

    async def _insist(self, attempt: Callable[[], Awaitable[ResultT]], *, name: str) -> ResultT:
        return await retry.call(
            attempt, name=name, policy=self._retry, clock=self._clock, rng=self._rng, outage=self._outage
        )

    async def _streamed(self, name: str, request: Any) -> AsyncIterator[Any]:
        try:
            async with self._link.stubs() as stubs:
                call = stubs.method(name)(request)
                try:
                    with timed(name):
                        async for message in call:
                            self._outage.answered()
                            yield readable(name, message)
                finally:
                    call.cancel()
        except grpc.aio.AioRpcError as error:
            failure = typed(name, error)
            if isinstance(failure, Unreachable):
                self._outage.failed(failure.args[0])
            raise failure from error


def readable(name: str, message: Any) -> Any:
    """A message of the other end.

    Raises:
        Unreachable: its bytes are no such message.
    """
    if message is None:
        # gRPC's way to say that the bytes are no such message.
        raise Unreachable(f"{name}: the coordinator's answer cannot be read", retry_after_s=1.0)
    return message


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
