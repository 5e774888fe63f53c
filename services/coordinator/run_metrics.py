"""Prometheus metrics of the run, from the store and from passing groups.

Each label has a closed set of values, or is the bounded label of a site.
"""

from __future__ import annotations

import asyncio
import functools
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

from heterorl.common.process import metrics
from heterorl.common.process.tracing import TRACER
from heterorl.common.types.rollout import DropReason, LeasedGroup, PushOutcome, PushStatus, ReturnReason
from heterorl.common.types.run import LedgerCounts, RunStatus, SiteStatus, quarantined_sites
from heterorl.common.types.sample import SampleKind
from heterorl.coordinator import sample_ring
from heterorl.coordinator.core import Coordinator
from heterorl.coordinator.store import tallies
from heterorl.coordinator.store.database import Connection
from heterorl.coordinator.versions import lineage

_PUSH_DROPS = (
    DropReason.STALE_AT_INGEST, DropReason.CONFLICT, DropReason.INVALID, DropReason.UNKNOWN_VERSION,
    DropReason.WRONG_DIGEST, DropReason.SURPLUS, DropReason.LINEAGE_ABANDONED, DropReason.QUARANTINED,
    DropReason.LOST_MEMBERS,
)  # fmt: skip
"""Reasons of a push that is dropped."""

SILENCE_LIMIT_S = 86_400.0
"""Silence after which a site's gauges but its quotas' are no longer shown."""
TRAINED_LABEL = "trained"
_SITE_GAUGES = (
    metrics.SITE_POLICY_VERSION, metrics.SITE_SILENCE_SECONDS, metrics.SITE_STOPPED, metrics.SITE_WORK_GROUPS,
    metrics.SITE_AWAY_GROUPS, metrics.SITE_QUARANTINED, metrics.SITE_CANARY_NATS, metrics.SITE_CANARY_KL,
    metrics.SITE_FAILED_GROUPS,
)  # fmt: skip


def _read_waiting(
    connection: Connection,
) -> tuple[dict[str, int], dict[SampleKind, tuple[int, int]], float | None, float | None]:
    """Waiting bytes by site, sample totals, times of oldest group and head."""
    (oldest,) = connection.execute("SELECT min(arrived) FROM groups WHERE state = 'pending'").fetchone()
    head = lineage.read_head(connection)
    published = None if head is None else head.published
    return tallies.waiting_by_site(connection), sample_ring.totals(connection), oldest, published


async def observe_run(core: Coordinator) -> int:
    """Set all gauges of the run; returns the number of incarnations."""
    status = await core.run.get_status()
    bytes_by_site, samples, oldest, published = await core.context.database.run(_read_waiting)
    config, now = core.context.config, core.context.clock.wall()
    metrics.HEAD_VERSION.set(status.head_version)
    # A pause or a restore is no reason for an alert.
    metrics.HEAD_TIMESTAMP.set(max(now - status.uptime_s, published or 0.0))
    metrics.LEARNER_EPOCH.set(status.epoch)
    is_ending = status.is_draining or config.is_finished(status.head_version)
    metrics.DRAINING.set(is_ending)
    idle = () if is_ending else quarantined_sites(status)
    metrics.STANDSTILL.set(bool(idle))
    core.run.note_standstill(idle)
    metrics.MAX_SUPERSEDED_SECONDS.set(config.max_superseded_s)
    metrics.MAX_STALENESS_VERSIONS.set(config.max_staleness_versions)
    metrics.QUEUE_OLDEST_SECONDS.set(0.0 if oldest is None else max(0.0, now - oldest))
    metrics.DISK_REFUSES.set(bool(status.store_problem))
    metrics.STORE_USED_BYTES.set(status.store_bytes)
    metrics.STORE_LIMIT_BYTES.set(status.store_limit_bytes)
    metrics.SNAPSHOT_AGE_SECONDS.set(status.snapshot_age_s)
    for kind in SampleKind:
        _, num_bytes = samples.get(kind, (0, 0))
        metrics.SAMPLE_BYTES.labels(kind.value).set(num_bytes)
    _observe_variants(status)
    _observe_ledger(status.ledger)
    # 3,000 gauges of 1,000 sites would hold the event loop for 10 to 60 ms.
    await asyncio.to_thread(_observe_sites, status.sites)
    await asyncio.to_thread(_observe_quotas, core, {entry.site for entry in status.sites}, bytes_by_site)
    await core.evaluation.observe()
    return len(status.sites)


def _observe_quotas(core: Coordinator, sites: Collection[str], bytes_by_site: Mapping[str, int]) -> None:
    """Set each label's shares, of several sites the largest."""
    quotas, now = core.context.queue.quotas, core.context.clock.monotonic()
    shares: dict[str, dict[str, float]] = {}
    for site in sites:
        most = shares.setdefault(metrics.SITES.of(site), {})
        for quota, share in quotas.used(site, now, pending_bytes=bytes_by_site.get(site, 0)).items():
            most[quota] = max(share, most.get(quota, 0.0))
    for label, most in shares.items():
        for quota, share in most.items():
            metrics.SITE_QUOTA_RATIO.labels(label, quota).set(share)
        _begin_counters(label, tuple(most))


