"""Addresses that must hold no secret: what is wrong with one is said without it, as it may end in a log."""

from __future__ import annotations

import re
from urllib.parse import SplitResult, unquote, urlsplit

_SECRET = re.compile(r"(pass(word|wd|phrase)?|secret|(client|server)_key)\s*=", re.IGNORECASE)
IN_DATABASE = "has a password: keep it in the file that PGPASSFILE names (mode 0600), or in PGPASSWORD"


def split(url: str) -> SplitResult:
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
    parts = split(url)
    if parts.scheme not in ("postgresql", "postgres"):
        raise ValueError("must begin with postgresql://")
    if parts.password is not None or _SECRET.search(unquote(url)):
        raise ValueError(IN_DATABASE)
    if parts.fragment or "#" in url:
        raise ValueError("has a #: write %23 where a name has one")
    return url
