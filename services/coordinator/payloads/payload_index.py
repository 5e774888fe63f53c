"""Payload rows: verified, offered, retired; snapshots; and the scratch directory.

Each variant is its own graph over the same versions. A file may go only when no variant names it.

A snapshot is composed and proved chunk by chunk, so memory does not grow with the model. The proof rebuilds each
state and compares the chunk digests with the version's manifest, which also locates a damaged payload.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from heterorl.common.errors import CorruptData, StateMismatch
from heterorl.common.process.files import make_directory
from heterorl.common.types.common import Digest
from heterorl.common.types.policy import NO_VERSION, Manifest, PayloadKind, PayloadRef
from heterorl.common.weights.arena import Chunk, digest_integers, state_root, zeros
from heterorl.common.weights.codec import apply_chunk
from heterorl.common.weights.compose import compose
from heterorl.common.weights.manifest import chunks_of
from heterorl.common.weights.payload import NO_ROOT, PayloadChunks, read_roots
from heterorl.common.wire.policy_messages import manifest_from_bytes
from heterorl.coordinator.payloads.retention import Graph, Needs, Retirement, decide_retirement
from heterorl.coordinator.store.database import Connection, get_meta, set_meta
from heterorl.coordinator.versions import lineage, rollback_order
from heterorl.coordinator.versions.chain import TRAINED, Chain, Into, payload_of
from heterorl.coordinator.versions.pull_plans import cheapest_way


class DamagedPayload(CorruptData):
    """A payload does not lead to the state in its version's manifest."""

    def __init__(self, index: int, problem: str) -> None:
        super().__init__(problem)
        self.index = index


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A path from a snapshot; `payloads[i]` leads to the version of `manifests[i]`."""

    payloads: tuple[PayloadRef, ...]
    manifests: tuple[Manifest, ...]


def decide_snapshot(way: Sequence[PayloadRef], *, snapshot_ratio: float, window: int) -> tuple[bool, str]:
    """Whether a snapshot of the head is due, and why.

    `way` is the path of a new sampler: a snapshot, then deltas. A snapshot is due when the deltas cost more than
    `snapshot_ratio` of the bytes of `way[0]`. Beyond `window` versions it is due in any case, since the deltas could
    not be deleted.
    """
    if not way or way[0].kind is not PayloadKind.SNAPSHOT:
        return False, "there is no snapshot to start from"
    deltas = way[1:]
    if not deltas:
        return False, "the head has a snapshot"
    cost = sum(payload.num_bytes for payload in deltas)
    limit = snapshot_ratio * way[0].num_bytes
    versions = deltas[-1].to_version - way[0].to_version
    if cost > limit:
        return True, f"{len(deltas)} deltas cost {cost} bytes, the snapshot {way[0].num_bytes}"
    if versions > window:
        return True, f"the newest snapshot is {versions} versions old, {window} are kept"
    return False, f"{len(deltas)} deltas cost {cost} bytes, {limit:.0f} are the bound"


def verify_way(paths: Sequence[Path], manifests: Sequence[Manifest], *, on_chunk: Callable[[], None]) -> None:
    """Rebuild a path's states from its snapshot; compare them with the manifests.

    The first and last are compared; if the last is wrong, all, to find the payload. Files are open only while they are
    read. `on_chunk` may stop it by raising.
    Raises DamagedPayload: the first payload that is damaged or leads to another state; FileNotFoundError: one is gone.
    """
    chunks = chunks_of(manifests[-1])
    payloads: list[PayloadChunks] = []
    before = NO_ROOT
    for index, (path, manifest) in enumerate(zip(paths, manifests, strict=True)):
        try:
            roots = read_roots(path)
            payload = PayloadChunks(path, layout_id=manifest.layout_id, chunks=chunks, expected_from_root=roots[0])
            if roots != (before, manifest.state_root):
                raise StateMismatch(f"it leads from {roots[0][:12]} to {roots[1][:12]}")
            if state_root(manifest.layout_id, manifest.chunk_digests) != manifest.state_root:
                raise StateMismatch(f"the manifest of version {manifest.version} contradicts itself")
        except CorruptData as error:
            raise DamagedPayload(index, str(error)) from error
        payloads.append(payload)
        before = manifest.state_root
    for number, chunk in enumerate(chunks):
        on_chunk()
        if _rebuild_chunk(payloads, number, chunk, manifests, compares_all=False) is not None:
            wrong = _rebuild_chunk(payloads, number, chunk, manifests, compares_all=True)
            index = len(paths) - 1 if wrong is None else wrong
            raise DamagedPayload(index, f"chunk {number} differs from version {manifests[index].version}")


def _rebuild_chunk(
    payloads: Sequence[PayloadChunks], number: int, chunk: Chunk, manifests: Sequence[Manifest], *, compares_all: bool
) -> int | None:
    """Index of the first compared payload with a wrong chunk, or None."""
    values = zeros(chunk)
    for index, (payload, manifest) in enumerate(zip(payloads, manifests, strict=True)):
        try:
            method, data = payload.read(number)
            apply_chunk(method, memoryview(data), values)
        except CorruptData as error:
            raise DamagedPayload(index, str(error)) from error
        is_compared = compares_all or index in (0, len(payloads) - 1)
        if is_compared and digest_integers(values) != manifest.chunk_digests[number]:
            return index
    return None


def write_snapshot(paths: Sequence[Path], target: Path, work: Work, on_chunk: Callable[[], None]) -> PayloadRef:
    """Compose a path into one durable snapshot, and prove it.
    Raises DamagedPayload: a payload of the path is damaged; OSError: one is gone, or the disk is full."""
    last = work.manifests[-1]
    try:
        composed = compose(paths, target, layout_id=last.layout_id, chunks=chunks_of(last), on_chunk=on_chunk)
        verify_way([target], [last], on_chunk=on_chunk)
    except CorruptData as error:
        target.unlink(missing_ok=True)
        # The composition is wrong: find the wrong payload.
        verify_way(paths, work.manifests, on_chunk=on_chunk)
        raise OSError(f"the snapshot of version {last.version} is wrong although its parts are right") from error
    return PayloadRef(
        kind=PayloadKind.SNAPSHOT,
        from_version=NO_VERSION,
        to_version=last.version,
        digest=composed.digest,
        num_bytes=composed.num_bytes,
    )


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
    """Stop offering a payload, and record its file for deletion."""
    connection.execute("DELETE FROM verified WHERE digest = ?", (digest,))
    connection.execute("DELETE FROM payloads WHERE digest = ?", (digest,))
    retire_digests(connection, [digest])


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
