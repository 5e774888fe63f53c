"""Who is answered: the person who has the URL that was printed, under a name of this machine.

A page of elsewhere that has its own name lead to 127.0.0.1 (DNS rebinding) is refused by that name; another user of
this machine, who may connect to the port too, by the key. The key goes from the URL into a cookie at the first visit.
"""

from __future__ import annotations

import hmac
import re
from urllib.parse import parse_qsl, urlencode

_OWN_HOST = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:[0-9]{1,5})?", re.IGNORECASE | re.ASCII)
KEY_FIELD = "key"
HEADERS = (
    (
        "Content-Security-Policy",
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    ),
    ("X-Content-Type-Options", "nosniff"),
    ("X-Frame-Options", "DENY"),
    ("Referrer-Policy", "no-referrer"),
    ("Cross-Origin-Opener-Policy", "same-origin"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
    ("Cache-Control", "no-store"),
)
"""Of every answer: nothing is loaded from elsewhere, nothing runs that stands in a page, nobody frames or reads it."""


def is_own_host(hosts: list[str]) -> bool:
    """Whether the Host headers of a request are one, and name this machine; the port may be that of a tunnel."""
    return len(hosts) == 1 and _OWN_HOST.fullmatch(hosts[0].strip()) is not None


def cookie_name(port: int) -> str:
    """Cookies of all ports of a machine lie together."""
    return f"heterorl-view-{port}"


def has_key(cookies: str, *, port: int, key: str) -> bool:
    """Whether a Cookie header holds the key."""
    pairs = (part.strip().partition("=") for part in cookies.split(";"))
    found = [value for name, _, value in pairs if name == cookie_name(port)]
    return any(_is_same(value, key) for value in found)


def take_key(query: str, *, key: str) -> str | None:
    """The query without its key; None where it has none, or another one."""
    try:
        fields = parse_qsl(query, max_num_fields=100)
    except ValueError:
        return None
    if not any(name == KEY_FIELD and _is_same(value, key) for name, value in fields):
        return None
    return urlencode([(name, value) for name, value in fields if name != KEY_FIELD], errors="replace")


def _is_same(value: str, key: str) -> bool:
    return hmac.compare_digest(value.encode("utf-8", "replace"), key.encode("ascii"))
