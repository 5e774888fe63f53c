"""The cache directory: payloads by digest, an index, a byte limit.

    payloads/DIGEST   complete payloads: renamed here after their digest was verified
    incoming/DIGEST   what has arrived of others, from the beginning on

A name in `payloads` appears with all its bytes durable or not at all. Readers find later damage
(common/pull/payload_reader).
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import time
from collections import OrderedDict
from collections.abc import Container
from pathlib import Path

from heterorl.common.errors import ConfigError
from heterorl.common.process.files import make_directory, sync_directory, sync_file, try_lock, usable
from heterorl.common.process.metrics import RELAY_CACHE_BYTES
from heterorl.common.types.common import Digest, file_name, is_digest

_LOG = logging.getLogger(__name__)


class CacheDirectory:
    """One directory of this process.

    Only the event loop uses the index; `move`, which waits for the disk, may run in a thread.
    """

    def __init__(self, directory: Path, *, max_bytes: int) -> None:
        """Take and index the directory; foreign files among the payloads stay.
        Raises ConfigError: it cannot be used, or another process uses it."""
        self._payloads, self.incoming = directory / "payloads", directory / "incoming"
        self.max_bytes = max_bytes
        # Longest unused first.
        self._sizes: OrderedDict[Digest, int] = OrderedDict()
        self._arriving: dict[Digest, int] = {}
        with usable("cache_dir", directory):
            for path in (self._payloads, self.incoming):
                make_directory(path, mode=0o700)
            self._lock = (directory / "lock").open("ab")
            if not try_lock(self._lock):
                self._lock.close()
                raise ConfigError("cache_dir", f"another process uses {directory}", action="give each relay its own")
            self._index()

    def close(self) -> None:
        self._lock.close()

    def _index(self) -> None:
        found = [(path, path.stat()) for path in self._payloads.iterdir() if is_digest(path.name)]
        for path, stat in sorted(found, key=lambda entry: entry[1].st_atime_ns):
            self._sizes[Digest(path.name)] = stat.st_size
        for path in self.incoming.iterdir():
            if not is_digest(path.name) or path.name in self._sizes:
                path.unlink(missing_ok=True)
            else:
                self._arriving[Digest(path.name)] = path.stat().st_size
        self._make_room(0, keep=())

    @property
    def num_bytes(self) -> int:
        """Bytes that are taken, those that were promised to arriving payloads included."""
        return sum(self._sizes.values()) + sum(self._arriving.values())

    def path(self, digest: Digest) -> Path | None:
        """File of a complete payload, marked as used last; None if missing."""
        if digest not in self._sizes:
            return None
        self._sizes.move_to_end(digest)
        path = self._payloads / file_name(digest)
        with contextlib.suppress(OSError):
            # So that the order outlives this process. The time of change stays: a new one would ask for a new proof.
            os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))
        return path

    def expect(self, digest: Digest, num_bytes: int, *, keep: Container[Digest]) -> bool:
        """Reserve room for an arriving payload; False if it cannot fit.
        Evicts the longest unused, but not arriving ones in `keep`, where limit or disk ask for it."""
        missing, over = num_bytes - self._arriving.get(digest, 0), self._over_disk(digest, num_bytes)
        if not self._make_room(missing, keep=keep, but=digest, over=over):
            if over > 0:
                _LOG.warning("payload %s is passed on, the disk of cache_dir lacks %d bytes", digest[:12], over)
            return False
        self._arriving[digest] = num_bytes
        self._show()
        return True

    def _over_disk(self, digest: Digest, num_bytes: int) -> int:
        """Bytes that a payload needs beyond the disk's room."""
        path = self.incoming / file_name(digest)
        try:
            there = path.stat().st_size if path.exists() else 0
            return num_bytes - there - shutil.disk_usage(self.incoming).free
        except OSError:
            # The fetch meets it too, and says it.
            return 0

    def _make_room(self, num_bytes: int, *, keep: Container[Digest], but: Digest | None = None, over: int = 0) -> bool:
        left = [digest for digest in self._arriving if digest not in keep and digest != but]
        kept = sum(size for digest, size in self._arriving.items() if digest not in left)
        if kept + num_bytes > self.max_bytes or over > self.num_bytes - kept:
            return False
        # By what the index says: a file that is still read gives its room back later.
        most = min(self.max_bytes - num_bytes, self.num_bytes - over)
        while self.num_bytes > most:
            if left:
                # A partial fetch that no reader waits for.
                self.discard(left.pop(0))
            else:
                self.remove(next(iter(self._sizes)))
        self._show()
        return True

    def move(self, digest: Digest) -> int:
        """Move an arrived payload's file to the payloads, durably; returns its size.
        `adopt` follows. Raises OSError: the disk refused."""
        source, target = self.incoming / file_name(digest), self._payloads / file_name(digest)
        sync_file(source)
        source.replace(target)
        sync_directory(self._payloads)
        return target.stat().st_size

    def adopt(self, digest: Digest, num_bytes: int) -> None:
        self._arriving.pop(digest, None)
        self._sizes[digest] = num_bytes
        self._show()

    def discard(self, digest: Digest) -> None:
        self._arriving.pop(digest, None)
        _delete(self.incoming / file_name(digest))
        self._show()

    def remove(self, digest: Digest) -> None:
        """Delete a complete payload; open readers finish."""
        self._sizes.pop(digest, None)
        _delete(self._payloads / file_name(digest))
        self._show()

    def _show(self) -> None:
        RELAY_CACHE_BYTES.set(self.num_bytes)


def _delete(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        # A disk that became read-only keeps no new payload either: they are passed on.
        _LOG.warning("cache_dir keeps a payload that the relay dropped, until a restart: %s", error)
