"""Restores a run from a backup into a new data directory.

    DATA_DIR/.restoring    in progress; the next attempt removes it
    DATA_DIR               complete and durable once the store is there, which comes last

Everything acknowledged after the backup is lost. So the audit log gets a row, and the epoch jumps beyond every earlier
lease. Payloads are files, without a bucket's prefix. Sites that saw newer versions refuse the run until a person there
runs `heterorl accept-rewind`.
"""

from __future__ import annotations

import contextlib
import errno
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from heterorl.common.errors import ConfigError, DiskFull, OperatorError
from heterorl.common.process.files import NO_ROOM, make_directory, replacing, sync_directory, sync_file
from heterorl.common.types.common import Digest
from heterorl.common.types.policy import NO_VERSION, stated_version
from heterorl.common.weights.payload import file_digest
from heterorl.coordinator.offline.history import STORE_FILE, open_store, require_files
from heterorl.coordinator.sites import audit
from heterorl.coordinator.sites.audit import AuditKind
from heterorl.coordinator.store.database import get_meta, set_meta
from heterorl.coordinator.store.disk_space import operators_error
from heterorl.coordinator.store.engine_choice import OWNER, require_psycopg
from heterorl.coordinator.store.sqlite import connect as connect_file
from heterorl.coordinator.versions import lineage

if TYPE_CHECKING:
    import psycopg

