"""Configuration of a relay."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from heterorl.common.identity.tls import ServerTlsConfig
from heterorl.common.process.address import Addresses, Listen
from heterorl.common.process.config import Config
from heterorl.common.rpc.presigned import Allowed, Host
from heterorl.common.rpc.transport_options import BandwidthConfig


class RelayConfig(Config):
    """One relay serves the samplers of one site."""

    coordinator: Addresses = "127.0.0.1:50051"
    """host:port of the coordinator; a list where a standby may take its place."""
    listen: Listen = "127.0.0.1:50061"
    """host:port to serve on, the `coordinator` of this site's samplers; port 0 lets the system choose (see the file
    `address` in cache_dir)."""
    tls: ServerTlsConfig = ServerTlsConfig()
    """Certificates of both links: a relay proves itself by the same one to samplers and to the coordinator."""
    cache_dir: Path = Path("runs/relay")
    """Directory of the payloads that are kept. Safe to delete while the relay is stopped; nothing else may use it."""
    cache_bytes: int = Field(default=64 << 30, ge=1 << 20)
    """Bytes that kept payloads may occupy, those that are arriving included; the longest unused ones go first. A
    payload that is larger is passed on without being kept."""
    max_message_bytes: int = Field(default=16 << 20, ge=2 << 20, le=512 << 20)
    """Largest message, bytes; must not be below the coordinator's."""
    messages_in_flight_bytes: int = Field(default=256 << 20, ge=1 << 20)
    """Bytes of samplers' messages in memory at once, a quarter of them for requests of some KiB; one sampler has at
    most four of the largest messages in each part."""
    max_concurrent_rpcs: int = Field(default=1024, ge=8)
    """Rpcs under way at once; more are refused for a while."""
    site_concurrent_rpcs: int = Field(default=32, ge=1)
    """Rpcs that one sampler's certificate may have under way at once."""
    payload_urls: Allowed = "https"
    """Addresses in a bucket that the coordinator gives and this node reads payloads from: of `https` on other
    machines, `any` (http and loopback too) or `none`; what they bring is compared with its digest."""
    payload_hosts: tuple[Host, ...] = ()
    """Hosts that such addresses may name, `*.amazonaws.com` for all below one; HTTPS_PROXY of the environment serves
    them. Empty: any host whose name resolves neither to this machine nor to its link, and no proxy."""
    bandwidth: BandwidthConfig = BandwidthConfig()
    """Caps of the payloads that this process receives from the coordinator."""
    metrics_port: int = Field(default=9104, ge=0, le=65535)
    """Port of the Prometheus metrics; 0 lets the system choose. Left out, the next free one in steps of 10."""
    metrics_host: str = Field(default="127.0.0.1", min_length=1, max_length=253)
    """Address that the metrics are served on; they carry no secret, and whoever can reach them can read them."""
    metrics_push_s: float = Field(default=15.0, ge=0.0, le=45.0)
    """Seconds between two pushes of these metrics to the coordinator, which shows them in its place; 0 is never."""
    stop_grace_s: float = Field(default=5.0, ge=0)
    """How long running calls may take after SIGTERM, seconds."""
