"""gRPC settings for long, lossy links; both ends use the same.

Keepalive alone does not notice a stopped peer for over a minute: the http2 ping timeout and unlimited pings do,
in seconds. gRPC's own retries are off, because ours carry idempotency keys. Its channels dial again at most seconds
apart: by default they come to wait two minutes, in which a healed line stands unused.

A proxy of the environment carries TLS to other machines alone. gRPC itself excepts only what no_proxy names, so without
this it would ask the proxy for 127.0.0.1.
"""

from __future__ import annotations

import logging
import os
from urllib.request import proxy_bypass

from heterorl.common.process.address import is_loopback

_LOG = logging.getLogger(__name__)
_PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")
"""Variables that gRPC reads, the first one that is set."""
MIN_MESSAGE_BYTES = 1 << 20
"""Below the smallest limit that any configuration may set."""
MAX_MESSAGE_BYTES = 512 << 20
"""Above the largest limit that any configuration may set."""


def link_options(max_message_bytes: int, *, send_bytes: int = 0) -> list[tuple[str, int]]:
    """Options of a channel or server: limits before parsing, dead peers noticed in seconds.

    `send_bytes` is the limit of what is sent where it is another than of what is received.
    """
    return [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", send_bytes or max_message_bytes),
        ("grpc.max_metadata_size", 8 * 1024),
        ("grpc.keepalive_time_ms", 10_000),
        ("grpc.keepalive_timeout_ms", 5_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.ping_timeout_ms", 5_000),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.max_reconnect_backoff_ms", 5_000),
        ("grpc.enable_retries", 0),
    ]


def channel_options(
    address: str, *, insecure: bool, max_message_bytes: int, send_bytes: int = 0
) -> list[tuple[str, int]]:
    """`link_options` of a channel to host:port; says in the log where a proxy of the environment carries it."""
    options = link_options(max_message_bytes, send_bytes=send_bytes)
    if insecure or is_loopback(address):
        # Plaintext does not leave this machine, and a proxy has another one for loopback: itself.
        return [*options, ("grpc.enable_http_proxy", 0)]
    variable = next((name for name in _PROXIES if os.environ.get(name)), "")
    if variable and not proxy_bypass(address.rpartition(":")[0]):
        # Not its value: a password may be in it.
        _LOG.info("calls to %s go through the proxy of %s; no_proxy names exceptions", address, variable)
    return options


def server_options(max_message_bytes: int) -> list[tuple[str, int]]:
    """Options of a server: those of the link, and bounds on what one peer can hold."""
    return [
        *link_options(max_message_bytes),
        ("grpc.server_handshake_timeout_ms", 5_000),
        ("grpc.max_concurrent_streams", 64),
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.so_reuseport", 0),
    ]
