"""Base of the client: retries, deadlines, pacing, weight reads.

A retry has full jitter, a budget, the server's delay, and always the same key. `client` adds the calls of learners,
samplers and operators.
"""

import asyncio
import contextlib
import logging
import math
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import grpc.aio
from google.protobuf.message_factory import GetMessageClass

from heterorl.common.errors import (
    HeterorlError,
    InvalidRequest,
    MalformedPayload,
    RemoteError,
    Unauthenticated,
    Unreachable,
)
from heterorl.common.identity.tls import TlsConfig
from heterorl.common.process.backoff import Backoff
from heterorl.common.process.clock import Clock, SystemClock
from heterorl.common.process.metrics import BANDWIDTH_WAIT, RPC_SECONDS
from heterorl.common.rpc.channel import RPCS, CoordinatorChannel
from heterorl.common.rpc.error_status import from_rpc_error, reason_of
from heterorl.common.rpc.presigned import Allowed, PresignedReads, Slow, UrlClient
from heterorl.common.rpc.transport_options import BandwidthConfig, TokenBucket
from heterorl.common.types.common import Digest, peer_words
from heterorl.common.types.policy import HeadUpdate, PullPlan, SignedManifest
from heterorl.common.wire.common_messages import new_message, to_value
from heterorl.common.wire.policy_messages import frame_checksum
from heterorl.v1 import policy_pb2

_LOG = logging.getLogger(__name__)
SAY_AFTER_S = 2.0
"""Outages that end sooner are not logged."""
SILENT_S = 4.0
"""A call without an answer for so long counts as failed, unless another one was answered meanwhile."""
FIRST_EVERY_S = 10.0
LAST_EVERY_S = 600.0


class Outage:
    """Logs the peer's silence or refusal, ever more rarely, and its end.

    All calls over the channel report to it.
    """

    def __init__(self, address: str, *, clock: Clock) -> None:
        self._address = address
        self._clock = clock
        self._since: float | None = None
        self._answered_at = clock.monotonic()
        self._say_at = 0.0
        self._every_s = FIRST_EVERY_S
        self._is_said = False

    def failed(self, problem: str) -> None:
        self._note(problem, since=self._clock.monotonic())

    def refused(self, refusal: HeterorlError) -> None:
        """Note a typed refusal, an answer unless it is the certificate's."""
        if isinstance(refusal, Unauthenticated) and refusal.is_transient:
            self._note(str(refusal), since=self._clock.monotonic(), what="has refused this node")
        else:
            self.answered()

    def answered(self) -> None:
        now = self._clock.monotonic()
        if self._is_said and self._since is not None:
            _LOG.info("the coordinator at %s answers again, after %.0f s", self._address, now - self._since)
        self._since, self._is_said, self._every_s = None, False, FIRST_EVERY_S
        self._answered_at = now

    @contextlib.contextmanager
    def watching(self, name: str) -> Iterator[None]:
        timer = asyncio.get_running_loop().call_later(SILENT_S, self._hung, name)
        try:
            yield
        finally:
            timer.cancel()

    def _hung(self, name: str) -> None:
        now = self._clock.monotonic()
        if now - self._answered_at >= SILENT_S:
            self._note(f"{name} has no answer for {SILENT_S:g} s", since=now - SILENT_S)

    def _note(self, problem: str, *, since: float, what: str = "has not answered") -> None:
        now = self._clock.monotonic()
        if self._since is None:
            self._since, self._say_at = since, since + SAY_AFTER_S
        if now < self._say_at:
            return
        _LOG.warning(
            "the coordinator at %s %s for %.0f s, retrying: %s",
            self._address, what, now - self._since, peer_words(problem),
        )  # fmt: skip
        self._is_said = True
        self._say_at = now + self._every_s
        self._every_s = min(LAST_EVERY_S, 2 * self._every_s)


ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """Waits drawn from [0, min(cap_s, base_s * 2^n)] until `budget_s` is spent."""

    base_s: float = 0.1
    cap_s: float = 5.0
    budget_s: float = 30.0


async def call_with_retries(
    attempt: Callable[[], Awaitable[ResultT]],
    *,
    name: str,
    policy: RetryPolicy,
    clock: Clock,
    rng: random.Random,
    outage: Outage | None = None,
) -> ResultT:
    """Run `attempt` until it answers.

    The closure must reuse one idempotency key. Each try is reported to `outage`.

    Raises:
        RemoteError: the peer's typed refusal, at once unless it is an overload that states a delay.
        Unreachable: the transport failed for `budget_s`.
    """
    started = clock.monotonic()
    backoff = Backoff(clock=clock, rng=rng, base_s=policy.base_s, cap_s=policy.cap_s)
    while True:
        try:
            answer = await attempt()
            if outage is not None:
                outage.answered()
            return answer
        except grpc.aio.AioRpcError as error:
            typed = from_rpc_error(error)
            if typed is not None and outage is not None:
                outage.refused(typed)
            if typed is not None and not _is_brief(typed):
                raise typed from error
            problem = f"{error.code().name}: {error.details()}"
            if typed is None and outage is not None:
                outage.failed(f"{name}: {problem}")
        # A failed transport states no delay.
        wait_s = backoff.delay_s() if typed is None else backoff.next_delay(typed)
        if clock.monotonic() - started + wait_s > policy.budget_s:
            raise typed or Unreachable(f"{name}: no answer in {policy.budget_s:g} s, last {problem}", retry_after_s=1.0)
        await clock.sleep(wait_s)


