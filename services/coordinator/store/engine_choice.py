"""Chooses the store's engine, and checks that data_dir has its payloads.

Rows name payload files in data_dir, and files without a row are deleted, so a mix-up would lose both.

    data_dir/coordinator.sqlite    the store in SQLite, where there is one
    data_dir/postgres              the name of the store in PostgreSQL whose payloads are here
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from heterorl.common.errors import ConfigError, DependencyMissing
from heterorl.common.process.files import make_directory, replacing, usable
from heterorl.coordinator.store.database import DatabaseEngine, get_meta
from heterorl.coordinator.store.sqlite import SqliteEngine

if TYPE_CHECKING:
    from heterorl.coordinator.store.postgres.standby import Standby

OWNER = "payloads_owner"
"""Key of meta: the name in the mark of the bucket's prefix."""
_ANOTHER = "choose another data_dir, or the store that this one belongs to"


def open_engine(data_dir: Path, url: str, *, is_elsewhere: bool = False) -> DatabaseEngine:
    """Open the store at a url or in a file; blocks.
    `is_elsewhere`: its payloads are in a bucket. Raises ConfigError: the payloads are another store's; StoreLost:
    PostgreSQL is unreachable; OperatorError: it refuses; StoreHeld: another coordinator has it; CorruptStore, DiskFull:
    it cannot be opened."""
    path, mark = data_dir / "coordinator.sqlite", data_dir / "postgres"
    if not url:
        if _has(mark):
            raise ConfigError("store.url", f"{data_dir} has the payloads of a store in PostgreSQL", action=_ANOTHER)
        return SqliteEngine.open(path)
    require_psycopg()
    from heterorl.coordinator.store.postgres.postgres_engine import open_store

    refuse_file(data_dir)
    return claimed(data_dir, open_store(url), is_elsewhere=is_elsewhere)


def standby_at(data_dir: Path, url: str, *, is_elsewhere: bool = False, is_patient: bool = True) -> Standby:
    """A wait for the store at a url.
    An impatient one waits for the server, not for another coordinator. Raises ConfigError: there is no url, or data_dir
    has its own store."""
    if not url:
        problem = "--standby needs a store that two coordinators reach: one in PostgreSQL"
        raise ConfigError("store.url", problem, action="set store.url to postgresql://..., or start without --standby")
    require_psycopg()
    from heterorl.coordinator.store.postgres.standby import Standby

    refuse_file(data_dir)
    return Standby(
        url, lambda store_id: None if is_elsewhere else _check_mark(data_dir, store_id), is_patient=is_patient
    )


def refuse_file(data_dir: Path) -> None:
    """Raises ConfigError: the data directory has a store in SQLite."""
    if _has(data_dir / "coordinator.sqlite"):
        raise ConfigError("store.url", f"{data_dir} has the payloads of its own coordinator.sqlite", action=_ANOTHER)


def _has(path: Path) -> bool:
    with usable("data_dir", path.parent):
        return path.exists()


def claimed(data_dir: Path, engine: DatabaseEngine, *, is_elsewhere: bool = False) -> DatabaseEngine:
    """Return the engine if data_dir (or a bucket) has its payloads.
    Raises ConfigError: they are another store's."""
    store_id = getattr(engine, "store_id", "")
    try:
        if is_elsewhere and get_meta(engine.connection, OWNER) is not None:
            if _marked(data_dir) not in ("", store_id):
                raise _not_its_own(data_dir)
            make_directory(data_dir, mode=0o700)
        elif engine.connection.execute("SELECT 1 FROM payloads LIMIT 1").fetchone() is not None:
            _check_mark(data_dir, store_id)
        elif _marked(data_dir) not in ("", store_id):
            raise _not_its_own(data_dir)
        else:
            make_directory(data_dir, mode=0o700)
            with replacing(data_dir / "postgres", is_durable=True) as file:
                file.write(f"{store_id}\n".encode("ascii"))
    except BaseException:
        engine.close()
        raise
    return engine


def _check_mark(data_dir: Path, store_id: str) -> None:
    if _marked(data_dir) != store_id:
        raise _not_its_own(data_dir)


def _marked(data_dir: Path) -> str:
    try:
        return (data_dir / "postgres").read_text(encoding="ascii")[:100].strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _not_its_own(data_dir: Path) -> ConfigError:
    action = "coordinators of one store need the same data_dir, on a file system that all of them reach"
    return ConfigError("data_dir", f"{data_dir} does not have the payloads of this store", action=action)


def require_psycopg() -> None:
    """Raises DependencyMissing: psycopg is not installed."""
    try:
        import psycopg  # noqa: F401
    except ImportError:
        raise DependencyMissing("psycopg", "postgres") from None
