"""Connections of a node to a store of objects, and which addresses of it the node asks at all."""

from __future__ import annotations

import ipaddress
import logging
from collections.abc import Mapping, Sequence
from http.cookiejar import DefaultCookiePolicy
from typing import TYPE_CHECKING, Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import Field

from heterorl.common.errors import Unreachable

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


class Connections:
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
