"""Sites whose groups failed the learner's checks: their failures, their quarantine, and its end, as store operations.

Guarantees: durable; a site is quarantined in the transaction of the failure that is one too many, its pending groups
are dropped and its work is handed to others in the same one. Only an operator ends it. The quarantine by the canary
(canary.py) is another one, which ends by itself; `check_site` and `read_reasons` know both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from heterorl.common.errors import InvalidRequest, Quarantined
from heterorl.common.types.common import SiteId
from heterorl.common.types.rollout import DropReason
from heterorl.coordinator.config import CoordinatorConfig
from heterorl.coordinator.sites import audit, canary
from heterorl.coordinator.sites.audit import AuditKind
from heterorl.coordinator.store.connection import Connection

REJECTABLE = frozenset(
    {
        DropReason.REWARD_MISMATCH,
        DropReason.LOGPROB_MISMATCH,
        DropReason.SAMPLING_MISMATCH,
        DropReason.CODE_MISMATCH,
    }
)
"""Reasons that a check of the learner may give."""
CODE_MISMATCHES = 10
"""So many count as one failure: code that tosses a coin may agree with itself at the learner by chance. A site wins
nothing by it, because such a group is never trained on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A site is quarantined at `failures` failed groups among its newest `window_groups`; 0 failures: never.

    CODE_MISMATCHES groups that failed by CODE_MISMATCH count as one.
    """

    failures: int
    window_groups: int


def rule_of(config: CoordinatorConfig) -> Rule:
    """The configured rule."""
    return Rule(failures=config.quarantine_failures, window_groups=config.quarantine_window_groups)


def decide(failed_at: list[int], *, code_failed_at: Sequence[int] = (), accepted: int, rule: Rule) -> tuple[bool, str]:
    """Whether a site's failures are too many.

    Args:
        failed_at: how many groups the site had delivered at each failure.
        code_failed_at: the same of failures by CODE_MISMATCH, which are not among those.
        accepted: how many it has delivered now.
        rule: the bound.
    """
    recent, by_code = (
        sum(count > accepted - rule.window_groups for count in counts) for counts in (failed_at, code_failed_at)
    )
    text = f"{recent + by_code} of its last {min(accepted, rule.window_groups)} groups failed a check"
    if by_code:
        text += f", {by_code} by the result of a completion's code alone, of which {CODE_MISMATCHES} count as one"
    return 0 < rule.failures <= recent + by_code // CODE_MISMATCHES, text


def note_failure(
    connection: Connection, site: SiteId, reason: DropReason, detail: str, *, rule: Rule, now: float
) -> str:
    """Set: count one failed group; returns why the site goes into quarantine with it, empty when it does not."""
    (accepted,) = connection.execute("SELECT coalesce(sum(accepted), 0) FROM sites WHERE site = ?", (site,)).fetchone()
    connection.execute("INSERT INTO failures VALUES (?, ?, ?, ?)", (site, accepted, reason.value, detail[:500]))
    connection.execute("DELETE FROM failures WHERE site = ? AND accepted <= ?", (site, accepted - rule.window_groups))
    audit.append(connection, AuditKind.CHECK_FAILED, subject=site, detail=f"{reason.value}: {detail}", now=now)
    rows = connection.execute("SELECT accepted, reason FROM failures WHERE site = ?", (site,)).fetchall()
    by_code = [count for count, why in rows if why == DropReason.CODE_MISMATCH.value]
    others = [count for count, why in rows if why != DropReason.CODE_MISMATCH.value]
    is_due, text = decide(others, code_failed_at=by_code, accepted=accepted, rule=rule)
    if not is_due or conviction_of(connection, site):
        return ""
    text = f"{text}; the last one: {reason.value}, {detail[:300]}"
    connection.execute("INSERT INTO convictions VALUES (?, ?, ?)", (site, text, now))
    audit.append(
        connection, AuditKind.QUARANTINE, subject=site, detail=f"{text}; {_trained(connection, site)}", now=now
    )
    return text


def release(connection: Connection, site: SiteId, *, reason: str, now: float) -> str:
    """Set: end a site's quarantine of either kind, forget its failures and lost members; returns why it was there.

    Raises:
        InvalidRequest: there is no reason, or no such site.
    """
    if not reason.strip():
        raise InvalidRequest("reason: must not be empty; it is kept in the log of audit")
    if connection.execute("SELECT 1 FROM sites WHERE site = ?", (site,)).fetchone() is None:
        raise InvalidRequest(f"site: {site[:64]} never registered")
    before = read_reasons(connection).get(site, "")
    for table in ("convictions", "failures", "quarantines", "lost_shares"):
        connection.execute(f"DELETE FROM {table} WHERE site = ?", (site,))
    audit.append(connection, AuditKind.RELEASE, subject=site, detail=f"{reason}; it was there because {before}"
                 if before else f"{reason}; it was not in quarantine", now=now)  # fmt: skip
    return before


def conviction_of(connection: Connection, site: SiteId) -> str:
    """Why the learner's checks put a site into quarantine; empty when they did not."""
    row = connection.execute("SELECT reason FROM convictions WHERE site = ?", (site,)).fetchone()
    return str(row[0]) if row else ""


def read_reasons(connection: Connection) -> dict[str, str]:
    """Reasons of all quarantines of both kinds, by site."""
    return canary.read_quarantines(connection) | dict(connection.execute("SELECT site, reason FROM convictions"))


def count_failures(connection: Connection, rule: Rule) -> dict[str, int]:
    """Failures that still count, by site: those among the newest groups that the rule looks at."""
    rows = connection.execute(
        "SELECT f.site, count(*) FROM failures f JOIN (SELECT site, sum(accepted) AS total FROM sites GROUP BY site) t"
        " USING (site) WHERE f.accepted > total - ? GROUP BY f.site",
        (rule.window_groups,),
    )
    return dict(rows.fetchall())


def check_site(connection: Connection, site: SiteId) -> None:
    """Refuse a site in quarantine of either kind.

    Raises:
        Quarantined: with the reason.
    """
    reason = conviction_of(connection, site)
    if reason:
        raise Quarantined(
            f"site {site} is in quarantine: {reason}",
            action=f"an operator ends it: heterorl sites release {site} HOST:PORT --reason TEXT",
            retry_after_s=5.0,
        )
    canary.check_site(connection, site)


def convicted_sites(connection: Connection) -> list[SiteId]:
    """Sites that the learner's checks put into quarantine."""
    return [SiteId(site) for (site,) in connection.execute("SELECT site FROM convictions")]


def _trained(connection: Connection, site: str) -> str:
    """Which versions hold groups of the site: what an operator may want to go back from."""
    count, first, last = connection.execute(
        "SELECT count(*), min(version), max(version) FROM groups WHERE site = ? AND state = 'consumed'", (site,)
    ).fetchone()
    return f"versions {first} to {last} hold {count} groups of it" if count else "no version holds a group of it"
