"""Configuration of a relay."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from heterorl.common.identity.tls import ServerTlsConfig
from heterorl.common.process.address import Addresses, Listen
from heterorl.common.process.config_file import Config
from heterorl.common.rpc.presigned import Allowed, Host
from heterorl.common.rpc.transport_options import BandwidthConfig


class RelayConfig(Config):
    """One relay serves the samplers of one site."""

    coordinator: Addresses = "127.0.0.1:50051"
    """host:port of the coordinator; a list where a standby may take its place."""
    listen: Listen = "127.0.0.1:50061"
    """host:port to serve on, which this site's samplers name as `coordinator`; port 0 lets the system choose (file
    `address` in cache_dir)."""
    tls: ServerTlsConfig = ServerTlsConfig()
    """Certificates of both links: a relay proves itself by the same one to samplers and to the coordinator."""
    cache_dir: Path = Path("runs/relay")
    """Directory of the payloads that are kept. Safe to delete while the relay is stopped; nothing else may use it."""
    cache_bytes: int = Field(default=64 << 30, ge=1 << 20)
    """Bytes of cached payloads, arriving ones included; the longest unused go first. Larger payloads pass uncached."""
    max_message_bytes: int = Field(default=16 << 20, ge=2 << 20, le=512 << 20)
    """Largest message, bytes; must not be below the coordinator's."""
    messages_in_flight_bytes: int = Field(default=256 << 20, ge=1 << 20)
    """Bytes of samplers' messages in memory, a quarter reserved for short requests. One sampler gets at most four of
    the largest messages in each part."""
    max_concurrent_rpcs: int = Field(default=1024, ge=8)
    """Concurrent rpcs; more are refused with a delay."""
    site_concurrent_rpcs: int = Field(default=32, ge=1)
    """Concurrent rpcs of one sampler's certificate."""
    payload_urls: Allowed = "https"
    """Payload URLs of a bucket that this node reads: `https` of other machines, `any` (http and loopback too) or
    `none`. Their bytes are compared with the digest."""
    payload_hosts: tuple[Host, ...] = ()
    """Hosts of such URLs, `*.amazonaws.com` for all below one, through HTTPS_PROXY if set. Empty: any host that
    resolves neither to this machine nor to its link, without a proxy."""
    bandwidth: BandwidthConfig = BandwidthConfig()
    """Caps of the payloads that this process receives from the coordinator."""
    metrics_port: int = Field(default=9104, ge=0, le=65535)
    """Port of the Prometheus metrics; 0 lets the system choose. Left out, the next free one in steps of 10."""
    metrics_host: str = Field(default="127.0.0.1", min_length=1, max_length=253)
    """Address of the metrics server. Every client that reaches it can read the metrics; they hold no secret."""
    metrics_push_s: float = Field(default=15.0, ge=0.0, le=45.0)
    """Seconds between two pushes of these metrics to the coordinator, which shows them in its place; 0 is never."""
    stop_grace_s: float = Field(default=5.0, ge=0)
    """How long running calls may take after SIGTERM, seconds."""