@functools.cache
def _begin_counters(label: str, quotas: Sequence[str]) -> None:
    """Make a site's counters: before its first increase, or rate() misses it."""
    for quota in quotas:
        metrics.QUOTA_REFUSALS.labels(label, quota)
    for reason in _PUSH_DROPS:
        metrics.PUSHED_GROUPS.labels(label, PushStatus.DROPPED.value, reason.value)


def _observe_variants(status: RunStatus) -> None:
    trained = (TRAINED_LABEL, status.bytes_full, status.delta_bytes, status.snapshot_bytes)
    others = [(each.variant, each.full_bytes, each.delta_bytes, each.snapshot_bytes) for each in status.variants]
    # A variant that is not published any more has no series.
    metrics.VARIANT_BYTES.clear()
    for variant, *sizes in (trained, *others):
        for kind, num_bytes in zip(("full", "delta", "snapshot"), sizes, strict=True):
            metrics.VARIANT_BYTES.labels(variant, kind).set(num_bytes)


def _observe_ledger(counts: LedgerCounts) -> None:
    metrics.QUEUE_GROUPS.labels("pending").set(counts.pending)
    metrics.QUEUE_GROUPS.labels("leased").set(counts.leased)
    dropped = sum(counts.dropped.values())
    for account, count in (
        ("acked", counts.acked), ("pending", counts.pending), ("leased", counts.leased),
        ("consumed", counts.consumed), ("dropped", dropped),
    ):  # fmt: skip
        metrics.LEDGER_GROUPS.labels(account).set(count)
    for reason in DropReason:
        metrics.LEDGER_DROPPED_GROUPS.labels(reason.value).set(counts.dropped.get(reason, 0))
    for why in ReturnReason:
        metrics.LEDGER_CLOSED_ASSIGNMENTS.labels(why.value).set(counts.closed.get(why, 0))
    metrics.LEDGER_BALANCED.set(counts.is_balanced)


def _observe_sites(sites: Sequence[SiteStatus]) -> None:
    """Set each site's gauges by its incarnation seen last.

    A stopped site has one, which says so. Of sites that share a label, any quarantine and the longest silence count.
    """
    newest: dict[str, SiteStatus] = {}
    running: defaultdict[str, list[SiteStatus]] = defaultdict(list)
    work: defaultdict[str, int] = defaultdict(int)
    away: defaultdict[str, int] = defaultdict(int)
    for status in sites:
        label = metrics.SITES.of(status.site)
        work[label] += status.work_leased
        away[label] += status.work_away
        known = newest.get(status.site)
        if 0 <= status.last_seen_s < SILENCE_LIMIT_S and (known is None or status.last_seen_s < known.last_seen_s):
            newest[status.site] = status
    for status in newest.values():
        if not status.is_stopped:
            running[metrics.SITES.of(status.site)].append(status)
    stopped = {metrics.SITES.of(site) for site in newest} - running.keys()
    for label in work.keys() - running.keys():
        for gauge in _SITE_GAUGES:
            gauge.remove(label)
    for label in stopped:
        metrics.SITE_STOPPED.labels(label).set(1)
    metrics.SITE_VARIANT.clear()
    for label, shared in running.items():
        status = min(shared, key=lambda each: each.last_seen_s)
        metrics.SITE_VARIANT.labels(label, status.variant or TRAINED_LABEL).set(1)
        metrics.SITE_POLICY_VERSION.labels(label).set(status.policy_version)
        metrics.SITE_STOPPED.labels(label).set(0)
        metrics.SITE_SILENCE_SECONDS.labels(label).set(max(each.last_seen_s for each in shared))
        metrics.SITE_WORK_GROUPS.labels(label).set(work[label])
        metrics.SITE_AWAY_GROUPS.labels(label).set(away[label])
        metrics.SITE_QUARANTINED.labels(label).set(any(each.quarantine for each in shared))
        metrics.SITE_FAILED_GROUPS.labels(label).set(status.groups_failed)
        if status.canary_difference is not None:
            metrics.SITE_CANARY_NATS.labels(label).set(status.canary_difference)


def observe_push(outcome: PushOutcome) -> None:
    """Count the outcome of one pushed group."""
    reason = outcome.reason.value if outcome.reason else ""
    metrics.PUSHED_GROUPS.labels(metrics.SITES.of(outcome.id.site), outcome.status.value, reason).inc()


def observe_lease(leased: LeasedGroup) -> None:
    """Observe the ages of a group that goes to the learner."""
    site = metrics.SITES.of(leased.sealed.id.site)
    metrics.QUEUE_AGE_SECONDS.labels(site).observe(leased.queue_age_s)
    metrics.LEASED_POLICY_AGE_SECONDS.labels(site).observe(leased.policy_age_s)
    metrics.SUPERSEDED_SECONDS.labels(site).observe(leased.superseded_s)
    TRACER.add("queue", trace=leased.sealed.trace, lasted_s=leased.queue_age_s)
