"""`heterorl audit`: the log of a data directory that no coordinator runs on, checked and shown."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from pathlib import Path

from heterorl.coordinator.offline.history import open_store
from heterorl.coordinator.sites import audit
from heterorl.coordinator.sites.audit import AuditRow

SOUND, FAULTY = 0, 2
Say = Callable[[str], None]


def read_log(directory: Path) -> list[AuditRow]:
    """All rows of a data directory's log.

    Raises:
        OperatorError: there is no store, or a coordinator is running on it.
        CorruptStore: SQLite cannot read it.
    """
    with open_store(directory) as connection:
        return audit.read(connection)


def verify_log(directory: Path, *, expected: str, say: Say) -> int:
    """Check every link and print the verdict; returns the exit code, 0 when all holds and 2 otherwise."""
    rows = read_log(directory)
    faults = audit.find_faults(rows, expected=expected)
    for fault in faults:
        say(f"fault: {fault}")
    newest = rows[-1].digest if rows else "none"
    say(f"{'FAULTY' if faults else 'SOUND'}: {len(rows)} rows, {len(faults)} faults, newest digest {newest}")
    return FAULTY if faults else SOUND


def show_log(directory: Path, *, subject: str, say: Say) -> None:
    """Print the rows, oldest first."""
    for row in read_log(directory):
        if subject in ("", row.subject):
            at = datetime.datetime.fromtimestamp(row.at_us / 1e6, tz=datetime.UTC).isoformat(timespec="seconds")
            say(f"{row.sequence} {at} {row.kind} {row.subject}: {row.detail}")
