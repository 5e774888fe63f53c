"""Backups of a running coordinator: one store snapshot and its payloads.

    backups/.<run_id>.partial    in progress; the run's next backup removes it
    backups/<name>               complete and durable: a data_dir from which a coordinator starts, payloads as files

The store's thread copies SQLite between two transactions. PostgreSQL is read from one snapshot in a session of its own,
into a SQLite file with the same tables. Its payloads stay until they are linked, or copied to another disk. A link
shares its bytes with the payload: copy the directory elsewhere against the loss of the disk. Uploads in progress and
merged deltas are not included; a bucket's prefix stays with its run.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
import shutil
import sqlite3
from dataclasses import dataclass
from pathlib import Path

from heterorl.common.errors import Busy, HeterorlError, InvalidRequest, OperatorError, StoreFull, StoreLost
from heterorl.common.process.files import BAD_ROW, NO_ROOM, link_or_copy, make_directory, sync_directory, sync_file
from heterorl.common.rpc.maintenance import Backup
from heterorl.common.types.common import Digest
from heterorl.common.types.policy import stated_version, version_words
from heterorl.coordinator.offline.history import BACKUPS, STORE_FILE
from heterorl.coordinator.payloads.garbage_collector import GarbageCollector, Stores
from heterorl.coordinator.store.database import Connection
from heterorl.coordinator.store.engine_choice import OWNER
from heterorl.coordinator.versions import lineage

_LOG = logging.getLogger(__name__)
NOTE = "backup.json"
"""File that describes the copy; a restore does not need it."""
_NOTED = [name for name in Backup.__slots__ if name != "existed_since"]
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_PARTIAL = ".partial"
_BUSY_S = 5.0
_TRIES = 20


@dataclass(kw_only=True, eq=False, repr=False)
class Backups(Stores):
    """Makes backups, one at a time. Belongs to the event loop."""

    collector: GarbageCollector

    def __post_init__(self) -> None:
        self._directory = self.config.backup_dir or self.config.data_dir / BACKUPS
        self._making: tuple[str, asyncio.Task[Backup]] | None = None

    async def make(self, name: str) -> Backup:
        """Back up the run under this name, or return its backup.
        Raises InvalidRequest: not a name; Busy: another backup runs, or the disk refuses; StoreFull: no room."""
        if not _NAME.fullmatch(name) or name.endswith(_PARTIAL):
            raise InvalidRequest("name: not 1 to 64 letters, digits, dots, dashes and underscores")
        if self._making is None:
            task = asyncio.create_task(self._make(name))
            self._making = (name, task)
            task.add_done_callback(self._made)
        if self._making[0] != name:
            raise Busy(f"backup {self._making[0]} is in progress", retry_after_s=_BUSY_S)
        # It continues if the caller is cancelled; a repeated request waits for it or finds it.
        return await asyncio.shield(self._making[1])

    def _made(self, task: asyncio.Task[Backup]) -> None:
        self._making = None
        if not task.cancelled() and task.exception() is not None:
            _LOG.warning("the backup failed, order it again: %s", task.exception())

    async def _make(self, name: str) -> Backup:
        try:
            known = await asyncio.to_thread(_read_note, self._directory / name, self.config.run_id)
            return known or await self._write(name)
        except OSError as error:
            if error.errno in NO_ROOM:
                raise StoreFull("there is no room for the backup", retry_after_s=_BUSY_S) from error
            problem = f"the backup cannot be written: {error}"
            raise Busy(problem, action="check that file's disk and rights", retry_after_s=_BUSY_S) from error

    async def _write(self, name: str) -> Backup:
        # Its own name: several runs may have one backup_dir.
        partial = self._directory / f".{self.config.run_id}{_PARTIAL}"
        await asyncio.to_thread(_begin, self._directory, partial)
        try:
            copy = partial / STORE_FILE
            with contextlib.ExitStack() as kept:
                async with self.collector.undisturbed:
                    if self.config.store.url:
                        digests, head, audit_digest = await asyncio.to_thread(_read_out, self.config.store.url, copy)
                    else:
                        digests, head, audit_digest = await self.database.run_alone(lambda c: _copy(c, copy))
                    for digest in digests:
                        kept.enter_context(self.collector.leases.reading(digest))
                num_bytes = await asyncio.to_thread(_take_store, copy)
                for digest in digests:
                    # One after another: the cache may not have room for all.
                    num_bytes += await self._bring(digest, partial)
            backup = Backup(
                path=str((self._directory / name).resolve()),
                head_version=stated_version(head),
                num_payloads=len(digests),
                num_bytes=num_bytes,
                audit_digest=audit_digest,
            )
            await asyncio.to_thread(_finish, partial, self._directory / name, backup, self.config.run_id)
        except BaseException:
            await asyncio.to_thread(shutil.rmtree, partial, ignore_errors=True)
            raise
        _LOG.info("backup %s holds %s; payloads: %d", backup.path, version_words(backup.head_version), len(digests))
        return backup

    async def _bring(self, digest: Digest, target: Path) -> int:
        """Fetch a payload if needed and link it; transient failures are retried."""
        for left in reversed(range(_TRIES)):
            try:
                async with self.cache.at_hand([digest]):
                    return await asyncio.to_thread(self._take, digest, target)
            except Busy as error:
                if not left:
                    raise
                await self.clock.sleep(error.retry_after_s)
            except FileNotFoundError as error:
                # Only this one: the cache may have evicted copies of others. The next backup is without it.
                await self.damage.put_aside_missing([(digest, self.blobs.path(digest))])
                raise Busy(f"payload {digest[:12]} is missing", retry_after_s=_BUSY_S) from error
        raise AssertionError("the last try returns or raises")

    def _take(self, digest: Digest, target: Path) -> int:
        place = target / "blobs" / digest[:2] / digest
        make_directory(place.parent)
        link_or_copy(self.blobs.path(digest), place)
        return place.stat().st_size


Named = tuple[list[Digest], int | None, str]
"""A copy's payloads, head, and digest of its newest audit row."""


