"""Payloads at addresses that a coordinator gives for a while, in a store of objects: which a node asks, reads, puts.

Guarantees: an address is asked only where this node allows its scheme, without redirects. It is never written down, as
whoever has it can read or write. A read brings the bytes of its range and nothing more, and others compare them with
the payload's name. A put brings all bytes of a piece or nothing; of its answer only the head is read, and the
coordinator compares what was put with its name.

An address that does not serve is forgotten, and that of the next plan is asked. A store that is slower than a dead line
is taken to be, or that kept its reader waiting until the reader gave up, is not asked for ten minutes. A payload that
arrived with another digest is distrusted: no address of it is asked any more. A piece that failed is asked for again, a
few times, where the store took another one before.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from http.cookiejar import DefaultCookiePolicy
from typing import TYPE_CHECKING, Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import Field

from heterorl.common.errors import Unreachable
from heterorl.common.process.clock import Clock, SystemClock
from heterorl.common.types.common import Digest
from heterorl.common.types.policy import PayloadRef, PutPlace

if TYPE_CHECKING:
    import httpx2


Allowed = Literal["https", "any", "none"]
"""Addresses that a node asks: of TLS on other machines, all, also of http, or none."""
Host = Annotated[str, Field(pattern=r"^(\*\.)?[A-Za-z0-9:._-]{1,253}$")]
"""A host that addresses may name, or with `*.` before it all below it."""
MAX_URL_CHARACTERS = 8192
CONNECT_S, SILENCE_S = 10.0, 30.0


def _is_own(host: str) -> bool:
    """Whether a host is this machine, or a service that a cloud offers on the link of each machine."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
    address = getattr(address, "ipv4_mapped", None) or address
    return address.is_loopback or address.is_link_local or address.is_unspecified or address.is_multicast


async def _refuse_own(event: str, info: Mapping[str, Any]) -> None:
    """Close a connection whose other end is this machine or its link, before a byte is sent.

    Raises:
        Unreachable: it was closed: the name that the coordinator gave resolves to such an address.
    """
    if event != "connection.connect_tcp.complete":
        return
    stream = info["return_value"]
    place = stream.get_extra_info("server_addr")
    if not place or _is_own(str(place[0]).partition("%")[0]):
        await stream.aclose()
        raise Unreachable(
            "the store of the payloads has a name that resolves to this machine or its link",
            action="name its host in payload_hosts if that is right",
        )


async def _guard(request: httpx2.Request) -> None:
    request.extensions["trace"] = _refuse_own


class UrlClient:
    """What a node may ask, and by which connections. Belongs to the event loop.

    Args:
        allowed: schemes of the addresses.
        hosts: hosts that addresses may name; none: any but this machine and its link.
    """

    def __init__(self, allowed: Allowed, hosts: Sequence[str] = ()) -> None:
        self._schemes = {"https": ("https",), "any": ("https", "http"), "none": ()}[allowed]
        self._hosts = tuple(host.lower() for host in hosts)
        self._takes_own = allowed == "any" or bool(hosts)
        self._client: httpx2.AsyncClient | None = None

    @property
    def is_any_allowed(self) -> bool:
        """Whether there are addresses that this node asks."""
        return bool(self._schemes)

    def allows(self, url: str) -> bool:
        """Whether this node asks an address."""
        if not url or len(url) > MAX_URL_CHARACTERS or not url.isascii() or not url.isprintable():
            return False
        try:
            parts = urlsplit(url)
            if parts.scheme not in self._schemes or not parts.hostname:
                return False
            return self._is_named(parts.hostname) and (self._takes_own or not _is_own(parts.hostname))
        except ValueError:
            return False

    def _is_named(self, host: str) -> bool:
        host = host.rstrip(".")
        named = (host.endswith(each[1:]) if each.startswith("*.") else host == each for each in self._hosts)
        return not self._hosts or any(named)

    def client(self) -> httpx2.AsyncClient:
        """The client, which follows no redirect and writes no address into a log.

        Raises:
            Unreachable: its package is not installed.
        """
        try:
            import httpx2
        except ImportError:
            raise Unreachable("httpx2 is not installed") from None
        if self._client is None:
            # At INFO they write down each address.
            for name in ("httpx2", "httpcore2"):
                logging.getLogger(name).setLevel(logging.WARNING)
            timeout = httpx2.Timeout(SILENCE_S, connect=CONNECT_S)
            # An address is the coordinator's choice: a proxy of this machine takes it where its host is named.
            self._client = httpx2.AsyncClient(
                timeout=timeout,
                follow_redirects=False,
                trust_env=bool(self._hosts),
                event_hooks={} if self._takes_own else {"request": [_guard]},
            )
            # What a store sets it would be told again, with whatever payload.
            self._client.cookies.jar.set_policy(DefaultCookiePolicy(allowed_domains=()))
        return self._client

    async def close(self) -> None:
        """Close the connections."""
        if self._client is not None:
            await self._client.aclose()


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


class PresignedReads:
    """The addresses that a node knows. Belongs to the event loop."""

    def __init__(self, connections: UrlClient, clock: Clock | None = None) -> None:
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


ANSWER_S = 120.0
"""A store answers when it has all bytes in several places."""
PUT_PAUSE_S = 300.0
"""After a failure: a store that cannot be reached from here costs CONNECT_S each time."""
TRIES = 4
"""Of one piece, where another one got through."""
AGAIN_S = 0.5
"""Before the second try of a piece, and twice as long before each further one."""


class _OddFrames(Unreachable):
    """The frames are to blame, and no store."""


class PresignedWrites:
    """Puts payloads, and leaves the store alone for a while after one that failed. Belongs to the event loop."""

    def __init__(self, connections: UrlClient, clock: Clock | None = None) -> None:
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

        `ask` says which piece is missing and where it is to be put; `frames` gives a range of the payload.

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
                self._not_before = self._clock.monotonic() + PUT_PAUSE_S
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
