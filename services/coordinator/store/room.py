"""Room on the disk of data_dir: whether there is any, how everybody learns of it, and a ballast for deletion.

A full disk needs room to become less full: what may go is written down before it goes. The ballast is a file without
meaning that is given up for that, and laid again when there is room. While it is out, nothing new is taken in.

    data_dir/ballast    deleted at any time without harm, also by a person in need of room
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

from heterorl.common.errors import DiskFull, OperatorError, StoreFull
from heterorl.common.process.clock import Clock
from heterorl.common.process.files import opened_directory

_LOG = logging.getLogger(__name__)
LARGEST_SHARE = 16
"""The ballast takes at most this part (1 / n) of what is free."""
HEALED_S = 10.0
"""Seconds without a refusal after which the disk counts as having room."""
REMIND_S = 600.0
RETRY_AFTER_S = 5.0


def operators_error(data_dir: Path, error: OSError) -> OperatorError:
    """What a start tells a person about a data_dir that the system refuses."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DiskFull(str(data_dir))
    return OperatorError(f"{data_dir} cannot be used: {error}", action="check its disk, its mount and its permissions")


class Room:
    """The disk of one data directory. Belongs to the event loop."""

    def __init__(self, directory: Path, *, ballast_bytes: int, clock: Clock) -> None:
        self._directory = directory
        self._ballast = directory / "ballast"
        self._ballast_bytes = ballast_bytes
        self._clock = clock
        self._is_out = False
        self._refused = -HEALED_S
        self._said = -REMIND_S
        self.is_full = False
        self.refusal = asyncio.Event()
        """Set when the disk refused something; cleared by whoever sees to it."""

    @property
    def problem(self) -> str:
        """What is wrong and what to do about it; empty while there is room."""
        if not self.is_full:
            return ""
        return (
            f"the disk of {self._directory.resolve()} is full, {self.free_bytes()} bytes are free: free space there, or"
            " lower store_bytes or merged_bytes; nothing acknowledged is lost, and the run goes on when there is room"
        )

    def free_bytes(self) -> int:
        """Bytes that are free on the disk; 0 when it does not say."""
        try:
            return shutil.disk_usage(self._directory).free
        except OSError:
            return 0

    def check(self) -> None:
        """Refuse what would use the room that deletion needs.

        Raises:
            StoreFull: while the ballast is out.
        """
        if self._is_out:
            raise StoreFull("the coordinator's disk is full, and room is being made", retry_after_s=RETRY_AFTER_S)

    def note_refusal(self) -> None:
        """The disk refused to take something."""
        now = self._clock.monotonic()
        self.is_full, self._refused = True, now
        self.refusal.set()
        if now - self._said >= REMIND_S:
            self._said = now
            _LOG.error("%s", self.problem)

    def look(self) -> None:
        """See whether there is room again, and lay the ballast where it is missing."""
        now = self._clock.monotonic()
        if self.is_full and now - self._refused >= HEALED_S and self.free_bytes() > self._wanted_bytes():
            self.is_full, self._said = False, -REMIND_S
            _LOG.warning("the disk of %s has room again", self._directory.resolve())
        if not self.is_full and not self._is_out:
            self.lay()

    def lay(self, *, has_priority: bool = False) -> None:
        """Write the ballast where there is none and plenty of room, or any room, where it has priority."""
        size = self._wanted_bytes()
        if size == 0 or self._ballast.exists() or not (has_priority or self.free_bytes() >= LARGEST_SHARE * size):
            return
        try:
            with opened_directory(self._directory) as parent:
                descriptor = os.open(self._ballast, os.O_WRONLY | os.O_CREAT, 0o600)
                try:
                    os.posix_fallocate(descriptor, 0, size)
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)
                os.fsync(parent)
        except OSError as error:
            # Only deletion on a full disk does without it.
            _LOG.debug("no ballast: %s", error)
            self._drop()

    def give_up(self) -> None:
        """Give the ballast up where a start would find no room without it."""
        if self._ballast.exists() and self.free_bytes() < self._wanted_bytes():
            _LOG.warning("the disk of %s is full: the ballast is given up to start", self._directory.resolve())
            self._drop()

    @contextlib.asynccontextmanager
    async def freed(self) -> AsyncIterator[None]:
        """While room is made: the ballast is out, and nothing else may use its place."""
        self._is_out = True
        try:
            await asyncio.to_thread(self._drop)
            yield
            await asyncio.to_thread(self.lay, has_priority=True)
        finally:
            self._is_out = False

    def _wanted_bytes(self) -> int:
        try:
            total = shutil.disk_usage(self._directory).total
        except OSError:
            return 0
        return min(self._ballast_bytes, total // (4 * LARGEST_SHARE))

    def _drop(self) -> None:
        with contextlib.suppress(OSError):
            self._ballast.unlink()
