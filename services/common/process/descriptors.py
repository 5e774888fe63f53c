"""File descriptors: the most that the system gives, and how many calls they are enough for.

A process that is out of them refuses calls for a while (Busy) and changes nothing by halves.
"""

from __future__ import annotations

import resource

from heterorl.common.errors import ConfigError

PER_CALL = 3
"""A call may bring a connection, and have a payload open, and the pass that proves it."""
OWN = 160
"""Database, log, listening sockets, certificates, metrics, directories."""
ENOUGH = 1 << 16
"""Asked of the system where it allows more still: some give a billion, and some programs count through them."""
MIN_CALLS = 8


def raise_limit(*, calls: int) -> int:
    """Take as many descriptors as `calls` need and the system allows; returns how many there are."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return ENOUGH
    wanted = max(soft, ENOUGH, needed_for(calls))
    limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    except (OSError, ValueError):
        # Some systems state more than they give.
        return soft
    return limit


def needed_for(calls: int) -> int:
    """Descriptors that a process with so many calls at once may need."""
    return OWN + PER_CALL * calls


def calls_within(limit: int, *, wanted: int) -> int:
    """How many calls at once `limit` descriptors are enough for, at most `wanted`.

    Raises:
        ConfigError: not even for a few.
    """
    calls = min(wanted, (limit - OWN) // PER_CALL)
    if calls < MIN_CALLS:
        raise ConfigError(
            "max_concurrent_rpcs",
            f"{limit} file descriptors are not enough for {MIN_CALLS} calls at once",
            action=f"allow at least {needed_for(wanted)} (ulimit -n, LimitNOFILE=), as {wanted} calls need",
        )
    return calls
