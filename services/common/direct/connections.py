"""Connections of a node to a store of objects, and which addresses of it the node asks at all."""

from __future__ import annotations

import ipaddress
import logging
from http.cookiejar import DefaultCookiePolicy
from typing import TYPE_CHECKING, Literal
from urllib.parse import urlsplit

from heterorl.common.errors import Unreachable

if TYPE_CHECKING:
    import httpx2

Allowed = Literal["https", "any", "none"]
"""Addresses that a node asks: of TLS on other machines, all, also of http, or none."""
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


class Connections:
    """What a node may ask, and by which connections. Belongs to the event loop."""

    def __init__(self, allowed: Allowed) -> None:
        self._schemes = {"https": ("https",), "any": ("https", "http"), "none": ()}[allowed]
        self._takes_own = allowed == "any"
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
            return self._takes_own or not _is_own(parts.hostname)
        except ValueError:
            return False

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
            # An address is the coordinator's choice: no proxy and no password of this machine go with it.
            self._client = httpx2.AsyncClient(timeout=timeout, follow_redirects=False, trust_env=False)
            # What a store sets it would be told again, with whatever payload.
            self._client.cookies.jar.set_policy(DefaultCookiePolicy(allowed_domains=()))
        return self._client

    async def close(self) -> None:
        """Close the connections."""
        if self._client is not None:
            await self._client.aclose()
