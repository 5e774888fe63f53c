"""Quotas of a site: equal shares of assignments, token buckets for pushes.

In memory. Shares: a single site may hold everything; if it works ahead, it leaves a quarter for a newcomer. A site that
never answers sinks to one assignment and regains one for each group that it delivers. A site whose assignments are all
away takes no share. Buckets: a refusal is free and says when to retry. A group larger than the burst passes when the
bucket is full. A restart clears debts and fills buckets.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from heterorl.common.process import metrics
from heterorl.coordinator.coordinator_config import CoordinatorConfig
from heterorl.coordinator.store import tallies
from heterorl.coordinator.store.database import Connection

ASKED_S = 60.0
"""A site shares the work if it asked within so many seconds, or holds assignments that count."""


def equal_share(limit: int, wanting: int) -> int:
    """The share of each site while none owes anything."""
    return -(-limit // wanting)


def decide_share(
    *, limit: int, at_least: int, wanting: int, owed: int, debtors: int, works_ahead: bool
) -> tuple[int, int]:
    """Assignments that the site may hold, and its debt from now on.
    A single site gets `at_least`, one version's groups. `wanting` sites share, with this one; `debtors` of them owe an
    equal share or more."""
    if wanting == 1:
        # A single site delays only itself.
        ahead = min(limit, max(at_least, limit - limit // 4))
        return ahead if works_ahead else limit, owed
    equal = equal_share(limit, wanting)
    share = equal if owed >= equal else equal_share(limit, wanting - debtors)
    # A debt is at most the share, so that as many groups win it back.
    owed = min(owed, share)
    return max(1, share - owed), owed


def note_asked(connection: Connection, site: str, now: float) -> None:
    """Note that a site wants work."""
    connection.execute("INSERT INTO temp.sharer (site) VALUES (?) ON CONFLICT DO NOTHING", (site,))
    connection.execute("UPDATE temp.sharer SET asked = ? WHERE site = ?", (now, site))


def note_expired(connection: Connection, site: str, count: int) -> None:
    """Count expired assignments as debt.
    Each accepted group of the site lowers it (store/tallies.py)."""
    connection.execute("UPDATE temp.sharer SET owed = owed + ? WHERE site = ?", (count, site))


def allowance(connection: Connection, site: str, *, limit: int, at_least: int, works_ahead: bool, now: float) -> int:
    """Assignments that a site may hold, as `decide_share` says."""
    connection.execute("UPDATE temp.sharer SET asked = NULL WHERE asked < ?", (now - ASKED_S,))
    row = connection.execute(
        "SELECT owed, counted > 0 OR asked IS NOT NULL FROM temp.sharer WHERE site = ?", (site,)
    ).fetchone()
    owed, is_counted = (int(row[0]), bool(row[1])) if row else (0, False)
    wanting = tallies.read(connection, "wanting") + (not is_counted)
    equal = equal_share(limit, wanting)
    (debtors,) = connection.execute(
        "SELECT count(*) FROM temp.sharer WHERE owed > 0 AND owed >= ? AND (counted > 0 OR asked IS NOT NULL)", (equal,)
    ).fetchone()
    debtors = int(debtors) + (not is_counted and owed >= equal)
    allowed, left = decide_share(
        limit=limit, at_least=at_least, wanting=wanting, owed=owed, debtors=debtors, works_ahead=works_ahead
    )
    if left != owed:
        connection.execute("UPDATE temp.sharer SET owed = ? WHERE site = ?", (left, site))
    return allowed


MAX_WAIT_S = 60.0
"""Longest delay asked for, seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """A token bucket's fill rate and capacity.
    A charge larger than the rest takes its level below 0. Times are monotonic seconds."""

    per_s: float
    burst: float


def level_at(now: float, rate: Rate, bucket: tuple[float, float] | None) -> float:
    """A bucket's level now; a new one is full.
    `bucket` is an earlier level and its instant."""
    if bucket is None:
        return rate.burst
    level, since = bucket
    return min(rate.burst, level + max(0.0, now - since) * rate.per_s)


def wait_s(level: float, rate: Rate, amount: float) -> float:
    """Seconds until the amount may be taken; 0 for now."""
    needed = min(amount, rate.burst)
    return 0.0 if level >= needed else min(MAX_WAIT_S, (needed - level) / rate.per_s)


class Quotas:
    """The buckets of all sites and their refusals.

    `take` runs in store operations, other threads read single entries.
    """

    def __init__(self, config: CoordinatorConfig) -> None:
        self._pending_limit = config.site_pending_bytes
        rates = {"groups": config.site_groups_per_s, "bytes": config.site_bytes_per_s}
        self._rates = {
            name: Rate(per_s=per_s, burst=max(1.0, per_s * config.site_burst_s))
            for name, per_s in rates.items()
            if per_s > 0
        }
        self._buckets: dict[tuple[str, str], tuple[float, float]] = {}
        """The level of each site's buckets, and its instant."""
        self.full: set[str] = set()
        """Sites whose newest group was refused, because theirs in the queue leave it no room."""
        self._refused: Counter[tuple[str, str]] = Counter()

    def take(self, site: str, *, num_bytes: int, pending_bytes: int, now: float) -> tuple[float, str]:
        """Charge one group to a site, or refuse it without a charge.
        Returns (0, ""), or the seconds to wait and the reason."""
        if pending_bytes + num_bytes > self._pending_limit:
            self._refuse(site, "pending_bytes")
            self.full.add(site)
            return 1.0, f"the site has {pending_bytes} bytes in the queue; site_pending_bytes is {self._pending_limit}"
        self.full.discard(site)
        amounts = {"groups": 1.0, "bytes": float(num_bytes)}
        levels = {name: level_at(now, rate, self._buckets.get((site, name))) for name, rate in self._rates.items()}
        for name, rate in self._rates.items():
            delay_s = wait_s(levels[name], rate, amounts[name])
            if delay_s > 0:
                self._refuse(site, name)
                return delay_s, f"quota: site_{name}_per_s is {rate.per_s:g}; push again in {delay_s:.2f} s"
        for name, level in levels.items():
            self._buckets[site, name] = level - amounts[name], now
        return 0.0, ""

    def _refuse(self, site: str, quota: str) -> None:
        self._refused[site, quota] += 1
        metrics.QUOTA_REFUSALS.labels(metrics.SITES.of(site), quota).inc()

    def used(self, site: str, now: float, *, pending_bytes: int) -> dict[str, float]:
        shares = {"pending_bytes": pending_bytes / self._pending_limit}
        for name, rate in self._rates.items():
            level = level_at(now, rate, self._buckets.get((site, name)))
            shares[name] = 1.0 - level / rate.burst
        return {name: min(1.0, max(0.0, share)) for name, share in shares.items()}

    def refusals_of(self, site: str) -> int:
        return sum(self._refused[site, quota] for quota in ("pending_bytes", *self._rates))
