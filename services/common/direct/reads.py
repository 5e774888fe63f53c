"""Reading payloads straight from a store of objects, by addresses that plans give for a while.

Guarantees: an address brings the bytes of a range and nothing more, others compare them with their name; it is asked
only where this node allows its scheme, without redirects; it is never written down, as whoever has it can read. An
address that does not serve is forgotten, and that of the next plan is asked. A store that is slower than a dead line
is taken to be, or that kept its reader waiting until that one gave up, is not asked for ten minutes. A payload that
arrived with another digest is distrusted: no address of it is asked any more.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass, field

from heterorl.common.direct.connections import Connections
from heterorl.common.errors import Unreachable
from heterorl.common.process.clock import Clock, SystemClock
from heterorl.common.types.common import Digest
from heterorl.common.types.policy import PayloadRef

MAX_KNOWN = 4096
FRAME_BYTES = 1 << 16
"""Small, so that what came of a slow line is handed on."""
BRISK_BYTES, BRISK_S = 1 << 20, 50.0
"""A store brings so much in so many seconds of waiting for it: before those who wait for a relay give up."""
PAUSE_S = 600.0
"""After a store was slow."""
_PARTIAL = 206


class Slow(Unreachable):
    """A store brings too little to wait for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where a payload of so many bytes may be read; shown without its url, which is a credential."""

    url: str = field(repr=False)
    num_bytes: int


_NEW = Address(url="", num_bytes=0)


class DirectReads:
    """The addresses that a node knows. Belongs to the event loop."""

    def __init__(self, connections: Connections, clock: Clock | None = None) -> None:
        self._connections = connections
        self._clock = clock or SystemClock()
        self._not_before = 0.0
        # Those of the last plans; None where an address had other bytes than the payload's name says.
        self._known: OrderedDict[Digest, Address | None] = OrderedDict()

    def note(self, payloads: Sequence[PayloadRef], urls: Sequence[str]) -> None:
        """Learn the addresses of a plan; those that this node does not ask are left out."""
        for payload, url in zip(payloads, urls, strict=False):
            if self._connections.allows(url) and self._known.get(payload.digest, _NEW) is not None:
                self._known[payload.digest] = Address(url=url, num_bytes=payload.num_bytes)
                self._known.move_to_end(payload.digest)
        while len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)

    def find(self, digest: Digest) -> Address | None:
        """The address to read a payload from; None where there is none, or none is to be asked now."""
        return self._known.get(digest) if self._clock.monotonic() >= self._not_before else None

    def forget(self, digest: Digest) -> None:
        """Ask no address of a payload until a plan brings another one."""
        if self._known.get(digest) is not None:
            del self._known[digest]

    def pause(self) -> None:
        """Ask no address of any payload for a while, whatever plans bring."""
        self._not_before = self._clock.monotonic() + PAUSE_S

    def distrust(self, digest: Digest) -> None:
        """Ask no address of a payload any more."""
        self._known[digest] = None

    async def read(self, address: Address, *, offset: int, stop: int) -> AsyncIterator[bytes]:
        """Yield [offset, stop) of what is at an address, in frames of at most 64 KiB.

        Raises:
            Slow: it does not answer in time, or brings too little.
            Unreachable: it cannot be reached, refuses, or answers something else.
        """
        client = self._connections.client()
        import httpx2

        headers = {"Range": f"bytes={offset}-{stop - 1}", "Accept-Encoding": "identity"}
        try:
            async with client.stream("GET", address.url, headers=headers) as answer:
                begins = answer.headers.get("Content-Range", "").startswith(f"bytes {offset}-")
                if answer.status_code != _PARTIAL or not begins:
                    raise Unreachable(f"the store of the payloads answers {answer.status_code}")
                num_left = stop - offset
                async with contextlib.aclosing(_brisk(answer.aiter_raw(FRAME_BYTES))) as frames:
                    async for frame in frames:
                        if len(frame) > num_left:
                            raise Unreachable("the store of the payloads sends more than was asked for")
                        num_left -= len(frame)
                        yield frame
        except (httpx2.HTTPError, httpx2.InvalidURL, httpx2.StreamError) as error:
            # Its words may have the address.
            kind = Slow if isinstance(error, httpx2.TimeoutException) else Unreachable
            raise kind(f"the store of the payloads does not answer ({type(error).__name__})") from None
        if num_left:
            raise Unreachable("the answer of the store of the payloads ended early")


async def _brisk(frames: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    """Yield frames while they come quickly enough; the time that the reader takes does not count."""
    loop = asyncio.get_running_loop()
    left_bytes, left_s = BRISK_BYTES, BRISK_S
    while True:
        asked_at = loop.time()
        try:
            async with asyncio.timeout(left_s):
                frame = await anext(frames, b"")
        except TimeoutError:
            message = f"the store of the payloads brings less than {BRISK_BYTES} bytes in {BRISK_S:g} s"
            raise Slow(message) from None
        if not frame:
            return
        left_bytes -= len(frame)
        left_s -= loop.time() - asked_at
        if left_bytes <= 0:
            left_bytes, left_s = BRISK_BYTES, BRISK_S
        yield frame
