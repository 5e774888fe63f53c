"""The learner's lease and the chain of versions, as store operations.

Guarantees: epochs only grow; a version is committed by one compare-and-set transaction that also consumes its groups,
or not at all; versions are dense; the same step id gives the same answer. Each function runs inside one operation of
heterorl.coordinator.store.database.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from heterorl.common.errors import (
    ContractMismatch,
    InvalidRequest,
    ParentNotHead,
    StaleEpoch,
    StepConflict,
    UnknownVersion,
)
from heterorl.common.types.common import Contract, Digest
from heterorl.common.types.policy import SIGNATURE_BYTES, Manifest, PayloadKind, PayloadRef, PublishRequest
from heterorl.common.wire.common import bytes_digest, contract_from_bytes, contract_to_bytes
from heterorl.common.wire.policy import manifest_digest
from heterorl.coordinator.store.database import get_meta
from heterorl.coordinator.versions import manifests
from heterorl.coordinator.versions.lease import contract_difference

NONE = -1
MergedInto = Callable[[int], Sequence[PayloadRef]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """The newest version; `version` is -1 when there is none."""

    version: int
    manifest_digest: str
    published: float


def check_epoch(connection: sqlite3.Connection, epoch: int) -> None:
    """Fence: only the newest epoch, not released, has effects.

    Raises:
        StaleEpoch: otherwise.
    """
    current = int(get_meta(connection, "epoch") or 0)
    if epoch != current:
        raise StaleEpoch(f"epoch {epoch} was superseded by epoch {current}")
    if get_meta(connection, "lease_released") != "0":
        raise StaleEpoch(f"epoch {epoch} was released")


def agree(connection: sqlite3.Connection, contract: Contract, *, may_state: bool) -> bool:
    """Compare with the run's contract; the first learner states it. Returns False when none is stated yet.

    Raises:
        ContractMismatch: names the first setting that differs.
    """
    row = connection.execute("SELECT value FROM meta WHERE key = 'contract'").fetchone()
    if row is None:
        if may_state:
            connection.execute("INSERT INTO meta VALUES ('contract', ?)", (contract_to_bytes(contract),))
        return may_state
    difference = contract_difference(contract_from_bytes(row[0]), contract)
    if difference:
        raise ContractMismatch(difference)
    return True


def read_contract(connection: sqlite3.Connection) -> Contract | None:
    """The run's contract, once stated."""
    row = connection.execute("SELECT value FROM meta WHERE key = 'contract'").fetchone()
    return None if row is None else contract_from_bytes(row[0])


def read_head(connection: sqlite3.Connection) -> Head:
    """The newest version."""
    row = connection.execute(
        "SELECT version, manifest_digest, published FROM versions ORDER BY version DESC LIMIT 1"
    ).fetchone()
    if row is None:
        return Head(version=NONE, manifest_digest="", published=0.0)
    return Head(version=row[0], manifest_digest=row[1], published=row[2])


def check_publication(
    connection: sqlite3.Connection, request: PublishRequest, manifest: Manifest, run_id: str
) -> int | None:
    """Compare before set; returns the version when this step id is committed already.

    Raises:
        StaleEpoch, StepConflict, ParentNotHead, InvalidRequest, ContractMismatch: see their docstrings.
    """
    check_epoch(connection, request.epoch)
    if not request.step_id:
        raise InvalidRequest("step_id must not be empty")
    check_signature(request.signature)
    row = connection.execute("SELECT version, content FROM versions WHERE step_id = ?", (request.step_id,)).fetchone()
    if row is not None:
        if row[1] != _content(request):
            raise StepConflict(f"step id {request.step_id} is version {row[0]} with other content")
        return int(row[0])
    head = read_head(connection)
    if request.parent_version != head.version:
        raise ParentNotHead(f"parent {request.parent_version} is not the head, version {head.version}")
    contract = read_contract(connection)
    is_rollback = request.lineage_version != request.parent_version
    check_manifest(
        manifest,
        {
            "run_id": run_id,
            "epoch": request.epoch,
            "version": head.version + 1,
            "parent_version": request.lineage_version,
            "parent_digest": _parent_digest(connection, request.lineage_version),
            "layout_id": contract.layout_id if contract else "",
        },
        needs_snapshot=head.version == NONE or is_rollback,
        name="manifest",
    )
    return None


def check_signature(signature: bytes) -> None:
    """Refuse what cannot be a signature; whose it is, is for others to say.

    Raises:
        InvalidRequest: it has another length.
    """
    if len(signature) not in (0, SIGNATURE_BYTES):
        raise InvalidRequest(f"signature: {len(signature)} bytes, expected none or {SIGNATURE_BYTES}")


