"""A directory in which processes of one user on one host share payloads: who fetches one first gives it to the others.

    DIGEST          a whole payload, a hard link to what its fetcher verified
    DIGEST.turn     locked by whoever fetches it now; touched while bytes arrive
    .copy-*         on its way here from another file system

Guarantees: what is taken is compared with its name before it is used, so a file that a disk or another program changed
costs a fetch and is thrown away; names appear with all their bytes; whole payloads stay within a bound, the longest
unused go first, and whoever uses one has a name of its own for it. Nobody waits for a process that stands still.
Nothing here is needed: what the directory refuses is fetched.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import stat
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from heterorl.common.errors import ConfigError
from heterorl.common.process.clock import Clock
from heterorl.common.process.files import make_directory, try_lock
from heterorl.common.pull.fetch import STALL_S, Fetcher
from heterorl.common.pull.spool import RunningDigest
from heterorl.common.types.common import Digest
from heterorl.common.types.digests import file_name, is_digest
from heterorl.common.types.policy import PayloadRef

_LOG = logging.getLogger(__name__)
ASK_EVERY_S = 0.2
_TURN, _COPY = ".turn", ".copy-"
_OLD_COPY_S = 86_400.0


class SharedPayloads:
    """The directory; blocking, but for `turn`."""

    def __init__(self, directory: Path, *, max_bytes: int) -> None:
        """Open the directory, which others may have open too.

        Raises:
            ConfigError: it cannot be used, or is somebody else's to write.
        """
        self._directory = directory
        self._max_bytes = max_bytes
        try:
            make_directory(directory, mode=0o700)
            found = directory.stat()
        except OSError as error:
            raise ConfigError("share_dir", f"{directory} cannot be used: {error.strerror}") from error
        if found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise ConfigError(
                "share_dir", f"{directory} is open to others", action="it must be of this user alone: chmod 700"
            )

    def take(self, payload: PayloadRef, target: Path) -> bool:
        """Give a payload another name, `target`, where it is here with its size; its bytes are not looked at."""
        path = self._directory / file_name(payload.digest)
        try:
            found = path.lstat()
            if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_size != payload.num_bytes:
                self.discard(payload.digest)
                return False
            target.unlink(missing_ok=True)
            _link(path, target)
            # So that what is used stays.
            os.utime(path)
            is_whole = target.lstat().st_size == payload.num_bytes
        except OSError:
            # There is none, or it went meanwhile.
            return False
        if not is_whole:
            target.unlink(missing_ok=True)
        return is_whole

    def give(self, digest: Digest, source: Path) -> None:
        """Keep a payload that was verified for the others, and make room for it."""
        path = self._directory / file_name(digest)
        try:
            if source.stat().st_size > self._max_bytes:
                return
            copy = self._directory / f"{_COPY}{os.getpid()}-{path.name}"
            with contextlib.suppress(FileNotFoundError):
                copy.unlink()
            _link(source, copy)
            copy.replace(path)
            self._evict(but=path.name)
        except OSError as error:
            _LOG.warning("payload %s is not shared: %s", digest[:12], error)

    def discard(self, digest: Digest) -> None:
        """Throw a payload away."""
        with contextlib.suppress(OSError):
            (self._directory / file_name(digest)).unlink()

    @contextlib.asynccontextmanager
    async def turn(self, digest: Digest, *, clock: Clock, waiting: Callable[[], None]) -> AsyncIterator[Turn]:
        """A block in which nobody else of these processes fetches a payload, but for one who waited in vain.

        Args:
            digest: of the payload.
            clock: the source of time.
            waiting: called while another one fetches and bytes arrive there.
        """
        path = self._directory / f"{file_name(digest)}{_TURN}"
        try:
            file = path.open("ab")
        except OSError as error:
            _LOG.warning("payload %s is fetched without waiting for others: %s", digest[:12], error)
            yield Turn(None, clock)
            return
        with file:
            seen, since = 0, clock.monotonic()
            while not (is_ours := try_lock(file)) and clock.monotonic() - since < STALL_S:
                if (now := os.fstat(file.fileno()).st_mtime_ns) != seen:
                    seen, since = now, clock.monotonic()
                    waiting()
                await clock.sleep(ASK_EVERY_S)
            try:
                yield Turn(file if is_ours else None, clock)
            finally:
                if is_ours:
                    # Who waits has the file open and gets its lock; who comes later finds the payload.
                    path.unlink(missing_ok=True)

    def _evict(self, *, but: str) -> None:
        sizes: dict[str, tuple[float, int]] = {}
        for entry in os.scandir(self._directory):
            with contextlib.suppress(OSError):
                found = entry.stat(follow_symlinks=False)
                if is_digest(entry.name):
                    sizes[entry.name] = (found.st_mtime, found.st_size)
                elif entry.name.startswith(_COPY) and time.time() - found.st_mtime > _OLD_COPY_S:
                    (self._directory / entry.name).unlink()
        total = sum(size for _, size in sizes.values())
        for name in sorted(sizes, key=lambda name: sizes[name]):
            if total <= self._max_bytes:
                return
            if name != but:
                total -= sizes[name][1]
                self.discard(Digest(name))


class Turn:
    """The right to fetch a payload; `beat` says that bytes arrive."""

    def __init__(self, file: Any, clock: Clock) -> None:
        self._file = file
        self._clock = clock
        self._at = float("-inf")

    def beat(self) -> None:
        """Touch the file, once a second at most."""
        now = self._clock.monotonic()
        if self._file is not None and now - self._at >= 1.0:
            self._at = now
            with contextlib.suppress(OSError):
                os.utime(self._file.fileno())


class SharedFetcher(Fetcher):
    """Fetches only what no other process of the directory has fetched."""

    def __init__(
        self, *, shared: SharedPayloads, clock: Clock, on_frame: Callable[[], None] = lambda: None, **options: Any
    ) -> None:
        super().__init__(clock=clock, on_frame=self._arrived, **options)
        self._shared = shared
        self._told = on_frame
        self._turn = Turn(None, clock)

    def _arrived(self) -> None:
        self._turn.beat()
        self._told()

    async def _fetch(self, payload: PayloadRef) -> Path:
        path = self._path(payload)
        async with self._shared.turn(payload.digest, clock=self._clock, waiting=self._told) as self._turn:
            if await asyncio.to_thread(self._taken, payload, path):
                return path
            path = await super()._fetch(payload)
            await asyncio.to_thread(self._shared.give, payload.digest, path)
            return path

    def _taken(self, payload: PayloadRef, path: Path) -> bool:
        """Whether the payload is there now, from the others, with the bytes that its name says."""
        shared = path.with_name(f"{path.name}.shared")
        if not self._shared.take(payload, shared):
            return False
        digest = RunningDigest()
        digest.catch_up(shared)
        if digest.digest() != payload.digest:
            _LOG.error("payload %s in share_dir has other bytes than its name says; it is fetched", payload.digest[:12])
            shared.unlink(missing_ok=True)
            self._shared.discard(payload.digest)
            return False
        for piece in self._parts(payload).values():
            piece.unlink(missing_ok=True)
        shared.replace(path)
        return True


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:
        # Another file system, or one without links.
        try:
            shutil.copyfile(source, target, follow_symlinks=False)
        except BaseException:
            target.unlink(missing_ok=True)
            raise
