"""What SQLite checks of a store when it is opened, so that a start takes no longer with every group of the past."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from heterorl.common.errors import CorruptStore

CHECKED_BYTES = 64 << 20
"""A store up to this size is checked as a whole at every start, which takes a fraction of a second."""
HISTORY = frozenset({"groups", "versions", "flavour_versions", "steps", "signatures", "canaries", "audit"})
"""Tables that grow with the run."""


def check_file(connection: sqlite3.Connection, path: Path) -> None:
    """Let SQLite check the store: all of a small one; of a large one what is read and written all the time.

    Raises:
        CorruptStore: it fails the check.
    """
    pages, size = (int(connection.execute(f"PRAGMA {name}").fetchone()[0]) for name in ("page_count", "page_size"))
    names = ["1"]
    if pages * size > CHECKED_BYTES:
        # A start must not take longer with every group that was ever trained on; `heterorl verify` checks all.
        rows = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
        names = [f"'{name}'" for (name,) in rows if name not in HISTORY and not name.startswith("sqlite_")]
    for name in names:
        if connection.execute(f"PRAGMA quick_check({name})").fetchone()[0] != "ok":
            raise CorruptStore(f"{path} fails SQLite's check")
