"""Free space on data_dir's disk: groups are refused before it ends.

Versions and deletions then still have room.

free bytes               effect
below min_free_bytes     no group, merged delta or sample is written; the garbage collector frees what is missing
below half of it         no payload is taken either
none                     the disk refuses writes; no acknowledged data is lost
"""

from __future__ import annotations

import logging
import shutil
import sys
from pathlib import Path

from heterorl.common.errors import DiskFull, OperatorError, StoreFull
from heterorl.common.process.clock import Clock
from heterorl.common.process.files import NO_ROOM

_LOG = logging.getLogger(__name__)
LARGEST_SHARE = 32
"""The low-water mark is at most this part (1 / n) of the disk."""
HEALED_S = 10.0
"""Seconds after the last refusal by the disk until it counts as having room."""
PAUSE_S = 30.0
"""Seconds between two attempts to make room, each of which may rebuild the head."""
RETRY_AFTER_S = 5.0
POSTGRES_IS_FULL = (
    "PostgreSQL's disk is full: free space there; nothing acknowledged is lost, and the run goes on when there is room"
)


def operators_error(data_dir: Path, error: OSError) -> OperatorError:
    """The operator's error for an OSError on data_dir."""
    if error.errno in NO_ROOM:
        return DiskFull(str(data_dir))
    return OperatorError(f"{data_dir} cannot be used: {error}", action="check its disk, its mount and its permissions")


class DiskSpace:
    """The disk of one data directory. Belongs to the event loop."""

    def __init__(self, directory: Path, *, min_free_bytes: int, clock: Clock) -> None:
        self._directory = directory
        self._min_free_bytes = min_free_bytes
        self._clock = clock
        self._refused = self._tried = self._postgres_refused = -max(HEALED_S, PAUSE_S)
        self._postgres_problem = ""
        self._is_low = False
        self.is_full = False
        """Free bytes are below the mark, or the disk refused a write lately."""

    @property
    def problem(self) -> str:
        """The problem and what to do, or empty while there is room."""
        if not self.is_full:
            return self._postgres_problem
        return (
            f"the disk of {self._directory.resolve()} is full, {self._usage()[1]} bytes are free: free space there, or"
            " lower payload_space_bytes or merged_bytes; nothing acknowledged is lost, and the run goes on when there"
            " is room"
        )

    @property
    def missing_bytes(self) -> int:
        """Bytes to free: what the mark lacks, and a quarter more.
        0 with room; all that may go after a refusal above the mark, as by a quota."""
        mark, free = self._usage()
        lacking = mark + mark // 4 - free if self._is_low else sys.maxsize
        return max(0, lacking) if self.is_full else 0

    def check(self) -> None:
        """Check for a group.
        Raises StoreFull: the rest is for versions and deletion."""
        if self._is_low:
            problem = "the coordinator's disk has less room than min_free_bytes"
            raise StoreFull(problem, retry_after_s=RETRY_AFTER_S)

    def check_payload(self, num_bytes: int) -> None:
        """Check for a payload. Raises StoreFull: the rest is for deletion."""
        mark, free = self._usage()
        if mark and free - num_bytes < mark // 2:
            self.note_refusal()
            problem = f"the coordinator's disk has {free} bytes of room, a payload needs {num_bytes}"
            raise StoreFull(problem, retry_after_s=RETRY_AFTER_S)

    def note_refusal(self) -> None:
        self._refused = self._clock.monotonic()
        self._say(is_full=True)

    def note_refusal_of_postgres(self) -> None:
        """Note a problem for which nothing can make room here."""
        self._postgres_refused = self._clock.monotonic()
        if not self._postgres_problem:
            self._postgres_problem = POSTGRES_IS_FULL
            _LOG.error("%s", POSTGRES_IS_FULL)

    def look(self) -> bool:
        """Update the state; returns whether to make room now."""
        now = self._clock.monotonic()
        if self._postgres_problem and now - self._postgres_refused >= HEALED_S:
            self._postgres_problem = ""
            _LOG.warning("PostgreSQL's disk has room again")
        mark, free = self._usage()
        self._is_low = free < mark
        self._say(is_full=self._is_low or now - self._refused < HEALED_S)
        if not self.is_full or now - self._tried < PAUSE_S:
            return False
        self._tried = now
        return True

    def _say(self, *, is_full: bool) -> None:
        was_full, self.is_full = self.is_full, is_full
        if is_full and not was_full:
            _LOG.error("%s", self.problem)
        elif was_full and not is_full:
            _LOG.warning("the disk of %s has room again", self._directory.resolve())

    def _usage(self) -> tuple[int, int]:
        """Low-water mark and free bytes; (0, 0) if unknown."""
        try:
            usage = shutil.disk_usage(self._directory)
        except OSError:
            return 0, 0
        return min(self._min_free_bytes, usage.total // LARGEST_SHARE), usage.free
