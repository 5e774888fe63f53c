"""Transport settings for long, lossy links: gRPC options, bandwidth caps, frame memory.

Keepalive needs over a minute to notice a stopped peer; the http2 ping timeout with unlimited pings needs at most 20 s:
a ping each 10 s, which waits behind what a slow line has not carried yet.
gRPC's own retries are off, because ours carry idempotency keys. Channels dial again every few seconds at least: by
default the wait grows to two minutes, in which a healed line stands unused.

A proxy of the environment carries TLS to other machines only. gRPC itself excepts only the names in no_proxy, so it
would ask the proxy for 127.0.0.1.
"""

import ctypes
import logging
import os
import sys
from dataclasses import dataclass, field
from urllib.request import proxy_bypass

from pydantic import Field

from heterorl.common.process.address import is_loopback
from heterorl.common.process.clock import Clock
from heterorl.common.process.config_file import Config

_LOG = logging.getLogger(__name__)
_PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")
"""Variables that gRPC reads; the first one set counts."""
MIN_MESSAGE_BYTES = 1 << 20
"""Below the smallest limit that a configuration may set."""
MAX_MESSAGE_BYTES = 512 << 20
"""Above the largest limit that a configuration may set."""


def link_options(max_message_bytes: int, *, send_bytes: int = 0) -> list[tuple[str, int]]:
    """Options of a link: limits before parsing, dead peers noticed.

    `send_bytes` is the limit of sent messages, where it differs from the limit of received ones.
    """
    return [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", send_bytes or max_message_bytes),
        ("grpc.max_metadata_size", 8 * 1024),
        ("grpc.keepalive_time_ms", 10_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        # A queue of 300 ms at 1 Mbit/s breaks streams at 5 s.
        ("grpc.http2.ping_timeout_ms", 10_000),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.max_reconnect_backoff_ms", 5_000),
        ("grpc.enable_retries", 0),
    ]


def channel_options(
    address: str, *, insecure: bool, max_message_bytes: int, send_bytes: int = 0
) -> list[tuple[str, int]]:
    """`link_options` of a channel; logs the environment's proxy that carries it."""
    options = link_options(max_message_bytes, send_bytes=send_bytes)
    if insecure or is_loopback(address):
        # Plaintext stays on this machine, and a proxy's loopback is another machine.
        return [*options, ("grpc.enable_http_proxy", 0)]
    if variable := proxy_variable(address):
        # Its value may hold a password.
        _LOG.info("calls to %s go through the proxy of %s; no_proxy names exceptions", address, variable)
    return options


def proxy_variable(address: str) -> str:
    """The environment's variable whose proxy carries TLS to an address, or empty."""
    if is_loopback(address) or proxy_bypass(address.rpartition(":")[0]):
        return ""
    return next((name for name in _PROXIES if os.environ.get(name)), "")


def server_options(max_message_bytes: int) -> list[tuple[str, int]]:
    """`link_options` of a server, with bounds on the resources of one peer."""
    return [
        *link_options(max_message_bytes),
        ("grpc.server_handshake_timeout_ms", 5_000),
        ("grpc.max_concurrent_streams", 64),
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.so_reuseport", 0),
    ]


BURST_S = 0.25
"""Unused allowance kept, in seconds at the cap."""


class BandwidthConfig(Config):
    """Caps on this process's weights and rollouts; small messages do not count."""

    down_bytes_per_s: float = Field(default=0.0, ge=0.0)
    """Cap on received weights and rollouts; 0: none. Set it where others use the site's link."""
    up_bytes_per_s: float = Field(default=0.0, ge=0.0)
    """The same for sent bytes."""


@dataclass(slots=True, kw_only=True)
class TokenBucket:
    """Lets `bytes_per_s` through; more is a debt that the taker waits for.

    One take may be larger than the bucket; the mean rate over a long time is exact.
    """

    bytes_per_s: float
    clock: Clock
    _allowance: float = field(init=False, default=0.0)
    _at: float = field(init=False)

    def __post_init__(self) -> None:
        self._at = self.clock.monotonic()

    async def take(self, num_bytes: int) -> float:
        """Pay for bytes, first come first served; returns the seconds waited."""
        if not self.bytes_per_s:
            return 0.0
        now = self.clock.monotonic()
        earned = (now - self._at) * self.bytes_per_s
        self._at = now
        self._allowance = min(BURST_S * self.bytes_per_s, self._allowance + earned) - num_bytes
        wait_s = max(0.0, -self._allowance / self.bytes_per_s)
        if wait_s:
            await self.clock.sleep(wait_s)
        return wait_s


_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8
MMAP_BYTES = 8 << 20
"""Blocks up to this size come from a heap; larger ones still return to the kernel at once."""
TRIM_BYTES = 32 << 20
"""Most free memory that a heap keeps at its end."""
MAX_HEAPS = 2
"""Heaps of a process; with one a thread, each would keep its thread's peak."""


def keep_freed_frames() -> bool:
    """Tell glibc (`mallopt`) to keep freed frames; returns whether it did.

    By default it returns blocks of a frame's size to the kernel and asks for them again: about 500 page faults for each
    MiB, more time than copy, checksums and digest together.
    """
    if sys.platform != "linux":
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    options = ((_M_MMAP_THRESHOLD, MMAP_BYTES), (_M_TRIM_THRESHOLD, TRIM_BYTES), (_M_ARENA_MAX, MAX_HEAPS))
    answers = [mallopt(option, value) for option, value in options]
    return all(answer == 1 for answer in answers)
