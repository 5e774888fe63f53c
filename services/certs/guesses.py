"""How often an address may be wrong about tokens: a pure decision over the times of its failures."""

from __future__ import annotations

import ipaddress
from collections import OrderedDict, deque


class GuessLimit:
    """Addresses and when they failed; bounded, the one that failed longest ago is forgotten first.

    Failures count for each token, so that nodes behind one address do not shut one another out; for all tokens of an
    address there is a far larger number. An IPv6 address counts as its /64, which one machine has whole.
    """

    def __init__(
        self, *, max_failures: int = 5, max_of_address: int = 100, window_s: float = 300.0, max_addresses: int = 4096
    ) -> None:
        self._max_failures = max_failures
        self._max_of_address = max_of_address
        self._window_s = window_s
        self._max_addresses = max_addresses
        self._failures: OrderedDict[tuple[str, bytes], deque[float]] = OrderedDict()

    def wait_s(self, address: str, number: bytes, *, now: float) -> float:
        """Seconds until an address may try the token of a number again; 0 is now."""
        waits = [0.0]
        for key in _keys(address, number):
            times = self._failures.get(key)
            if times is not None and len(times) == times.maxlen:
                waits.append(times[0] + self._window_s - now)
        return max(waits)

    def note(self, address: str, number: bytes, *, now: float) -> None:
        """An address failed with the token of a number."""
        for key, most in zip(_keys(address, number), (self._max_failures, self._max_of_address), strict=True):
            self._failures.setdefault(key, deque(maxlen=most)).append(now)
            self._failures.move_to_end(key)
        while len(self._failures) > self._max_addresses:
            self._failures.popitem(last=False)


def _keys(address: str, number: bytes) -> tuple[tuple[str, bytes], tuple[str, bytes]]:
    network = network_of(address)
    return (network, number), (network, b"")


def network_of(address: str) -> str:
    """The address, or its /64: what one machine has."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if parsed.version == 4:
        return address
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(ipaddress.ip_network((parsed, 64), strict=False))
