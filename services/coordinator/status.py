"""What the coordinator shows of a run: step reports and status, as store operations that only read."""

from __future__ import annotations

import dataclasses
import json
import sqlite3

from heterorl.common.types.common import StepReport
from heterorl.common.types.policy import PayloadKind
from heterorl.common.types.run import RunStatus
from heterorl.coordinator.config import CoordinatorConfig
from heterorl.coordinator.groups import ledger
from heterorl.coordinator.payloads import index
from heterorl.coordinator.sites import quarantine
from heterorl.coordinator.sites.quotas import Quotas
from heterorl.coordinator.sites.sites import Sites
from heterorl.coordinator.store.database import get_meta
from heterorl.coordinator.versions import flavours, lineage, manifests, rollback

FACTS = "facts"
"""Where the store keeps what the learner said of the run."""


def encode(report: StepReport) -> bytes:
    """A step report as JSON bytes."""
    return json.dumps(dataclasses.asdict(report)).encode()


def list_steps(connection: sqlite3.Connection, after_step: int, limit: int) -> tuple[StepReport, ...]:
    """Step reports after a cursor, oldest first."""
    rows = connection.execute(
        "SELECT report FROM steps WHERE step > ? ORDER BY step, version LIMIT ?", (after_step, limit)
    )
    return tuple(StepReport(**json.loads(row[0])) for row in rows)


def run_status(
    connection: sqlite3.Connection,
    *,
    config: CoordinatorConfig,
    sites: Sites,
    quotas: Quotas,
    now: float,
    wall: float,
    uptime_s: float,
    store_bytes: int,
    store_problem: str = "",
) -> RunStatus:
    """The state of the run."""
    row = connection.execute(
        "SELECT version, bytes_full, bytes_last, changed_fraction FROM versions ORDER BY version DESC LIMIT 1"
    ).fetchone()
    last = connection.execute("SELECT report FROM steps ORDER BY step DESC, version DESC LIMIT 1").fetchone()
    snapshot_version, snapshot_published = index.newest_snapshot(connection)
    sizes = {payload.kind: payload.num_bytes for payload in lineage.payloads_into(connection, row[0])} if row else {}
    is_held = get_meta(connection, "lease_released") == "0"
    return RunStatus(
        run_id=config.run_id,
        head_version=row[0] if row else lineage.NONE,
        epoch=int(get_meta(connection, "epoch") or 0),
        learner=(get_meta(connection, "holder") or "") if is_held else "",
        is_draining=bool(get_meta(connection, "draining")),
        uptime_s=uptime_s,
        ledger=ledger.counts(connection),
        bytes_full=row[1] if row else 0,
        bytes_last=row[2] if row else 0,
        changed_fraction=row[3] if row else 0.0,
        sites=sites.statuses(connection, now, quotas=quotas, rule=quarantine.rule_of(config)),
        last_report=StepReport(**json.loads(last[0])) if last else None,
        is_head_signed=bool(row and manifests.read_signature(connection, row[0])),
        store_bytes=store_bytes,
        store_limit_bytes=config.store_bytes,
        snapshot_version=snapshot_version,
        snapshot_age_s=max(0.0, wall - snapshot_published) if snapshot_version >= 0 else 0.0,
        reclaimed_bytes=index.reclaimed_bytes(connection),
        delta_bytes=sizes.get(PayloadKind.DELTA, 0),
        snapshot_bytes=sizes.get(PayloadKind.SNAPSHOT, 0),
        encode_s=float(get_meta(connection, "encode_s") or 0.0),
        flavours=flavours.statuses(connection),
        rollback_to=rollback.ordered(connection),
        facts=json.loads(get_meta(connection, FACTS) or "{}"),
        store_problem=store_problem,
    )