def _copy(connection: Connection, path: Path) -> Named:
    """Copy the SQLite store, as a store operation outside transactions."""
    named = _named(connection)
    try:
        connection.execute("VACUUM INTO ?", (str(path),))
    except sqlite3.Error as error:
        raise _of_copy(error) from error
    return named


def _read_out(url: str, path: Path) -> Named:
    import psycopg

    from heterorl.coordinator.store.postgres.postgres_engine import connect
    from heterorl.coordinator.store.postgres.postgres_tables import read_into

    try:
        with connect(url) as raw:
            read_into(raw, path)
        with contextlib.closing(sqlite3.connect(path)) as copy:
            return _named(copy)
    except sqlite3.Error as error:
        raise _of_copy(error) from error
    except (psycopg.Error, OperatorError, StoreLost) as error:
        raise Busy(f"the store could not be read: {error}", retry_after_s=_BUSY_S) from error


def _named(connection: Connection) -> Named:
    digests = [Digest(row[0]) for row in connection.execute("SELECT DISTINCT digest FROM payloads")]
    last = connection.execute("SELECT digest FROM audit ORDER BY sequence DESC LIMIT 1").fetchone()
    return digests, lineage.head_version(connection), str(last[0]) if last else ""


def _of_copy(error: sqlite3.Error) -> HeterorlError:
    """The typed error of a failed copy; the store itself is unchanged."""
    if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL:
        return StoreFull("there is no room for the backup", retry_after_s=_BUSY_S)
    return Busy(f"the copy of the store could not be written: {error}", retry_after_s=_BUSY_S)


def _begin(directory: Path, partial: Path) -> None:
    make_directory(directory, mode=0o700)
    shutil.rmtree(partial, ignore_errors=True)
    make_directory(partial, mode=0o700)
    make_directory(partial / "blobs")


def _take_store(path: Path) -> int:
    try:
        with contextlib.closing(sqlite3.connect(path)) as copy:
            # A run started from the copy must not delete below the original run's prefix.
            copy.execute("DELETE FROM meta WHERE key = ?", (OWNER,))
            copy.commit()
    except sqlite3.Error as error:
        raise _of_copy(error) from error
    sync_file(path)
    return path.stat().st_size


def _finish(partial: Path, target: Path, backup: Backup, run_id: str) -> None:
    for folder in (partial / "blobs").glob("*"):
        sync_directory(folder)
    note = {"run_id": run_id, **{name: getattr(backup, name) for name in _NOTED}}
    path = partial / NOTE
    path.write_text(json.dumps(note, indent=2) + "\n", encoding="utf-8")
    path.chmod(0o600)
    (partial / STORE_FILE).chmod(0o600)
    sync_file(path)
    sync_directory(partial)
    partial.replace(target)
    sync_directory(target.parent)


def _read_note(directory: Path, run_id: str) -> Backup | None:
    if not directory.is_dir():
        return None
    try:
        note, made = json.loads((directory / NOTE).read_text(encoding="utf-8")), (directory / NOTE).stat().st_mtime
        found, owner = Backup(**{name: note[name] for name in _NOTED}, existed_since=made), note["run_id"]
    except (OSError, *BAD_ROW) as error:
        raise InvalidRequest(f"name: {directory} exists and is not a backup", action="choose another name") from error
    if owner != run_id:
        raise InvalidRequest(f"name: {directory} is a backup of run {owner}", action="choose another name")
    return found
