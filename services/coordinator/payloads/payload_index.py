"""Store operations on payload rows: verified, offered, retired; and the scratch directory.

Each variant is its own graph over the same versions. A file may go only when no variant names it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from heterorl.common.process.files import make_directory
from heterorl.common.types.common import Digest
from heterorl.common.types.policy import PayloadKind, PayloadRef
from heterorl.common.wire.policy_messages import manifest_from_bytes
from heterorl.coordinator.payloads.retention import Graph, Needs, Retirement, decide_retirement
from heterorl.coordinator.payloads.snapshots import Work
from heterorl.coordinator.store.database import get_meta, set_meta
from heterorl.coordinator.store.database_engine import Connection
from heterorl.coordinator.versions import lineage, rollback_order
from heterorl.coordinator.versions.chain import TRAINED, Chain, Into, payload_of
from heterorl.coordinator.versions.pull_plans import cheapest_way


def empty(directory: Path) -> None:
    """Make a directory and remove an earlier process's files from it.
    A directory in it is a file system's, where this one is a mount of its own."""
    make_directory(directory)
    for path in directory.iterdir():
        if not path.is_dir():
            path.unlink()


def graph(chain: Chain) -> Graph:
    """The published payloads of a chain over the versions that they touch."""
    payloads, head = chain.payloads(), lineage.head_version(chain.connection)
    if head is None:
        return Graph(payloads=payloads, lineage=[], verified=chain.verified())
    # With the head, even if it has no payload any more.
    oldest = min([head, *(payload.to_version for payload in payloads)])
    return Graph(payloads=payloads, lineage=_lineage(chain, oldest, head), verified=chain.verified())


def _lineage(chain: Chain, oldest: int, head: int) -> list[int]:
    """Versions of a chain from `oldest` on that were not abandoned.

    It reads indexes only. Reading rows also reads their manifests: of 300 kB each, 1000 versions took a second.
    """
    connection = chain.connection
    # The plus makes SQLite use the index of abandoned versions instead of the table.
    rows = connection.execute("SELECT version FROM versions WHERE is_abandoned = 1 AND +version >= ?", (oldest,))
    abandoned = {int(row[0]) for row in rows}
    if chain.variant:
        rows = connection.execute(
            "SELECT version FROM variant_versions WHERE variant = ? AND version >= ? ORDER BY version",
            (chain.variant, oldest),
        )
        return [int(row[0]) for row in rows if int(row[0]) not in abandoned]
    # Versions are dense.
    return [version for version in range(max(oldest, 0), head + 1) if version not in abandoned]


def work(chain: Chain, way: Sequence[PayloadRef]) -> Work:
    """A path with its manifests."""
    stated = (manifest_from_bytes(chain.manifest(payload.to_version)) for payload in way)
    return Work(payloads=tuple(way), manifests=tuple(stated))


def unverified_snapshot(chain: Chain) -> Work | None:
    """The newest snapshot of the lineage, if it is not verified."""
    row = chain.connection.execute(
        "SELECT p.kind, p.from_version, p.to_version, p.digest, p.num_bytes, f.version FROM payloads p"
        " JOIN versions v ON v.version = p.to_version"
        " LEFT JOIN verified f ON f.version = p.to_version AND f.variant = p.variant"
        " WHERE p.variant = ? AND p.kind = ? AND v.is_abandoned = 0 ORDER BY p.to_version DESC LIMIT 1",
        (chain.variant, PayloadKind.SNAPSHOT.value),
    ).fetchone()
    if row is None or row[5] is not None:
        return None
    return work(chain, (payload_of(row[:5]),))


def add_snapshot(chain: Chain, payload: PayloadRef) -> bool:
    """Offer a snapshot; False if its version is abandoned or has one."""
    has_one = any(each.kind is payload.kind for each in chain.into(payload.to_version))
    if has_one or not chain.is_in_lineage(payload.to_version):
        return False
    chain.offer([payload])
    chain.note_verified(payload)
    return True


def way_of_joiner(chain: Chain, merged_into: Into) -> tuple[PayloadRef, ...]:
    """Cheapest path from a verified snapshot to the head; empty without one."""
    verified = chain.verified()

    def into(version: int) -> list[PayloadRef]:
        payloads = [*chain.into(version), *merged_into(version)]
        return [p for p in payloads if p.kind is not PayloadKind.SNAPSHOT or version in verified]

    head = lineage.head_version(chain.connection)
    return () if head is None else cheapest_way(into, have_version=None, want_version=head)