def _is_brief(error: HeterorlError) -> bool:
    """Whether a refusal passes within a call's budget; callers wait out others."""
    return isinstance(error, RemoteError) and error.is_overload and error.is_transient and error.retry_after_s > 0


CALL_TIMEOUT_S = 20.0


class Calls:
    """A channel to a coordinator and the ways to call over it."""

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
        self._channel = CoordinatorChannel(address, tls=tls or TlsConfig(), max_message_bytes=max_message_bytes)
        self._retry = policy or RetryPolicy()
        self._clock = clock or SystemClock()
        self._rng = rng or random.Random()
        self._outage = Outage(address, clock=self._clock)
        caps = bandwidth or BandwidthConfig()
        self._down = TokenBucket(bytes_per_s=caps.down_bytes_per_s, clock=self._clock)
        self._up = TokenBucket(bytes_per_s=caps.up_bytes_per_s, clock=self._clock)
        for direction in ("down", "up"):
            BANDWIDTH_WAIT.labels(direction)

    @property
    def down_bytes_per_s(self) -> float:
        """The cap of received bytes; 0 is none.

        A wait for bytes includes a wait for the cap.
        """
        return self._down.bytes_per_s

    async def close(self) -> None:
        await self._channel.close()

    async def _pace(self, bucket: TokenBucket, direction: str, num_bytes: int) -> None:
        if waited_s := await bucket.take(num_bytes):
            BANDWIDTH_WAIT.labels(direction).inc(waited_s)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def _call(
        self, name: str, message: Any = None, /, *, timeout_s: float = CALL_TIMEOUT_S, **fields: Any
    ) -> Any:
        try:
            request = new_message(GetMessageClass(RPCS[name].input_type), **fields) if message is None else message
        except ValueError as error:
            # A number that its field cannot hold.
            raise InvalidRequest(f"{name}: {error}") from error

        async def attempt() -> Any:
            async with self._channel.held() as lane:
                # A call with a longer limit takes its time while all is well.
                is_brief = timeout_s <= CALL_TIMEOUT_S
                with timed(name), self._outage.watching(name) if is_brief else contextlib.nullcontext():
                    return readable(name, await lane.stubs[name](request, timeout=timeout_s))

        return await self._retried(attempt, name=name)

    async def _once(self, name: str, request: Any, *, timeout_s: float = CALL_TIMEOUT_S) -> Any:
        async def attempt() -> Any:
            async with self._channel.held() as lane:
                with timed(name):
                    return readable(name, await lane.stubs[name](request, timeout=timeout_s))

        return await once(name, attempt)

    async def _retried(self, attempt: Callable[[], Awaitable[ResultT]], *, name: str) -> ResultT:
        return await call_with_retries(
            attempt, name=name, policy=self._retry, clock=self._clock, rng=self._rng, outage=self._outage
        )

    async def _streamed(self, name: str, request: Any) -> AsyncIterator[Any]:
        try:
            async with self._channel.held() as lane:
                call = lane.stubs[name](request)
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
            else:
                self._outage.refused(failure)
            raise failure from error


