"""Putting a payload straight into a store of objects, at addresses that the coordinator gives for a while.

Guarantees: an address is asked only where this node allows its scheme, without redirects, and is never written down;
one request brings all bytes of a piece or nothing; of its answer nothing is read but the head. A piece that failed is
asked for again, a few times, where the store took another one before. What was put is nothing yet: the coordinator
compares it with its name.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable

from heterorl.common.direct.connections import CONNECT_S, SILENCE_S, Connections
from heterorl.common.errors import Unreachable
from heterorl.common.process.clock import Clock, SystemClock
from heterorl.common.types.policy import PutPlace

ANSWER_S = 120.0
"""A store answers when it has all bytes in several places."""
PAUSE_S = 300.0
"""After a failure: a store that cannot be reached from here costs CONNECT_S each time."""
TRIES = 4
"""Of one piece, where another one got through."""
AGAIN_S = 0.5
"""Before the second try of a piece, and twice as long before each further one."""


class _OddFrames(Unreachable):
    """The frames are to blame, and no store."""


class DirectWrites:
    """Puts payloads, and leaves the store alone for a while after one that failed. Belongs to the event loop."""

    def __init__(self, connections: Connections, clock: Clock | None = None) -> None:
        self._connections = connections
        self._clock = clock or SystemClock()
        self._not_before = 0.0

    @property
    def is_worth_asking(self) -> bool:
        """Whether an address would be used now."""
        return self._connections.is_any_allowed and self._clock.monotonic() >= self._not_before

    async def put_all(
        self,
        ask: Callable[[], Awaitable[PutPlace]],
        frames: Callable[[int, int], AsyncGenerator[bytes, None]],
        *,
        num_bytes: int,
    ) -> bool:
        """Put the pieces of a payload until none is missing; False where there is no place that this node asks.

        Args:
            ask: says which piece is missing, and where it is to be put.
            frames: frames of a range of the payload.
            num_bytes: size of the payload.

        Raises:
            Unreachable: the store does not answer, or refuses, or has not what it took.
        """
        first, at, num_failures = -1, -1, 0
        failure: Unreachable | None = None
        while True:
            place = await ask()
            if place.offset == num_bytes:
                return True
            is_asked = self._connections.allows(place.url)
            if failure is None and not is_asked:
                return False
            num_failures = num_failures + 1 if place.offset <= at else 0
            first, at = place.offset if failure is None else first, max(at, place.offset)
            if failure is not None and (not is_asked or num_failures == TRIES or (num_failures and at == first)):
                self._not_before = self._clock.monotonic() + PAUSE_S
                raise failure
            if not 0 < place.num_bytes <= num_bytes - place.offset:
                raise Unreachable(f"{place.num_bytes} bytes from {place.offset} on are no piece of the payload")
            if num_failures:
                await self._clock.sleep(AGAIN_S * 2 ** (num_failures - 1))
            failure = Unreachable("the store of the payloads has not what it took")
            try:
                async with contextlib.aclosing(frames(place.offset, place.offset + place.num_bytes)) as piece:
                    await self._put(place.url, piece, num_bytes=place.num_bytes)
            except _OddFrames:
                raise
            except Unreachable as error:
                failure = error

    async def _put(self, url: str, frames: AsyncIterator[bytes], *, num_bytes: int) -> None:
        client = self._connections.client()
        import httpx2

        headers = {"Content-Length": str(num_bytes)}
        timeout = httpx2.Timeout(SILENCE_S, connect=CONNECT_S, read=ANSWER_S)
        try:
            content = _exactly(num_bytes, frames)
            async with client.stream("PUT", url, content=content, headers=headers, timeout=timeout) as answer:
                # An answer that has words is left unread and costs the connection: they may have no end.
                if answer.headers.get("Content-Length") == "0":
                    await answer.aread()
        except (httpx2.HTTPError, httpx2.InvalidURL, httpx2.StreamError) as error:
            # Its words may have the address.
            raise Unreachable(f"the store of the payloads does not answer ({type(error).__name__})") from None
        if not answer.is_success:
            raise Unreachable(f"the store of the payloads answers {answer.status_code}")


async def _exactly(num_bytes: int, frames: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    # The client would end in an error of its own protocol, which nobody expects of it.
    left = num_bytes
    async for frame in frames:
        left -= len(frame)
        if left < 0:
            break
        yield frame
    if left:
        raise _OddFrames(f"the payload is not the {num_bytes} bytes that were to be put")
