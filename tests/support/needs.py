"""What tests need of the machine beside Python: most are skipped without it, by name, and fail where it was promised.

HETERORL_TEST_REQUIRES is such a promise, a list of names: a suite that skips what it was to show is green for no reason.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from types import MappingProxyType

from tests.support.debian import postgres_binaries, prometheus

VARIABLE = "HETERORL_TEST_REQUIRES"


def _module(*names: str) -> Callable[[], bool]:
    return lambda: all(importlib.util.find_spec(name) is not None for name in names)


FINDERS: Mapping[str, Callable[[], bool]] = MappingProxyType(
    {
        "postgresql": lambda: _module("psycopg")() and postgres_binaries() is not None,
        "moto": _module("moto", "obstore"),
        "prometheus": lambda: prometheus() is not None,
    }
)


def missing(promised: str) -> list[str]:
    """What of a promise is not there.

    Raises:
        KeyError: nobody knows how to look for it.
    """
    return [name for name in promised.split() if not FINDERS[name]()]
