"""Addresses as a person writes them: host:port, whether only this machine can reach it, and urls without secrets.

What is wrong with a url is said without it, as it may end in a log.
"""

from __future__ import annotations

import ipaddress
import re
from typing import Annotated, Any
from urllib.parse import SplitResult, unquote, urlsplit

from pydantic import BeforeValidator

from heterorl.common.errors import ConfigError

_SECRET = re.compile(r"(pass(word|wd|phrase)?|secret|(client|server)_key)\s*=", re.IGNORECASE)
IN_DATABASE = "has a password: keep it in the file that PGPASSFILE names (mode 0600), or in PGPASSWORD"


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


def split_url(url: str) -> SplitResult:
    """The parts of an address.

    Raises:
        ValueError: it is none; says nothing of it.
    """
    try:
        parts = urlsplit(url)
        _ = parts.port if "," not in parts.netloc else None
    except ValueError:
        # The library's words repeat what it could not read.
        problem = True
    else:
        problem = False
    if problem:
        raise ValueError("is no address: a host, a port or a character of it cannot be")
    return parts


def check_database(url: str) -> str:
    """Check a url of PostgreSQL's; returns it.

    Raises:
        ValueError: it is none, or has a secret, wherever it is written.
    """
    parts = split_url(url)
    if parts.scheme not in ("postgresql", "postgres"):
        raise ValueError("must begin with postgresql://")
    if parts.password is not None or _SECRET.search(unquote(url)):
        raise ValueError(IN_DATABASE)
    if parts.fragment or "#" in url:
        raise ValueError("has a #: write %23 where a name has one")
    return url