class WeightCalls(Calls):
    """Asks for versions; reads payloads by presigned URL, else from the peer."""

    def __init__(
        self, address: str, *, payload_urls: Allowed = "https", payload_hosts: Sequence[str] = (), **how: Any
    ) -> None:
        super().__init__(address, **how)
        self._connections = UrlClient(payload_urls, payload_hosts)
        self._direct = PresignedReads(self._connections, self._clock)

    async def close(self) -> None:
        await self._connections.close()
        await super().close()

    async def watch_head(self, *, after_version: int) -> AsyncIterator[HeadUpdate]:
        request = policy_pb2.WatchHeadRequest(after_version=after_version)
        async for message in self._streamed("WatchHead", request):
            age_s = max(0.0, message.age_s) if math.isfinite(message.age_s) else 0.0
            yield HeadUpdate(version=message.version, age_s=age_s)

    async def get_signed_manifest(self, **asked: Any) -> SignedManifest:
        answer = await self._call("GetManifest", **asked)
        return SignedManifest(data=answer.manifest, signature=answer.signature)

    async def list_manifests(self, **asked: Any) -> tuple[bytes, ...]:
        return tuple((await self._call("ListManifests", **asked)).manifests)

    async def plan_pull(self, **asked: Any) -> PullPlan:
        answer = await self._call("PlanPull", **asked)
        try:
            plan = to_value(PullPlan, answer)
        except InvalidRequest as error:
            # The peer's answer breaks the format, not this node's request.
            raise MalformedPayload(f"the coordinator's plan, {error.args[0]}", action="distrust it") from error
        self._direct.note(plan.payloads, answer.urls)
        return plan

    async def read_payload(self, *, digest: Digest, offset: int, stop: int | None = None) -> AsyncIterator[bytes]:
        """Yield frames of a payload until `stop` or its end.

        After Unreachable, continue behind the bytes received.
        """
        address = self._direct.find(digest)
        if address is not None:
            end = address.num_bytes if stop is None else stop
            try:
                async for frame in self._direct.read(address, offset=offset, stop=end):
                    await self._pace(self._down, "down", len(frame))
                    self._note_frame(frame, is_direct=True)
                    offset += len(frame)
                    yield frame
                return
            except Unreachable as error:
                self._direct.forget(digest)
                if isinstance(error, Slow):
                    self._direct.pause()
                _LOG.info("payload %s comes from the coordinator: %s", digest[:12], error.args[0])
        async for frame in self.read_from_peer(digest=digest, offset=offset, stop=stop):
            yield frame

    def gave_up(self, digest: Digest) -> None:
        """Pause presigned URLs, because a reader of this payload gave up."""
        if self._direct.find(digest) is not None:
            _LOG.info("payload %s comes from the coordinator, as its address failed", digest[:12])
            self._direct.pause()

    def distrust_address(self, digest: Digest) -> None:
        """Read a payload from the peer only: its URL brought wrong bytes."""
        self._direct.distrust(digest)

    def _note_frame(self, frame: bytes, *, is_direct: bool) -> None:
        """Called for each frame of a payload, wherever it came from."""

    async def read_from_peer(self, *, digest: Digest, offset: int, stop: int | None = None) -> AsyncIterator[bytes]:
        """Yield a payload's frames from the peer, not from presigned URLs."""
        request = policy_pb2.ReadPayloadRequest(digest=digest, offset=offset, stop=stop)
        async for message in self._streamed("ReadPayload", request):
            # Once: each access of a bytes field copies it.
            frame = message.frame
            if frame_checksum(frame) != message.checksum:
                raise Unreachable(f"a frame of payload {digest[:12]} was damaged on its way", retry_after_s=1.0)
            await self._pace(self._down, "down", len(frame))
            self._note_frame(frame, is_direct=False)
            yield frame


def readable(name: str, message: Any) -> Any:
    """Return a peer's message; raises Unreachable if gRPC could not parse it."""
    if message is None:
        raise Unreachable(f"{name}: the coordinator's answer cannot be read", retry_after_s=1.0)
    return message


async def once(name: str, attempt: Callable[[], Awaitable[ResultT]]) -> ResultT:
    """Try once; raises the peer's typed refusal, or Unreachable."""
    try:
        return await attempt()
    except grpc.aio.AioRpcError as error:
        raise typed(name, error) from error


async def answer_to(stub: Callable[[AsyncIterator[Any]], Awaitable[Any]], requests: AsyncGenerator[Any, None]) -> Any:
    """Send a stream of requests, close it, and return the answer.

    Raises errors of `requests`. gRPC reads a stream in a task of its own: it would read on after a failed call, and
    hide the stream's errors.
    """
    handed: asyncio.Queue[Any] = asyncio.Queue(1)

    async def taken() -> AsyncIterator[Any]:
        while (request := await handed.get()) is not None:
            yield request

    call: Any = stub(taken())

    async def read() -> None:
        try:
            async with contextlib.aclosing(requests):
                async for request in requests:
                    await handed.put(request)
            await handed.put(None)
        except Exception:
            call.cancel()
            raise

    reading = asyncio.create_task(read())
    try:
        return await call
    except asyncio.CancelledError:
        if reading.done() and not reading.cancelled():
            reading.result()
        raise
    finally:
        reading.cancel()
        await asyncio.wait([reading])


def typed(name: str, error: grpc.aio.AioRpcError) -> HeterorlError:
    """The error that the server raised; Unreachable for a transport failure."""
    return from_rpc_error(error) or Unreachable(f"{name}: {error.code().name}: {error.details()}", retry_after_s=1.0)


@contextlib.contextmanager
def timed(name: str) -> Iterator[None]:
    """Observe the duration and outcome of the body."""
    # A counter that first appears with a failure shows no increase: without this line Prometheus would miss the
    # outage of a site that it could not scrape.
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
