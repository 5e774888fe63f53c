"""TLS settings of a link; plaintext only between processes of one machine.

Guarantee: plaintext needs both `insecure = true` and a loopback address; a link never falls back to it.
"""

from pathlib import Path

from pydantic import Field

from heterorl.common.errors import ConfigError
from heterorl.common.process.address import is_loopback
from heterorl.common.process.config_file import Config

ADDRESS_FILE = "coordinator"
"""File next to a node's certificate with the coordinator's host:port, for commands without an address."""
_ACTION = "make certificates with `heterorl certs init` and `issue`, or set tls.insecure on loopback"


class TlsConfig(Config):
    """Certificates of this node; changed files are read again."""

    ca: str = Field(default="", max_length=4096)
    """PEM file of trusted authorities; the old and the new one during a change."""
    cert: str = Field(default="", max_length=4096)
    """PEM file of this node's certificate, then intermediate authorities."""
    key: str = Field(default="", max_length=4096)
    """PEM file of this node's private key, mode 0600."""
    insecure: bool = False
    """Plaintext without identity, on loopback only."""


class ServerTlsConfig(TlsConfig):
    """Certificates of the coordinator, and revoked ones."""

    revoked: str = Field(default="", max_length=4096)
    """File of revoked serial numbers, hexadecimal, one a line."""


def files_in(directory: Path) -> dict[str, str]:
    """A node's files by key, as `heterorl join` and `certs issue` write."""
    names = {"ca": "ca.crt", "cert": "node.crt", "key": "node.key"}
    return {key: str(directory / name) for key, name in names.items()}


def noted_address(directory: Path) -> str:
    """host:port of the coordinator that `heterorl join` noted, or empty."""
    try:
        return (directory / ADDRESS_FILE).read_text(encoding="ascii")[:4096].strip()
    except (OSError, UnicodeDecodeError):
        return ""


def check_tls(tls: TlsConfig, *, key: str, address: str) -> None:
    """Check a link at `address`; raises ConfigError for missing or contradictory settings."""
    files = {"tls.ca": tls.ca, "tls.cert": tls.cert, "tls.key": tls.key}
    if isinstance(tls, ServerTlsConfig) and tls.revoked:
        files["tls.revoked"] = tls.revoked
    if not tls.insecure:
        missing = [name for name, value in files.items() if not value]
        if missing:
            raise ConfigError(missing[0], "is not set, and the link needs certificates", action=_ACTION)
        return
    stated = [name for name, value in files.items() if value]
    if stated:
        raise ConfigError("tls.insecure", f"is set together with {stated[0]}", action="remove one of them")
    if not is_loopback(address):
        raise ConfigError(
            "tls.insecure", f"plaintext is for loopback only, and {key} is {address}", action="use certificates"
        )
