"""The audit log: quarantines, releases and orders, chained by digests.

Rows are appended in the transaction of the event. Each has the digest of the row before, so a changed, removed or
inserted row breaks the chain; the newest digest, noted elsewhere, proves that no row was cut off. It never has a
prompt, a token or a key.

A row's digest is blake3 of "heterorl-audit-1\n" and its fields in order: previous digest, sequence, time in
microseconds since the epoch, kind, subject, detail; each as UTF-8 after its length in bytes (8 bytes, little-endian).
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Iterable
from dataclasses import dataclass

import blake3

from heterorl.coordinator.store.database import Connection

_LOG = logging.getLogger(__name__)
_HEADER = b"heterorl-audit-1\n"
MAX_TEXT = 2000
"""Characters of a subject or a detail; they come from other machines."""


class AuditKind(enum.Enum):
    """The kind of a row."""

    CHECK_FAILED = "check_failed"
    QUARANTINE = "quarantine"
    QUARANTINE_ENDED = "quarantine_ended"
    RELEASE = "release"
    REVOCATION = "revocation"
    ROLLBACK_ORDER = "rollback_order"
    LEARNER_LEASE = "learner_lease"
    CONFIGURATION = "configuration"
    RESTORED = "restored"


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditRow:
    """One stored row, not checked."""

    sequence: int
    at_us: int
    kind: str
    subject: str
    detail: str
    previous: str
    digest: str


def row_digest(row: AuditRow) -> str:
    """The digest that a row should have."""
    hasher = blake3.blake3(_HEADER)
    for value in (row.previous, str(row.sequence), str(row.at_us), row.kind, row.subject, row.detail):
        data = value.encode()
        hasher.update(len(data).to_bytes(8, "little"))
        hasher.update(data)
    return hasher.hexdigest()


def append(connection: Connection, kind: AuditKind, *, subject: str, detail: str, now: float) -> str:
    """Add a row in the transaction of its event; returns its digest.
    `now` is in seconds since the epoch."""
    last = connection.execute("SELECT sequence, digest FROM audit ORDER BY sequence DESC LIMIT 1").fetchone()
    sequence, previous = (last[0] + 1, last[1]) if last else (1, "")
    row = AuditRow(
        sequence=sequence,
        at_us=round(now * 1e6),
        kind=kind.value,
        subject=_text(subject),
        detail=_text(detail),
        previous=previous,
        digest="",
    )
    digest = row_digest(row)
    connection.execute(
        "INSERT INTO audit VALUES (?, ?, ?, ?, ?, ?, ?)",
        (row.sequence, row.at_us, row.kind, row.subject, row.detail, row.previous, digest),
    )
    # In the process log too, so that a truncated audit log can be detected.
    _LOG.info("audit %d %s %s: %s [%s]", sequence, kind.value, row.subject, row.detail, digest)
    return digest


def read(connection: Connection) -> list[AuditRow]:
    """All rows in order."""
    names = AuditRow.__slots__
    rows = connection.execute(f"SELECT {', '.join(names)} FROM audit ORDER BY sequence")
    return [AuditRow(**dict(zip(names, row, strict=True))) for row in rows]


def find_faults(rows: Iterable[AuditRow], *, expected: str = "") -> list[str]:
    """Problems of a log. `expected` is a digest noted earlier (empty: none)."""
    faults: list[str] = []
    previous, following, is_found = "", 1, not expected
    for row in rows:
        if row.sequence != following:
            faults.append(f"row {row.sequence} stands where row {following} belongs")
        if row.previous != previous:
            faults.append(f"row {row.sequence} does not name the digest of the row before it")
        if row.digest != row_digest(row):
            faults.append(f"row {row.sequence} was changed: its digest does not match its content")
        is_found = is_found or row.digest == expected
        previous, following = row.digest, row.sequence + 1
    if not is_found:
        faults.append(f"no row has the digest {expected}: rows were cut off, or this is the log of another run")
    return faults


def note_revoked(connection: Connection, serials: Iterable[int], *, now: float) -> None:
    """Add a row for each new serial number."""
    kind = AuditKind.REVOCATION
    for name in sorted(f"{serial:x}" for serial in serials):
        query = "SELECT 1 FROM audit WHERE kind = ? AND subject = ? LIMIT 1"
        if connection.execute(query, (kind.value, name)).fetchone() is None:
            append(connection, kind, subject=name, detail="the certificate is refused from now on", now=now)


def _text(value: str) -> str:
    return "".join(character if character.isprintable() else "?" for character in value[:MAX_TEXT])
