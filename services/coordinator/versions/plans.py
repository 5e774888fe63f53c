"""Plans of pulls, as a store operation: what the caller holds is believed only with its state root."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence

from heterorl.common.errors import UnknownVersion
from heterorl.common.types.policy import PayloadRef, PlanKind, PullPlan
from heterorl.coordinator.versions import lineage, manifests
from heterorl.coordinator.versions.path import plan_pull

MAX_MANIFEST_BYTES = 1 << 20
"""Bytes of the manifests in a plan, beyond which only its target's goes; half of the smallest max_message_bytes."""


def no_merged(_version: int) -> tuple[PayloadRef, ...]:
    """No merged delta leads anywhere."""
    return ()


def plan(
    connection: sqlite3.Connection,
    *,
    have_version: int,
    have_root: str,
    want_version: int,
    merged_into: lineage.MergedInto,
    base_root: str = "",
    object_bytes: int = 0,
    flavour: str = "",
) -> PullPlan:
    """Plan a pull; what the caller claims to hold counts only when its state root is that version's.

    `merged_into` names the merged deltas that lead to a version; `base_root` is the state of the caller's base model.

    Raises:
        UnknownVersion: the wanted version does not exist or was abandoned.
    """
    want = lineage.read_head(connection).version if want_version == lineage.NONE else want_version
    if not lineage.is_in_lineage(connection, want, flavour):
        where = f" in flavour {flavour}" if flavour else ""
        raise UnknownVersion(f"version {want} does not exist{where} in the lineage")
    start, note = have_version, ""
    if have_version != lineage.NONE:
        root = connection.execute(
            "SELECT state_root FROM stated WHERE flavour = ? AND version = ?", (flavour, have_version)
        ).fetchone()
        if root is None or root[0] != have_root:
            start, note = lineage.NONE, f"; version {have_version} of the caller is not the run's"

    def into(version: int) -> list[PayloadRef]:
        return [*lineage.payloads_into(connection, version, flavour), *merged_into(version)]

    kind, payloads, reason = plan_pull(
        into,
        have_version=start,
        want_version=want,
        base_version=_version_of_root(connection, base_root, flavour),
        object_bytes=object_bytes,
    )
    return PullPlan(
        kind=PlanKind(kind),
        target_version=want,
        payloads=payloads,
        manifests=_manifests(connection, [payload.to_version for payload in payloads], flavour),
        reason=reason + note,
        signature=manifests.read_signature(connection, want, flavour) if payloads else b"",
    )


def _manifests(connection: sqlite3.Connection, versions: Sequence[int], flavour: str) -> tuple[bytes, ...]:
    """Those of a whole way where they are small together, else the target's alone: others are listed by who needs them.

    A large model's manifest is hundreds of kilobytes, and a way may have hundreds of payloads.
    """
    # Before the bytes are read: an operation of the store must stay short.
    sizes = [manifests.manifest_bytes(connection, version, flavour) for version in versions]
    stated = versions if sum(sizes) <= MAX_MANIFEST_BYTES else versions[-1:]
    return tuple(manifests.read_manifest(connection, version, flavour) for version in stated)


def _version_of_root(connection: sqlite3.Connection, root: str, flavour: str) -> int:
    """The first version if it has this state: the one that anybody may hold without the run."""
    row = connection.execute(
        "SELECT version FROM stated WHERE flavour = ? AND version = 0 AND state_root = ? AND is_abandoned = 0",
        (flavour, root),
    ).fetchone()
    return lineage.NONE if row is None else int(row[0])
