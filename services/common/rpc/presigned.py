"""Reads of payloads at presigned URLs of a bucket.

The coordinator gives the URLs, which expire. A node uses a URL only if it allows its scheme and host, and follows no
redirect. A URL is a credential, so it is never logged. A read yields only bytes of its range; the caller compares them
with the payload's digest.

A URL that fails is dropped until the next plan. A bucket that is too slow, or whose reader gave up, is not used for ten
minutes. A payload that arrived with another digest is never read by URL again.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from http.cookiejar import DefaultCookiePolicy
from typing import TYPE_CHECKING, Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import Field

from heterorl.common.errors import Unreachable
from heterorl.common.process.clock import Clock
from heterorl.common.types.common import Digest
from heterorl.common.types.policy import PayloadRef

if TYPE_CHECKING:
    import httpx2


Allowed = Literal["https", "any", "none"]
"""URLs that a node uses: https on other machines, all (http too), or none."""
Host = Annotated[str, Field(pattern=r"^(\*\.)?[A-Za-z0-9:._-]{1,253}$")]
"""A host of URLs, or `*.` and a domain for all hosts below it."""
MAX_URL_CHARACTERS = 8192
CONNECT_S, SILENCE_S = 10.0, 30.0


def _is_own(host: str) -> bool:
    """Whether a host is this machine, or link-local as clouds' metadata services."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
    address = getattr(address, "ipv4_mapped", None) or address
    return address.is_loopback or address.is_link_local or address.is_unspecified or address.is_multicast


async def _refuse_own(event: str, info: Mapping[str, Any]) -> None:
    """Close connections to own addresses before any byte; raises Unreachable."""
    if event != "connection.connect_tcp.complete":
        return
    stream = info["return_value"]
    place = stream.get_extra_info("server_addr")
    if not place or _is_own(str(place[0]).partition("%")[0]):
        await stream.aclose()
        raise Unreachable(
            "the bucket of the payloads has a name that resolves to this machine or its link",
            action="name its host in payload_hosts if that is right",
        )


async def _guard(request: httpx2.Request) -> None:
    request.extensions["trace"] = _refuse_own


class UrlClient:
    """Decides which URLs a node uses, and holds the HTTP client.

    Belongs to the event loop. `hosts` are the hosts that URLs may name; without them, any but this machine and its
    local link.
    """

    def __init__(self, allowed: Allowed, hosts: Sequence[str] = ()) -> None:
        self._schemes = {"https": ("https",), "any": ("https", "http"), "none": ()}[allowed]
        self._hosts = tuple(host.lower() for host in hosts)
        self._takes_own = allowed == "any" or bool(hosts)
        self._client: httpx2.AsyncClient | None = None

    def allows(self, url: str) -> bool:
        if not url or len(url) > MAX_URL_CHARACTERS or not url.isascii() or not url.isprintable():
            return False
        try:
            parts = urlsplit(url)
            # Reading an impossible port raises ValueError.
            if parts.scheme not in self._schemes or not parts.hostname or parts.port == 0:
                return False
            return self._is_named(parts.hostname) and (self._takes_own or not _is_own(parts.hostname))
        except ValueError:
            return False

    def _is_named(self, host: str) -> bool:
        host = host.rstrip(".")
        named = (host.endswith(each[1:]) if each.startswith("*.") else host == each for each in self._hosts)
        return not self._hosts or any(named)

    def client(self) -> httpx2.AsyncClient:
        """The HTTP client, which follows no redirect and logs no URL.

        Raises Unreachable: httpx2 is not installed.
        """
        try:
            import httpx2
        except ImportError:
            raise Unreachable("httpx2 is not installed") from None
        if self._client is None:
            # At INFO they log each URL.
            for name in ("httpx2", "httpcore2"):
                logging.getLogger(name).setLevel(logging.WARNING)
            timeout = httpx2.Timeout(SILENCE_S, connect=CONNECT_S)
            # The coordinator chooses URLs: this machine's proxy carries them only for named hosts.
            self._client = httpx2.AsyncClient(
                timeout=timeout,
                follow_redirects=False,
                trust_env=bool(self._hosts),
                event_hooks={} if self._takes_own else {"request": [_guard]},
            )
            # No cookies.
            self._client.cookies.jar.set_policy(DefaultCookiePolicy(allowed_domains=()))
        return self._client

    async def close(self) -> None:
        if self._client is not None:
            await self._client.aclose()


