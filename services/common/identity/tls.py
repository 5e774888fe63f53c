"""How a link is secured: certificates by default, plaintext only between processes of one machine.

Guarantees: plaintext needs both the operator's word and an address of loopback. Must never fall back to it.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from heterorl.common.errors import ConfigError
from heterorl.common.process.address import is_loopback
from heterorl.common.process.config import Config

ADDRESS_FILE = "coordinator"
"""Beside a node's certificate: host:port of the coordinator, for commands that are not told."""
_ACTION = "make certificates with `heterorl certs init` and `issue`, or set tls.insecure on loopback"


class TlsConfig(Config):
    """Certificates of this node. Files are read again when they change: a rotation needs no restart."""

    ca: str = Field(default="", max_length=4096)
    """PEM file of the authorities whose certificates are believed; may hold the old and the new one."""
    cert: str = Field(default="", max_length=4096)
    """PEM file of this node's certificate, and of intermediate authorities if there are any."""
    key: str = Field(default="", max_length=4096)
    """PEM file of this node's private key, mode 0600."""
    insecure: bool = False
    """Plaintext without identity; accepted only for an address of loopback."""


class ServerTlsConfig(TlsConfig):
    """Certificates of the coordinator, and those that it no longer accepts."""

    revoked: str = Field(default="", max_length=4096)
    """File of revoked serial numbers, one hexadecimal number a line; looked at on each call. Empty is none."""


def files_in(directory: Path) -> dict[str, str]:
    """The three files of a node where `heterorl join` and `certs issue` put them, by their keys."""
    names = {"ca": "ca.crt", "cert": "node.crt", "key": "node.key"}
    return {key: str(directory / name) for key, name in names.items()}


def noted_address(directory: Path) -> str:
    """host:port of the coordinator as `heterorl join` noted it beside a node's files; empty where it did not."""
    try:
        return (directory / ADDRESS_FILE).read_text(encoding="ascii")[:300].strip()
    except (OSError, UnicodeDecodeError):
        return ""


def check_tls(tls: TlsConfig, *, key: str, address: str) -> None:
    """Check the rule for a link at `address`, which the setting `key` names.

    Raises:
        ConfigError: a file is not named, plaintext could leave the machine, or both are asked for.
    """
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
