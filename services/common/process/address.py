"""host:port as a person writes it: whether it is one, and whether only this machine can reach it."""

from __future__ import annotations

import ipaddress
import re
from typing import Annotated, Any

from pydantic import BeforeValidator

from heterorl.common.errors import ConfigError


def check_address(key: str, address: str) -> None:
    """Check that what the option `key` says is host:port.

    Raises:
        ConfigError: it is not.
    """
    match = re.fullmatch(r"[!-~]+:(\d{1,5})", address)
    if match is None or int(match[1]) > 65535:
        raise ConfigError(key, f"{address[:100]!r} is not host:port", action="for example coord.example:50051")


def addresses(text: str) -> tuple[str, ...]:
    """Each host:port of a text that names one, or several with commas between them."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _joined(value: Any) -> Any:
    return ",".join(value) if isinstance(value, list) and all(isinstance(each, str) for each in value) else value


Addresses = Annotated[str, BeforeValidator(_joined)]
"""One host:port, or a list of them; kept with commas between them."""


def is_loopback(address: str) -> bool:
    """Whether host:port can only be reached from this machine; a name other than localhost never counts."""
    host = address.rpartition(":")[0]
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