MAX_KNOWN = 4096
FRAME_BYTES = 1 << 16
"""Small, so that a slow line still yields frames."""
BRISK_BYTES, BRISK_S = 1 << 20, 50.0
"""Least rate of a bucket: so many bytes in so many seconds of waiting, before a relay's samplers give up."""
PAUSE_S = 600.0
"""Pause of reads after a bucket was slow."""
_PARTIAL = 206
_OF_ADDRESS = (ValueError, OverflowError)
"""Errors of hosts and ports that no name or socket can have; of a port they come in a group."""


class Slow(Unreachable):
    """A bucket is too slow to wait for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """A payload's URL and size; the repr hides the URL, a credential."""

    url: str = field(repr=False)
    num_bytes: int


_NEW = Address(url="", num_bytes=0)


class PresignedReads:
    """The URLs that a node knows. Belongs to the event loop."""

    def __init__(self, connections: UrlClient, clock: Clock) -> None:
        self._connections = connections
        self._clock = clock
        self._not_before = 0.0
        # None: a payload arrived with bytes that differ from its name.
        self._known: OrderedDict[Digest, Address | None] = OrderedDict()

    def note(self, payloads: Sequence[PayloadRef], urls: Sequence[str]) -> None:
        for payload, url in zip(payloads, urls, strict=False):
            if self._connections.allows(url) and self._known.get(payload.digest, _NEW) is not None:
                self._known[payload.digest] = Address(url=url, num_bytes=payload.num_bytes)
                self._known.move_to_end(payload.digest)
        while len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)

    def find(self, digest: Digest) -> Address | None:
        return self._known.get(digest) if self._clock.monotonic() >= self._not_before else None

    def forget(self, digest: Digest) -> None:
        """Use no URL of a payload until a plan brings another one."""
        if self._known.get(digest) is not None:
            del self._known[digest]

    def pause(self) -> None:
        self._not_before = self._clock.monotonic() + PAUSE_S

    def distrust(self, digest: Digest) -> None:
        """Never use a URL of a payload again."""
        self._known[digest] = None

    async def read(self, address: Address, *, offset: int, stop: int) -> AsyncIterator[bytes]:
        """Yield [offset, stop) of a payload, in frames up to 64 KiB.

        Raises:
            Slow: the bucket does not answer in time, or sends too little.
            Unreachable: it cannot be reached, refuses, or sends something else.
        """
        client = self._connections.client()
        import httpx2

        headers = {"Range": f"bytes={offset}-{stop - 1}", "Accept-Encoding": "identity"}
        try:
            async with client.stream("GET", address.url, headers=headers) as answer:
                begins = answer.headers.get("Content-Range", "").startswith(f"bytes {offset}-")
                if answer.status_code != _PARTIAL or not begins:
                    raise Unreachable(f"the bucket of the payloads answers {answer.status_code}")
                num_left = stop - offset
                async with contextlib.aclosing(_brisk(answer.aiter_raw(FRAME_BYTES))) as frames:
                    async for frame in frames:
                        if len(frame) > num_left:
                            raise Unreachable("the bucket of the payloads sends more than was asked for")
                        num_left -= len(frame)
                        yield frame
        except (httpx2.HTTPError, httpx2.InvalidURL, httpx2.StreamError, *_OF_ADDRESS, ExceptionGroup) as error:
            if isinstance(error, ExceptionGroup) and error.split(_OF_ADDRESS)[1] is not None:
                raise
            # Its text may hold the URL.
            kind = Slow if isinstance(error, httpx2.TimeoutException) else Unreachable
            raise kind(f"the bucket of the payloads does not answer ({type(error).__name__})") from None
        if num_left:
            raise Unreachable("the answer of the bucket of the payloads ended early")


async def _brisk(frames: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    """Yield frames while they come fast; the reader's time does not count."""
    loop = asyncio.get_running_loop()
    left_bytes, left_s = BRISK_BYTES, BRISK_S
    while True:
        asked_at = loop.time()
        try:
            async with asyncio.timeout(left_s):
                frame = await anext(frames, b"")
        except TimeoutError:
            message = f"the bucket of the payloads brings less than {BRISK_BYTES} bytes in {BRISK_S:g} s"
            raise Slow(message) from None
        if not frame:
            return
        left_bytes -= len(frame)
        left_s -= loop.time() - asked_at
        if left_bytes <= 0:
            left_bytes, left_s = BRISK_BYTES, BRISK_S
        yield frame
