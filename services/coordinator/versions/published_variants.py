"""Variants: quantised forms published with each version. Store operations.

A variant's version is committed in the transaction of its version. Its manifest follows the same variant's at the
parent version, or begins the variant with a snapshot.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

from heterorl.common.errors import ContractMismatch, InvalidRequest
from heterorl.common.types.policy import Manifest, PayloadKind, PublishRequest, stated_version, version_or_none
from heterorl.common.types.run import VariantStatus
from heterorl.common.wire.policy_messages import manifest_digest, manifest_from_bytes
from heterorl.coordinator.store.database import Connection, get_meta, set_meta
from heterorl.coordinator.versions import lineage
from heterorl.coordinator.versions.chain import TRAINED, Chain

MAX_VARIANTS = 8
_NAME = re.compile(r"[a-z0-9_]{1,32}")
_OFFERED = "variants"


def check_names(names: Sequence[str]) -> None:
    """Check names of variants.
    Raises InvalidRequest: one is malformed or repeated, or there are too many."""
    if len(names) > MAX_VARIANTS or len(set(names)) != len(names):
        raise InvalidRequest(f"variants: {len(names)} names, at most {MAX_VARIANTS} different ones are allowed")
    for name in names:
        if not _NAME.fullmatch(name):
            raise InvalidRequest(f"variants: {name!r} is not 1 to 32 of a-z, 0-9 and _")


def offer(connection: Connection, names: Sequence[str]) -> None:
    """Record the variants that the learner publishes from now on."""
    set_meta(connection, _OFFERED, json.dumps(sorted(names)))


def offered(connection: Connection) -> tuple[str, ...]:
    """The variants that the learner publishes."""
    return tuple(json.loads(get_meta(connection, _OFFERED) or "[]"))


def check_offered(connection: Connection, variant: str) -> None:
    """Refuse a sampler whose variant is not published.
    Raises ContractMismatch: names the published ones."""
    names = offered(connection)
    if variant != TRAINED and variant not in names:
        there = ", ".join(f'"{name}"' for name in (TRAINED, *names))
        action = "set the sampler's variant to one of these, or add it to the learner's variants"
        raise ContractMismatch(f'variant: this node wants "{variant}", the learner publishes {there}', action=action)


def stored(connection: Connection) -> tuple[str, ...]:
    """All variants that ever had a version, the trained weights first."""
    # From name to name by the index: DISTINCT would read each version.
    rows = connection.execute(
        "WITH RECURSIVE name (variant) AS (SELECT min(variant) FROM variant_versions UNION ALL"
        " SELECT (SELECT min(variant) FROM variant_versions WHERE variant > name.variant) FROM name"
        " WHERE name.variant IS NOT NULL) SELECT variant FROM name WHERE variant IS NOT NULL"
    )
    return (TRAINED, *(str(row[0]) for row in rows))


def check_publication(
    connection: Connection, request: PublishRequest, manifest: Manifest, parsed: Mapping[str, Manifest]
) -> None:
    """Check each variant's manifest against the version's, already checked.
    Raises InvalidRequest: the field."""
    check_names([entry.variant for entry in request.variants])
    for entry in request.variants:
        mine, chain = parsed[entry.variant], Chain(connection, entry.variant)
        lineage.check_signature(entry.signature)
        parent = version_or_none(request.lineage_version)
        if parent is not None and not chain.is_in_lineage(parent):
            parent = None
        layout_id = mine.layout_id
        if parent is not None:
            before = chain.manifest(parent)
            layout_id = manifest_from_bytes(before).layout_id
        lineage.check_manifest(
            mine,
            {
                "run_id": manifest.run_id,
                "epoch": manifest.epoch,
                "version": manifest.version,
                "step": manifest.step,
                "parent_version": stated_version(parent),
                "parent_digest": "" if parent is None else manifest_digest(before),
                "layout_id": layout_id,
            },
            needs_snapshot=parent is None or request.lineage_version != request.parent_version,
            name=f"variants[{entry.variant}].manifest",
        )


def write_versions(connection: Connection, request: PublishRequest, parsed: Mapping[str, Manifest]) -> None:
    """Write each variant of a version."""
    for entry in request.variants:
        manifest, chain = parsed[entry.variant], Chain(connection, entry.variant)
        connection.execute(
            "INSERT INTO variant_versions VALUES (?, ?, ?, ?, ?, ?, ?)",
            (
                entry.variant,
                manifest.version,
                entry.manifest,
                manifest_digest(entry.manifest),
                manifest.state_root,
                manifest.full_bytes,
                manifest.num_changed / manifest.num_elements if manifest.num_elements else 0.0,
            ),
        )
        chain.write_signature(manifest.version, entry.signature)
        chain.offer(manifest.payloads)


def statuses(connection: Connection) -> tuple[VariantStatus, ...]:
    """The newest version of each variant that the learner publishes."""
    found = []
    for variant in offered(connection):
        row = connection.execute(
            "SELECT version, bytes_full, changed_fraction FROM variant_versions WHERE variant = ?"
            " ORDER BY version DESC LIMIT 1",
            (variant,),
        ).fetchone()
        if row is None:
            continue
        sizes = {payload.kind: payload.num_bytes for payload in Chain(connection, variant).into(row[0])}
        found.append(
            VariantStatus(
                variant=variant,
                version=row[0],
                full_bytes=row[1],
                delta_bytes=sizes.get(PayloadKind.DELTA, 0),
                snapshot_bytes=sizes.get(PayloadKind.SNAPSHOT, 0),
                changed_fraction=row[2],
            )
        )
    return tuple(found)
