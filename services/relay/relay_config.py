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
    """host:port of the coordinator; a list if there is a standby."""
    listen: Listen = "127.0.0.1:50061"
    """host:port to serve on; port 0: any free one, in the file `address` of data_dir or cache_dir."""
    tls: ServerTlsConfig = ServerTlsConfig()
    """Certificates of this node; changed files are read again."""
    cache_dir: Path = Path("runs/relay")
    """Directory of cached payloads, for this relay only; delete it only while the relay is stopped."""
    cache_bytes: int = Field(default=64 << 30, ge=1 << 20)
    """Cached payloads, arriving ones included; the longest unused go first. Larger payloads pass uncached."""
    max_message_bytes: int = Field(default=16 << 20, ge=2 << 20, le=512 << 20)
    """Largest message, which bounds a group. Learner and relay: at least the coordinator's."""
    messages_in_flight_bytes: int = Field(default=256 << 20, ge=1 << 20)
    """Memory for samplers' messages, a quarter of it for short requests; one site gets at most three quarters."""
    max_concurrent_rpcs: int = Field(default=1024, ge=8)
    """Concurrent calls, two to four a sampler; more are retried later."""
    site_concurrent_rpcs: int = Field(default=32, ge=1)
    """Concurrent calls of one sampler's certificate."""
    payload_urls: Allowed = "https"
    """Bucket addresses that this node uses: `https` on other machines, `any` (http and loopback too) or `none`."""
    payload_hosts: tuple[Host, ...] = ()
    """Hosts of such addresses, `*.amazonaws.com` for all below it, through HTTPS_PROXY if set. Empty: every host
    outside this machine and its network, without proxy."""
    bandwidth: BandwidthConfig = BandwidthConfig()
    """Caps on received and sent bytes."""
    metrics_port: int = Field(default=9104, ge=0, le=65535)
    """Port of the Prometheus metrics; 0: any free one. Left out: the default or the next free one in steps of 10."""
    metrics_host: str = Field(default="127.0.0.1", min_length=1, max_length=253)
    """Address of the metrics, which hold no secret and need no login."""
    metrics_push_s: float = Field(default=15.0, ge=0.0, le=45.0)
    """Interval of sending the metrics to the coordinator, which serves them too; 0: never."""
    stop_grace_s: float = Field(default=5.0, ge=0)
    """How long running calls may take after SIGTERM."""
