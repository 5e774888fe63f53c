"""Putting a payload straight into a store of objects, at an address that the coordinator gives for a while.

Guarantees: an address is asked only where this node allows its scheme, without redirects, and is never written down;
one request brings all bytes or nothing; of its answer nothing is read but the head. What was put is nothing yet: the
coordinator compares it with its name.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

from heterorl.common.direct.connections import CONNECT_S, SILENCE_S, Connections
from heterorl.common.errors import Unreachable
from heterorl.common.process.clock import Clock, SystemClock

ANSWER_S = 120.0
"""A store answers when it has all bytes in several places."""
PAUSE_S = 300.0
"""After a failure: a store that cannot be reached from here costs CONNECT_S each time."""


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

    async def put(self, url: str, frames: AsyncIterator[bytes], *, num_bytes: int) -> bool:
        """Put so many bytes; False where this node does not ask that address.

        Raises:
            Unreachable: the store does not answer, or refuses, or the frames are not so many bytes.
        """
        if not self._connections.allows(url):
            return False
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
            self._not_before = self._clock.monotonic() + PAUSE_S
            # Its words may have the address.
            raise Unreachable(f"the store of the payloads does not answer ({type(error).__name__})") from None
        if not answer.is_success:
            self._not_before = self._clock.monotonic() + PAUSE_S
            raise Unreachable(f"the store of the payloads answers {answer.status_code}")
        return True


async def _exactly(num_bytes: int, frames: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    # The client would end in an error of its own protocol, which nobody expects of it.
    left = num_bytes
    async for frame in frames:
        left -= len(frame)
        if left < 0:
            break
        yield frame
    if left:
        raise Unreachable(f"the payload is not the {num_bytes} bytes that were to be put")
