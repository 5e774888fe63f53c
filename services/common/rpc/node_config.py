"""Keys of every node that dials the coordinator."""

from pydantic import Field

from heterorl.common.identity.tls import TlsConfig
from heterorl.common.process.address import Addresses
from heterorl.common.process.config_file import Config
from heterorl.common.rpc.presigned import Allowed, Host
from heterorl.common.rpc.transport_options import BandwidthConfig


class NodeConfig(Config):
    """Keys of each node's link to the coordinator and of its metrics."""

    coordinator: Addresses = "127.0.0.1:50051"
    """host:port of the coordinator; a list if there is a standby."""
    tls: TlsConfig = TlsConfig()
    """Certificates of this node; changed files are read again."""
    payload_urls: Allowed = "https"
    """Bucket addresses that this node uses: `https` on other machines, `any` (http and loopback too) or `none`."""
    payload_hosts: tuple[Host, ...] = ()
    """Hosts of such addresses, `*.amazonaws.com` for all below it, through HTTPS_PROXY if set. Empty: every host
    except this machine and link-local addresses, without proxy."""
    bandwidth: BandwidthConfig = BandwidthConfig()
    """Caps on received and sent bytes."""
    metrics_host: str = Field(default="127.0.0.1", min_length=1, max_length=253)
    """Address of the metrics, which hold no secret and need no login."""
    metrics_push_s: float = Field(default=15.0, ge=0.0, le=45.0)
    """Interval of sending the metrics to the coordinator; 0: never."""