def decide(chain: Chain, needs: Needs) -> Retirement:
    """Choose unneeded payloads; an open rollback order needs its own.
    All of an ended variant go once no sampler may ask for it."""
    found = graph(chain)
    needs = dataclasses.replace(needs, leased=frozenset(needs.leased) | rollback_order.needed(chain.connection))
    oldest = lineage.num_versions(chain.connection) - 1 - needs.window
    if chain.variant != TRAINED and (not found.lineage or found.lineage[-1] < oldest):
        gone = tuple(payload for payload in found.payloads if payload.digest not in needs.leased)
        return Retirement(payloads=gone, way=())
    return decide_retirement(found, needs)


def carry_out(chain: Chain, needs: Needs, *, proved: tuple[PayloadRef, ...]) -> None:
    """Decide again and retire payloads if the proved path still remains."""
    retirement = decide(chain, needs)
    if retirement.way[: len(proved)] == proved and bool(retirement.way) == bool(proved):
        retire(chain, retirement.payloads)


def strike_out(connection: Connection, digest: Digest) -> None:
    """Stop offering a payload."""
    connection.execute("DELETE FROM verified WHERE digest = ?", (digest,))
    connection.execute("DELETE FROM payloads WHERE digest = ?", (digest,))


def retire(chain: Chain, payloads: Iterable[PayloadRef]) -> None:
    """Stop offering payloads, and record their files for deletion."""
    connection, variant = chain.connection, chain.variant
    for payload in payloads:
        connection.execute(
            "DELETE FROM payloads WHERE variant = ? AND to_version = ? AND kind = ? AND from_version = ?",
            (variant, payload.to_version, payload.kind.value, payload.from_version),
        )
        if payload.kind is PayloadKind.SNAPSHOT:
            connection.execute("DELETE FROM verified WHERE variant = ? AND version = ?", (variant, payload.to_version))
        retire_digests(connection, [payload.digest])


def retire_digests(connection: Connection, digests: Iterable[Digest]) -> None:
    """Record files for deletion, unless a version names them."""
    for digest in digests:
        if not is_named(connection, digest):
            connection.execute("INSERT INTO retired VALUES (?) ON CONFLICT DO NOTHING", (digest,))


def retired(connection: Connection) -> list[Digest]:
    """Files to delete.
    Takes files that a version names again off the record."""
    connection.execute("DELETE FROM retired WHERE digest IN (SELECT digest FROM payloads)")
    return [Digest(row[0]) for row in connection.execute("SELECT digest FROM retired ORDER BY digest")]


def forget_retired(connection: Connection, freed: Mapping[Digest, int]) -> None:
    """Note that files were deleted, with their bytes."""
    connection.executemany("DELETE FROM retired WHERE digest = ?", [(digest,) for digest in freed])
    set_meta(connection, "reclaimed_bytes", str(reclaimed_bytes(connection) + sum(freed.values())))


def reclaimed_bytes(connection: Connection) -> int:
    """Bytes of payloads deleted since the run began."""
    return int(get_meta(connection, "reclaimed_bytes") or 0)


def is_named(connection: Connection, digest: Digest) -> bool:
    """Whether a version offers a payload."""
    return connection.execute("SELECT 1 FROM payloads WHERE digest = ? LIMIT 1", (digest,)).fetchone() is not None


def named(connection: Connection) -> tuple[frozenset[Digest], int]:
    """Payloads offered or recorded for deletion, and the number of versions."""
    rows = connection.execute("SELECT digest FROM payloads UNION SELECT digest FROM retired")
    return frozenset(Digest(row[0]) for row in rows), lineage.num_versions(connection)


def newest_snapshot(connection: Connection) -> tuple[int, float] | None:
    """Version and publication time of the newest verified snapshot, or None."""
    row = connection.execute(
        "SELECT version, published FROM verified JOIN versions USING (version) WHERE is_abandoned = 0"
        " AND variant = '' ORDER BY version DESC LIMIT 1"
    ).fetchone()
    return None if row is None else (int(row[0]), float(row[1]))
