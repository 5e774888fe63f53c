"""What a checkpoint says beside the weights: where training stands and which publication belongs to it. Pure.

cursor.json   {"format": 1, "run_id", "step", "step_id", "version", "parent_version", "lineage_version",
               "state_root", "manifest": hex, "consumed": [[site, incarnation, sequence], ...], "reports": [{...}]}
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass

import blake3

from heterorl.common.errors import CorruptStore
from heterorl.common.types.common import Digest, SiteId, StepReport, report_from_row
from heterorl.common.types.rollout import GroupId
from heterorl.learner.publish.encode import Encoded, Position

FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """A position in training, and the publication that makes it a version.

    `step` optimizer steps are in the weights. The publication has `step_id` as its key, makes `version` out of
    `parent_version` (the head at that time; -1 for none) and follows `lineage_version` (the same unless versions are
    abandoned). `manifest` is its bytes, `consumed` and `reports` are those of the steps since the parent.
    """

    run_id: str
    step: int
    step_id: str
    version: int
    parent_version: int
    lineage_version: int
    state_root: Digest
    manifest: bytes
    consumed: tuple[GroupId, ...]
    reports: tuple[StepReport, ...]


def cursor_of(
    encoded: Encoded, position: Position, *, consumed: Sequence[GroupId], reports: Sequence[StepReport]
) -> Cursor:
    """The cursor of a version that is encoded from a position."""
    manifest, parent = encoded.manifest, position.head_version
    return Cursor(
        run_id=manifest.run_id,
        step=manifest.step,
        step_id=step_id(
            run_id=manifest.run_id, parent_version=parent, step=manifest.step, state_root=manifest.state_root
        ),
        version=manifest.version,
        parent_version=parent,
        lineage_version=position.lineage_version,
        state_root=manifest.state_root,
        manifest=encoded.manifest_bytes,
        consumed=tuple(consumed),
        reports=tuple(reports),
    )


def step_id(*, run_id: str, parent_version: int, step: int, state_root: str) -> str:
    """Idempotency key of a publication: the same state at the same place in the lineage has the same key, whoever asks.

    blake3("heterorl step" || run || parent || step || state root), the first 32 hex characters.
    """
    text = json.dumps(["heterorl step", run_id, parent_version, step, state_root])
    return str(blake3.blake3(text.encode()).hexdigest()[:32])


def cursor_to_bytes(cursor: Cursor) -> bytes:
    """Write as JSON."""
    table = {
        "format": FORMAT,
        "run_id": cursor.run_id,
        "step": cursor.step,
        "step_id": cursor.step_id,
        "version": cursor.version,
        "parent_version": cursor.parent_version,
        "lineage_version": cursor.lineage_version,
        "state_root": cursor.state_root,
        "manifest": cursor.manifest.hex(),
        "consumed": [[entry.site, entry.incarnation, entry.sequence] for entry in cursor.consumed],
        "reports": [dataclasses.asdict(report) for report in cursor.reports],
    }
    return json.dumps(table, indent=1).encode()


def cursor_from_bytes(data: bytes) -> Cursor:
    """Read what `cursor_to_bytes` wrote.

    Raises:
        CorruptStore: the bytes are not a cursor of this format.
    """
    try:
        table = json.loads(data)
        if table["format"] != FORMAT:
            raise CorruptStore(f"a cursor of format {table['format']}, known is {FORMAT}")
        return Cursor(
            run_id=str(table["run_id"]),
            step=int(table["step"]),
            step_id=str(table["step_id"]),
            version=int(table["version"]),
            parent_version=int(table["parent_version"]),
            lineage_version=int(table["lineage_version"]),
            state_root=Digest(table["state_root"]),
            manifest=bytes.fromhex(table["manifest"]),
            consumed=tuple(
                GroupId(site=SiteId(site), incarnation=str(incarnation), sequence=int(sequence))
                for site, incarnation, sequence in table["consumed"]
            ),
            reports=tuple(report_from_row(report) for report in table["reports"]),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptStore(f"not a cursor: {error!r}") from error
