"""How often an address may be wrong about tokens: a pure decision over the times of its failures."""

from __future__ import annotations

import ipaddress
from collections import OrderedDict, deque


class GuessLimit:
    """Addresses and when they failed; bounded, the one that failed longest ago is forgotten first.

    An IPv6 address counts as its /64, which one machine has whole.
    """

    def __init__(self, *, max_failures: int = 5, window_s: float = 300.0, max_addresses: int = 4096) -> None:
        self._max_failures = max_failures
        self._window_s = window_s
        self._max_addresses = max_addresses
        self._failures: OrderedDict[str, deque[float]] = OrderedDict()

    def wait_s(self, address: str, *, now: float) -> float:
        """Seconds until an address may try again; 0 is now."""
        times = self._failures.get(_network(address))
        if times is None or len(times) < self._max_failures:
            return 0.0
        return max(0.0, times[0] + self._window_s - now)

    def note(self, address: str, *, now: float) -> None:
        """An address failed."""
        key = _network(address)
        self._failures.setdefault(key, deque(maxlen=self._max_failures)).append(now)
        self._failures.move_to_end(key)
        while len(self._failures) > self._max_addresses:
            self._failures.popitem(last=False)


def _network(address: str) -> str:
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if parsed.version == 4:
        return address
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(ipaddress.ip_network((parsed, 64), strict=False))
