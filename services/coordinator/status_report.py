"""Step reports and the run's status, read from the store."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
from collections.abc import Sequence

from heterorl.common.types.common import StepReport, value_of_row
from heterorl.common.types.policy import NO_VERSION, PayloadKind, stated_version
from heterorl.common.types.run import RunStatus, SiteStatus
from heterorl.coordinator.context import CoordinatorContext
from heterorl.coordinator.groups import ledger, schedule
from heterorl.coordinator.payloads import payload_index
from heterorl.coordinator.sites.sites import SiteRows
from heterorl.coordinator.store.database import Connection, get_meta
from heterorl.coordinator.versions import lineage, published_variants, rollback_order
from heterorl.coordinator.versions.chain import Chain

FACTS = "facts"


def encode(report: StepReport) -> bytes:
    """A step report as JSON bytes."""
    return json.dumps(dataclasses.asdict(report)).encode()


def list_steps(
    connection: Connection, after_step: int, limit: int, *, max_bytes: float = math.inf
) -> tuple[StepReport, ...]:
    """Step reports after a step, oldest first, with their versions' publication times.

    Whole steps as many as fit `limit` and `max_bytes`; of the first, at least a report.
    """
    rows = connection.execute(
        "SELECT step, report FROM steps WHERE step > ? ORDER BY step, version LIMIT ?", (after_step, limit + 1)
    ).fetchall()
    if len(rows) > limit:
        last = rows[-1][0]
        rows = [row for row in rows if row[0] != last] or rows[:limit]
    found: list[StepReport] = []
    num_bytes = 0
    for step, data in rows:
        # A report is shorter in a message than as JSON.
        num_bytes += len(data)
        if found and step != found[-1].step and num_bytes > max_bytes:
            break
        found.append(value_of_row(StepReport, json.loads(data)))
    return tuple(found)


def shortened(sites: Sequence[SiteStatus], *, max_bytes: int) -> tuple[SiteStatus, ...]:
    """Statuses whose texts fit `max_bytes`, with equal shares beyond that.

    A site states up to 4096 characters for each of its processes, and all go into one message.
    """
    sizes = [len(text.encode()) for site in sites for text in (site.problem, site.quarantine) if text]
    if sum(sizes) <= max_bytes:
        return tuple(sites)
    # A character has at most 4 bytes.
    most = max_bytes // len(sizes) // 4
    return tuple(
        dataclasses.replace(site, problem=site.problem[:most], quarantine=site.quarantine[:most]) for site in sites
    )


async def run_status(context: CoordinatorContext) -> RunStatus:
    """The status of the run.

    The store's thread reads the sites' rows, another makes 1,000 statuses of them in 10 ms.
    """
    used, problem = context.blobs.used_bytes, context.disk.problem

    def read(connection: Connection) -> tuple[RunStatus, SiteRows]:
        status = _read_status(connection, context, store_bytes=used, store_problem=problem)
        rows = context.sites.read(
            connection,
            window_groups=context.config.quarantine_window_groups,
            max_lost_share=context.config.max_lost_share,
            holdings=context.deadlines.holdings(connection, context.clock.monotonic()),
        )
        return status, rows

    status, rows = await context.database.run(read)
    sites = await asyncio.to_thread(
        context.sites.statuses, rows, context.clock.monotonic(), quotas=context.queue.quotas
    )
    most = context.config.max_message_bytes // 4
    return dataclasses.replace(status, sites=shortened(sites, max_bytes=most))


def _read_status(
    connection: Connection, context: CoordinatorContext, *, store_bytes: int, store_problem: str
) -> RunStatus:
    """All but the sites."""
    config, now = context.config, context.clock.monotonic()
    head = lineage.read_head(connection)
    last = connection.execute("SELECT report FROM steps ORDER BY step DESC, version DESC LIMIT 1").fetchone()
    snapshot = payload_index.newest_snapshot(connection)
    chain, contract = Chain(connection), lineage.read_contract(connection)
    sizes = {payload.kind: payload.num_bytes for payload in chain.into(head.version)} if head else {}
    ordered = rollback_order.ordered(connection)
    is_held = get_meta(connection, "lease_released") == "0"
    epoch = int(get_meta(connection, "epoch") or 0)
    progress, age_s = context.standing.of(epoch, now) if is_held else (None, 0.0)
    return RunStatus(
        run_id=config.run_id,
        head_version=head.version if head else NO_VERSION,
        epoch=epoch,
        learner=(get_meta(connection, "holder") or "") if is_held else "",
        is_draining=bool(get_meta(connection, "draining")),
        uptime_s=now - context.started,
        ledger=ledger.counts(connection),
        bytes_full=head.full_bytes if head else 0,
        bytes_last=head.last_bytes if head else 0,
        changed_fraction=head.changed_fraction if head else 0.0,
        sites=(),
        last_report=value_of_row(StepReport, json.loads(last[0])) if last else None,
        is_head_signed=bool(head and chain.signature(head.version)),
        store_bytes=store_bytes,
        store_limit_bytes=config.payload_space_bytes,
        snapshot_version=snapshot[0] if snapshot else NO_VERSION,
        snapshot_age_s=max(0.0, context.clock.wall() - snapshot[1]) if snapshot else 0.0,
        reclaimed_bytes=payload_index.reclaimed_bytes(connection),
        delta_bytes=sizes.get(PayloadKind.DELTA, 0),
        snapshot_bytes=sizes.get(PayloadKind.SNAPSHOT, 0),
        encode_s=float(get_meta(connection, "encode_s") or 0.0),
        variants=published_variants.statuses(connection),
        rollback_to=stated_version(ordered),
        is_rollback_refused=ordered != rollback_order.open_order(connection)[0],
        facts=json.loads(get_meta(connection, FACTS) or "{}"),
        store_problem=store_problem,
        progress=progress,
        progress_age_s=age_s,
        prompts=schedule.prompt_counts(
            connection, config.difficulty, num_prompts=contract.num_prompts if contract else 0
        ),
    )
