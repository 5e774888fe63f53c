"""Addresses: host:port, loopback or not, and URLs without secrets.

Errors about a URL do not repeat it, since it may hold a password.
"""

import errno
import functools
import ipaddress
import re
from typing import Annotated, Any
from urllib.parse import SplitResult, unquote, urlsplit

from pydantic import AfterValidator, BeforeValidator

from heterorl.common.errors import AddressUnusable, ConfigError

_SECRET = re.compile(r"(pass(word|wd|phrase)?|secret|(client|server)_key)\s*=", re.IGNORECASE)
_KEY = re.compile(
    r"(pass(word|wd|phrase)?|secret|token|key|auth|authorization|credentials?|sig(nature)?)=", re.IGNORECASE
)
MAX_PORT = 65535
MAX_LABEL = 63
IN_DATABASE = "has a password: keep it in the file that PGPASSFILE names (mode 0600), or in PGPASSWORD"


def check_address(key: str, address: str, *, is_listening: bool = False, is_list: bool = False) -> None:
    """Raise ConfigError unless `key` is host:port, or a list of them.

    Only listeners take port 0.
    """
    try:
        for each in address.split(",") if is_list else [address]:
            _check(each, least=0 if is_listening else 1)
    except ValueError as error:
        raise ConfigError(key, str(error)) from error


def _check(address: str, *, least: int) -> str:
    match = re.fullmatch(r"([!-+.0-~-]+):([0-9]{1,5})", address)
    if match is None:
        raise ValueError(f"{address[:100]!r} is not host:port, for example coord.example:50051")
    # A resolver raises UnicodeError for them.
    if not all(0 < len(label) <= MAX_LABEL for label in match[1].removesuffix(".").split(".")):
        raise ValueError(f"{address[:100]!r} has two dots in a row, or more than {MAX_LABEL} characters without one")
    if not least <= int(match[2]) <= MAX_PORT:
        raise ValueError(f"the port of {address[:100]!r} must be from {least} to {MAX_PORT}")
    return address


def listen_error(key: str, address: str, error: OSError) -> ConfigError:
    """The error for host:port at which a server could not listen."""
    if error.errno == errno.EADDRINUSE:
        return ConfigError(key, f"{address} is already in use", action="stop the other process or choose another port")
    if error.errno == errno.EACCES:
        return ConfigError(key, f"{address} needs root", action="choose a port from 1024 on")
    action = "wait for the network, or set 127.0.0.1, 0.0.0.0 or an address of `ip address`"
    return AddressUnusable(key, f"{address}: {error.strerror or error}", action=action)


def addresses(text: str) -> tuple[str, ...]:
    """Each host:port of a comma-separated list."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _joined(value: Any) -> Any:
    return ",".join(value) if isinstance(value, list) and all(isinstance(each, str) for each in value) else value


def _all_dialled(text: str) -> str:
    for address in addresses(text) or (text,):
        _check(address, least=1)
    return text


Addresses = Annotated[str, BeforeValidator(_joined), AfterValidator(_all_dialled)]
"""One host:port to dial, or a list of them; kept with commas between them."""
Listen = Annotated[str, AfterValidator(functools.partial(_check, least=0))]
"""host:port to listen on; port 0 lets the system choose."""


def is_loopback(address: str) -> bool:
    """Whether only this machine can reach host:port; of names, localhost only counts."""
    host = address.rpartition(":")[0]
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def split_url(url: str) -> SplitResult:
    """Split a URL; raises ValueError without the URL's text."""
    try:
        parts = urlsplit(url)
        _ = parts.port if "," not in parts.netloc else None
    except ValueError:
        # Without the library's message, which repeats the URL.
        raise ValueError("is no address: a host, a port or a character of it cannot be") from None
    return parts


def _without_secrets(url: str) -> str:
    parts = split_url(url)
    if "@" in parts.netloc or _KEY.search(unquote(f"{parts.query} {parts.fragment}")):
        raise ValueError("has a user, password or key, which logs and reports would show: use a file of secrets")
    return url


Url = Annotated[str, AfterValidator(_without_secrets)]
"""A URL without secrets, with a valid port, if any; empty is none."""


def check_database(url: str) -> str:
    """Return a PostgreSQL URL; raises ValueError for another, or with a password."""
    parts = split_url(url)
    if parts.scheme not in ("postgresql", "postgres"):
        raise ValueError("must begin with postgresql://")
    if parts.password is not None or _SECRET.search(unquote(url)):
        raise ValueError(IN_DATABASE)
    if parts.fragment or "#" in url:
        raise ValueError("has a #: write %23 where a name has one")
    return url