def check_manifest(manifest: Manifest, expected: Mapping[str, object], *, needs_snapshot: bool, name: str) -> None:
    """Check what a manifest states against what it must, and that its payloads lead to it.

    Args:
        manifest: the one to check; its `parent_version` is among what is expected.
        expected: fields by name.
        needs_snapshot: whether a delta alone would not do.
        name: what the manifest is called in a refusal.

    Raises:
        InvalidRequest: names the field.
    """
    for key, right in expected.items():
        if getattr(manifest, key) != right:
            raise InvalidRequest(f"{name}.{key}: {getattr(manifest, key)!r}, expected {right!r}")
    kinds = [payload.kind for payload in manifest.payloads]
    if needs_snapshot and PayloadKind.SNAPSHOT not in kinds:
        raise InvalidRequest(f"{name}.payloads: this version needs a snapshot")
    if not kinds or len(set(kinds)) != len(kinds):
        raise InvalidRequest(f"{name}.payloads: one of each kind at most, and at least one")
    for payload in manifest.payloads:
        if payload.kind is PayloadKind.MERGED:
            raise InvalidRequest(f"{name}.payloads: merged deltas are the coordinator's to make")
        is_delta = payload.kind is PayloadKind.DELTA
        start = manifest.parent_version if is_delta else NONE
        if (payload.to_version, payload.from_version) != (manifest.version, start) or (is_delta and start == NONE):
            raise InvalidRequest(f"{name}.payloads: {payload.kind.value} does not lead to version {manifest.version}")


def write_version(
    connection: sqlite3.Connection, request: PublishRequest, manifest: Manifest, *, now: float, reports: list[bytes]
) -> None:
    """Set: record the version, its payloads and its steps."""
    sizes = [payload.num_bytes for payload in manifest.payloads]
    connection.execute(
        "INSERT INTO versions VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 0)",
        (
            manifest.version,
            request.step_id,
            _content(request),
            request.epoch,
            request.manifest,
            manifest_digest(request.manifest),
            manifest.state_root,
            now,
            manifest.full_bytes,
            min(sizes, default=0),
            manifest.num_changed / manifest.num_elements if manifest.num_elements else 0.0,
        ),
    )
    manifests.write_signature(connection, manifest.version, request.signature)
    write_payloads(connection, manifest.payloads)
    connection.executemany(
        "INSERT OR REPLACE INTO steps VALUES (?, ?, ?)",
        [(step.step, manifest.version, data) for step, data in zip(request.reports, reports, strict=True)],
    )


def write_payloads(connection: sqlite3.Connection, payloads: Iterable[PayloadRef], flavour: str = "") -> None:
    """Set: offer payloads."""
    connection.executemany(
        "INSERT INTO payloads VALUES (?, ?, ?, ?, ?, ?)",
        [(p.to_version, p.kind.value, p.from_version, p.digest, p.num_bytes, flavour) for p in payloads],
    )


def abandon_versions(connection: sqlite3.Connection, request: PublishRequest) -> list[int]:
    """Mark the versions between the lineage and the parent as abandoned; returns them."""
    rows = connection.execute(
        "UPDATE versions SET is_abandoned = 1"
        " WHERE version > ? AND version <= ? AND is_abandoned = 0 RETURNING version",
        (request.lineage_version, request.parent_version),
    ).fetchall()
    versions = [int(row[0]) for row in rows]
    connection.executemany("DELETE FROM steps WHERE version = ?", [(version,) for version in versions])
    return versions


def version_of_step(connection: sqlite3.Connection, step_id: str) -> int | None:
    """The version that a step id became."""
    row = connection.execute("SELECT version FROM versions WHERE step_id = ?", (step_id,)).fetchone()
    return None if row is None else int(row[0])


def is_in_lineage(connection: sqlite3.Connection, version: int, flavour: str = "") -> bool:
    """Whether a version exists in this flavour and was not abandoned."""
    row = connection.execute(
        "SELECT is_abandoned FROM stated WHERE flavour = ? AND version = ?", (flavour, version)
    ).fetchone()
    return row is not None and not row[0]


def payloads_into(connection: sqlite3.Connection, version: int, flavour: str = "") -> list[PayloadRef]:
    """Published payloads that lead to a version."""
    rows = connection.execute(
        "SELECT kind, from_version, to_version, digest, num_bytes FROM payloads WHERE flavour = ? AND to_version = ?",
        (flavour, version),
    )
    return [
        PayloadRef(kind=PayloadKind(kind), from_version=a, to_version=b, digest=Digest(digest), num_bytes=size)
        for kind, a, b, digest, size in rows
    ]


def _parent_digest(connection: sqlite3.Connection, version: int) -> str:
    if version == NONE:
        return ""
    row = connection.execute(
        "SELECT manifest_digest FROM versions WHERE version = ? AND is_abandoned = 0", (version,)
    ).fetchone()
    if row is None:
        raise UnknownVersion(f"version {version} does not exist in the lineage")
    return str(row[0])


def _content(request: PublishRequest) -> str:
    ids = "".join(f"{g.site}/{g.incarnation}/{g.sequence};" for g in request.consumed)
    # Nothing for no flavours: the content of a version without them is what it always was.
    flavours = "".join(f"{entry.flavour}/{manifest_digest(entry.manifest)};" for entry in request.flavours)
    text = f"{request.parent_version}/{request.lineage_version}/{ids}{flavours}"
    return bytes_digest(text.encode() + request.manifest)
