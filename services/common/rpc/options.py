"""gRPC settings for long, lossy links; both ends use the same.

Keepalive alone does not notice a stopped peer for over a minute: the http2 ping timeout and unlimited pings do,
in seconds. gRPC's own retries are off, because ours carry idempotency keys. Its channels dial again at most seconds
apart: by default they come to wait two minutes, in which a healed line stands unused.
"""

from __future__ import annotations

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
