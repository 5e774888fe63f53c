"""File descriptors: the most that the system gives, how many calls they are enough for, and a few kept for bad times.

Whoever connects takes a descriptor before it says who it is, so a process can be out of them through no fault of its
own. The spare ones let it finish what it has begun: name a file, note a deletion.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
from collections.abc import Callable
from typing import TypeVar

from heterorl.common.errors import ConfigError

ResultT = TypeVar("ResultT")
PER_CALL = 3
"""A call may bring a connection, and have a payload open, and the pass that proves it."""
OWN = 160
"""Database, log, listening sockets, certificates, metrics, directories, spare ones."""
ENOUGH = 1 << 16
"""Asked of the system where it allows more still: some give a billion, and some programs count through them."""
MIN_CALLS = 8
NUM_SPARE = 8

_spare: list[int] = []
_num_kept = 0


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


def keep_spare(count: int = NUM_SPARE) -> None:
    """Hold descriptors that `insist` may use when there are no others, from now on."""
    global _num_kept
    _num_kept = count
    with contextlib.suppress(OSError):
        while len(_spare) < count:
            _spare.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))


def insist(open_: Callable[[], ResultT]) -> ResultT:
    """Open something; with a spare descriptor when the process is out of others.

    Raises:
        OSError: it cannot be opened.
    """
    if len(_spare) < _num_kept:
        # One that was used comes back when there is one to be had.
        keep_spare(_num_kept)
    try:
        return open_()
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE) or not _spare:
            raise
    os.close(_spare.pop())
    return open_()