EPOCHS_BEYOND = 1 << 20
"""More than the leases granted between a backup and its restoration."""
_PARTIAL = ".restoring"
Advance = Callable[[int, int], None]
"""Receives the payload bytes done, and all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """The restored run.
    `missing` are payloads that the backup names but does not hold whole."""

    run_id: str
    head_version: int
    num_groups: int
    num_payloads: int
    missing: tuple[Digest, ...]
    audit_digest: str


def restore(
    source: Path, *, run_id: str, data_dir: Path, url: str, now: float, advance: Advance = lambda _done, _all: None
) -> Restored:
    """Make the data directory, and the tables if `url` names a database.

    `source` is a backup, or a stopped coordinator's data directory with store and payloads in files; it is not changed.
    `data_dir` must be empty or missing. `now` is in seconds since the epoch.
    Raises ConfigError: another run, or the new place is taken; OperatorError: there is no store, it is in use, the
    payloads are in a bucket, or PostgreSQL refuses; CorruptStore: the store fails its check, or has another schema.
    """
    partial = data_dir / _PARTIAL
    try:
        # Inside it, since a data_dir may be a mount of its own.
        make_directory(data_dir, mode=0o700)
        if {path.name for path in data_dir.iterdir()} - {_PARTIAL, "lost+found"}:
            raise ConfigError("data_dir", f"{data_dir} is not empty", action="choose a new directory")
        shutil.rmtree(partial, ignore_errors=True)
        make_directory(partial, mode=0o700)
        try:
            return _restore(source, partial, run_id=run_id, data_dir=data_dir, url=url, now=now, advance=advance)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        # A copy's error has both names, and may be of the target.
        name = "" if error.errno in NO_ROOM or error.filename2 else str(error.filename or "")
        if name and Path(name).is_relative_to(source):
            action = "run as a user that can read the backup"
            raise OperatorError(f"{name} cannot be read: {error.strerror}", action=action) from error
        raise operators_error(data_dir, error) from error
    except sqlite3.Error as error:
        raise _not_copied(error) from error


def _restore(
    source: Path, partial: Path, *, run_id: str, data_dir: Path, url: str, now: float, advance: Advance
) -> Restored:
    store = partial / STORE_FILE
    with open_store(source) as connection:
        own = get_meta(connection, "run_id")
        if own != run_id:
            action = "name a backup of this run, or set run_id"
            raise ConfigError("run_id", f"{source} is of run {own}, this coordinator serves {run_id}", action=action)
        require_files(connection, source)
        _copy_store(connection, store, data_dir)
    store.chmod(0o600)
    with _target(url) as raw, contextlib.closing(connect_file(store)) as file:
        found = _mark_restored(file, now=now)
        copied, missing = _copy_payloads(file, source / "blobs", partial / "blobs", advance)
        if raw is not None:
            _write(file, raw, partial)
        # Folds its log into the file.
        file.close()
        sync_file(store)
        for name in ("blobs", "postgres" if url else STORE_FILE):
            (partial / name).replace(data_dir / name)
        sync_directory(data_dir)
    return Restored(run_id=run_id, num_payloads=copied, missing=missing, **found)


def _copy_store(connection: sqlite3.Connection, store: Path, data_dir: Path) -> None:
    """Raises sqlite3.Error: the source is damaged; OperatorError: the new place refuses."""
    try:
        with contextlib.closing(sqlite3.connect(store)) as copy:
            connection.backup(copy)
    except sqlite3.Error as error:
        match error.sqlite_errorcode & 0xFF:
            case sqlite3.SQLITE_FULL:
                raise DiskFull(str(data_dir)) from error
            case sqlite3.SQLITE_CORRUPT | sqlite3.SQLITE_NOTADB:
                raise
        raise _not_copied(error) from error


def _not_copied(error: sqlite3.Error) -> OperatorError:
    return OperatorError(
        f"the store could not be copied: {error}", action="check the disks of the backup and of data_dir"
    )


def _mark_restored(file: sqlite3.Connection, *, now: float) -> dict[str, Any]:
    """Note the restoration; returns head, number of groups and audit digest."""
    file.execute("BEGIN IMMEDIATE")
    head = stated_version(lineage.head_version(file))
    if get_meta(file, "epoch") is not None:
        set_meta(file, "epoch", str(int(get_meta(file, "epoch") or 0) + EPOCHS_BEYOND))
        set_meta(file, "lease_released", "1")
        set_meta(file, "lease_request_id", "")
        set_meta(file, "lease_incarnation", "")
    # The bucket's prefix stays with the original run, which may go on.
    file.execute("DELETE FROM meta WHERE key = ?", (OWNER,))
    detail = f"to version {head}" if head != NO_VERSION else "before its first version"
    digest = audit.append(file, AuditKind.RESTORED, subject=get_meta(file, "run_id") or "", detail=detail, now=now)
    (num_groups,) = file.execute("SELECT count(*) FROM groups WHERE state IN ('pending', 'leased')").fetchone()
    file.execute("COMMIT")
    return {"head_version": head, "num_groups": int(num_groups), "audit_digest": digest}


def _copy_payloads(
    file: sqlite3.Connection, source: Path, target: Path, advance: Advance
) -> tuple[int, tuple[Digest, ...]]:
    """Copy whole payloads that the store names.
    A coordinator treats the missing ones as damaged."""
    named = {Digest(row[0]): int(row[1]) for row in file.execute("SELECT digest, num_bytes FROM payloads")}
    done, total, missing = 0, sum(named.values()), []
    make_directory(target)
    for digest, num_bytes in named.items():
        origin, place = (folder / digest[:2] / digest for folder in (source, target))
        make_directory(place.parent)
        if _copy_whole(origin, place, digest):
            sync_file(place)
        else:
            place.unlink(missing_ok=True)
            missing.append(digest)
        done += num_bytes
        advance(done, total)
    for folder in target.glob("*"):
        sync_directory(folder)
    return len(named) - len(missing), tuple(missing)


def _copy_whole(origin: Path, place: Path, digest: Digest) -> bool:
    """Copy a payload; returns whether the copy is right.
    Raises OSError: the new place fails."""
    try:
        shutil.copyfile(origin, place)
        return file_digest(place) == digest
    except FileNotFoundError:
        return False
    except OSError as error:
        # A bad sector of the backup costs its payload only.
        if error.errno != errno.EIO or _is_readable(origin):
            raise
        return False


def _is_readable(path: Path) -> bool:
    try:
        file_digest(path)
    except OSError:
        return False
    return True


@contextlib.contextmanager
def _target(url: str) -> Iterator[psycopg.Connection[Any] | None]:
    """A transaction with new tables, or None; committed on success."""
    if not url:
        yield None
        return
    require_psycopg()
    import psycopg

    from heterorl.coordinator.store.postgres.postgres_engine import brief, connect, lock_soon
    from heterorl.coordinator.store.postgres.postgres_tables import WHOLE, WRITER

    with contextlib.closing(connect(url)) as raw:
        if not lock_soon(raw):
            raise OperatorError("a coordinator has the store at store.url", action="choose an empty database or schema")
        try:
            with raw.transaction():
                if raw.execute("SELECT to_regclass('store')").fetchone() != (None,):
                    raise ConfigError(
                        "store.url", "there is a store already", action="name an empty database or schema"
                    )
                raw.execute((WRITER + WHOLE).encode())
                yield raw
        except psycopg.Error as error:
            raise OperatorError(
                f"PostgreSQL refuses: {brief(error)}", action="check store.url, and that its user may create tables"
            ) from error


def _write(file: sqlite3.Connection, raw: psycopg.Connection[Any], partial: Path) -> None:
    from heterorl.coordinator.store.postgres.postgres_engine import name_store
    from heterorl.coordinator.store.postgres.postgres_tables import write_from

    write_from(file, raw)
    with replacing(partial / "postgres", is_durable=True) as mark:
        mark.write(f"{name_store(raw)}\n".encode("ascii"))
