"""Configuration of a relay."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from heterorl.common.identity.tls import ServerTlsConfig
from heterorl.common.process.address import Listen
from heterorl.common.rpc.node_config import NodeConfig


class RelayConfig(NodeConfig):
    """One relay serves the samplers of one place."""

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
    """Concurrent calls of one certificate."""
    metrics_port: int = Field(default=9104, ge=0, le=65535)
    """Port of the Prometheus metrics; 0: any free one. Left out: the default or the next free one in steps of 10."""
    stop_grace_s: float = Field(default=5.0, ge=0)
    """How long running calls may take after SIGTERM."""
