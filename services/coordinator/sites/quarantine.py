"""Quarantine by canary or failed checks; limit on lost members.

Store operations. Reasons:

canary     the median difference of log-probs from the learner's exceeds the threshold: no work until a version of
           the site is right or an operator releases it
checks     too many of its newest groups failed the learner's checks: its pending groups are dropped and its work
           reopened in the same transaction; only an operator ends it
lost       lost_shares: site, share of lost members, decayed over WINDOW_GROUPS. A site that chooses lost members
           chooses its rewards: above `max_lost_share` groups with lost members are dropped, complete ones are taken
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np

from heterorl.common.errors import InvalidRequest, Quarantined
from heterorl.common.types.common import SiteId
from heterorl.common.types.policy import NO_VERSION, PublishRequest
from heterorl.common.types.rollout import DropReason
from heterorl.common.types.run import CanaryReport, CanaryVerdict
from heterorl.coordinator.coordinator_config import CoordinatorConfig
from heterorl.coordinator.sites import audit
from heterorl.coordinator.sites.audit import AuditKind
from heterorl.coordinator.store.database import Connection, get_meta, set_meta

MAX_LOGPROBS = 4096
KEPT_VERSIONS = 4096
"""Newest versions whose canary is kept."""


def judge_canary(
    report: CanaryReport, stated: tuple[float, ...], *, threshold: float
) -> tuple[float | None, str | None]:
    """Judge a site's canary by the learner's of the same version.
    Returns the difference, and the reason of a quarantine: empty to end it, None to leave it."""
    if not stated or threshold == 0:
        return None, None
    if len(report.logprobs) != len(stated):
        return None, (
            f"version {report.version}: {len(report.logprobs)} canary log-probs, the learner has {len(stated)}"
        )
    if not np.isfinite(report.logprobs).all():
        return None, f"version {report.version}: canary log-probs are not finite"
    differences = np.abs(np.asarray(stated, np.float64) - np.asarray(report.logprobs, np.float64))
    difference = float(np.median(differences))
    reason = f"version {report.version}: canary log-probs are {difference:.3g} nats off (median), allowed {threshold:g}"
    return difference, reason if difference > threshold else ""


def canary_kl(offered: tuple[float, ...], stated: tuple[float, ...]) -> float | None:
    """Half the mean square of a canary's differences from the learner's.

    It is about the KL a token of the two engines. Both have equal weights, so it is the site's engine mismatch at any
    staleness. None if no values can be compared.
    """
    if not stated or len(offered) != len(stated) or not np.isfinite(offered).all():
        return None
    return float(np.mean((np.asarray(stated, np.float64) - np.asarray(offered, np.float64)) ** 2)) / 2.0


def write_canary(connection: Connection, version: int, request: PublishRequest) -> None:
    """Record the learner's canaries of a version.
    Raises InvalidRequest: too many log-probs, or one is not finite."""
    canaries = {"": request.canary, **{entry.variant: entry.canary for entry in request.variants}}
    for variant, stated in canaries.items():
        if len(stated) > MAX_LOGPROBS or not np.isfinite(stated).all():
            raise InvalidRequest(f"canary_logprobs: more than {MAX_LOGPROBS}, or not all finite")
        if stated:
            logprobs = np.asarray(stated, "<f4").tobytes()
            connection.execute(
                "INSERT INTO canaries VALUES (?, ?, ?) ON CONFLICT (variant, version)"
                " DO UPDATE SET logprobs = excluded.logprobs",
                (version, logprobs, variant),
            )
        oldest = version - KEPT_VERSIONS
        connection.execute("DELETE FROM canaries WHERE variant = ? AND version < ?", (variant, oldest))


def read_canary(connection: Connection, version: int, variant: str = "") -> tuple[float, ...]:
    """The learner's canary of a version, or empty."""
    row = connection.execute(
        "SELECT logprobs FROM canaries WHERE variant = ? AND version = ?", (variant, version)
    ).fetchone()
    return tuple(np.frombuffer(row[0], "<f4").tolist()) if row else ()


def compare_canary(
    connection: Connection, report: CanaryReport, *, threshold: float, variant: str = ""
) -> CanaryVerdict:
    """Judge a site's canary by the learner's, and store the outcome."""
    if len(report.logprobs) > MAX_LOGPROBS:
        raise InvalidRequest(f"logprobs: {len(report.logprobs)}, allowed are {MAX_LOGPROBS}")
    stated = read_canary(connection, report.version, variant)
    difference, reason = judge_canary(report, stated, threshold=threshold)
    if reason:
        connection.execute(
            "INSERT INTO quarantines VALUES (?, ?, ?) ON CONFLICT (site)"
            " DO UPDATE SET version = excluded.version, reason = excluded.reason",
            (report.site, report.version, reason),
        )
    elif reason is not None:
        connection.execute("DELETE FROM quarantines WHERE site = ?", (report.site,))
    return CanaryVerdict(difference=difference, quarantine=canary_reason_of(connection, report.site))


def is_news(connection: Connection, report: CanaryReport, *, is_off: bool) -> bool:
    """Whether a quarantine changed with a newer version than before.
    Notes the version until an operator releases the site."""
    key = _news_key(report.site)
    newest = json.loads(get_meta(connection, key) or f"[{NO_VERSION}, {NO_VERSION}]")
    if report.version <= newest[is_off]:
        return False
    newest[is_off] = report.version
    set_meta(connection, key, json.dumps(newest))
    return True


def _news_key(site: str) -> str:
    return f"canary/{site}"


def canary_reason_of(connection: Connection, site: SiteId) -> str:
    """Why its canary put a site into quarantine, or empty."""
    row = connection.execute("SELECT reason FROM quarantines WHERE site = ?", (site,)).fetchone()
    return str(row[0]) if row else ""


WINDOW_GROUPS = 50
"""Groups over which a share decays: an outage of 20 groups is seen, of one group not."""
_SHARES = "SELECT site, share FROM lost_shares"


def moved_share(share: float, lost: float) -> float:
    """A site's lost share after one more group; `lost`: 0 to 1."""
    return share + (lost - share) / WINDOW_GROUPS


def lost_problem(share: float, bound: float) -> str:
    """The problem with a share, or empty within the bound."""
    if share <= bound:
        return ""
    return (
        f"it loses {share:.1%} of the members of its groups, and max_lost_share is {bound:.1%}: groups with lost"
        " members are dropped. Its log has the reasons; each whole group is taken and lowers the share"
    )


def note_lost(connection: Connection, site: SiteId, lost: float, *, groups: int = 1) -> float:
    """Move a site's share by groups that lost `lost` of their members.
    Returns the share."""
    row = connection.execute(f"{_SHARES} WHERE site = ?", (site,)).fetchone()
    if row is None and not lost:
        # No row for a site that never lost a member.
        return 0.0
    share = 0.0 if row is None else float(row[1])
    for _ in range(groups):
        share = moved_share(share, lost)
    connection.execute(
        "INSERT INTO lost_shares VALUES (?, ?) ON CONFLICT (site) DO UPDATE SET share = excluded.share", (site, share)
    )
    return share


def lost_problems(connection: Connection, bound: float) -> dict[str, str]:
    """The problem of each site above the bound."""
    found = {site: lost_problem(float(share), bound) for site, share in connection.execute(_SHARES)}
    return {site: text for site, text in found.items() if text}


REJECTABLE = frozenset(
    {DropReason.REWARD_MISMATCH, DropReason.LOGPROB_MISMATCH, DropReason.SAMPLING_MISMATCH, DropReason.CODE_MISMATCH}
)
"""Reasons of the learner's checks."""
CODE_MISMATCHES = 10
"""Code mismatches that count as one failure, since random code may differ by chance."""


def decide(
    failed_at: list[int], *, code_failed_at: Sequence[int] = (), accepted: int, config: CoordinatorConfig
) -> tuple[bool, str]:
    """Whether a site has too many failures.
    Each is given by the number of groups accepted before it."""
    window = config.quarantine_window_groups
    recent, by_code = (sum(count > accepted - window for count in counts) for counts in (failed_at, code_failed_at))
    text = f"{recent + by_code} of its last {min(accepted, window)} groups failed a check"
    if by_code:
        text += f", {by_code} by the result of a completion's code, of which {CODE_MISMATCHES} count as one"
    return 0 < config.quarantine_failures <= recent + by_code // CODE_MISMATCHES, text


def note_failure(
    connection: Connection, site: SiteId, reason: DropReason, detail: str, *, config: CoordinatorConfig, now: float
) -> str:
    """Count a failed group; returns the reason of a quarantine, or empty."""
    (accepted,) = connection.execute("SELECT coalesce(sum(accepted), 0) FROM sites WHERE site = ?", (site,)).fetchone()
    connection.execute("INSERT INTO failures VALUES (?, ?, ?, ?)", (site, accepted, reason.value, detail[:500]))
    oldest = accepted - config.quarantine_window_groups
    connection.execute("DELETE FROM failures WHERE site = ? AND accepted <= ?", (site, oldest))
    audit.append(connection, AuditKind.CHECK_FAILED, subject=site, detail=f"{reason.value}: {detail}", now=now)
    rows = connection.execute("SELECT accepted, reason FROM failures WHERE site = ?", (site,)).fetchall()
    by_code = [count for count, why in rows if why == DropReason.CODE_MISMATCH.value]
    others = [count for count, why in rows if why != DropReason.CODE_MISMATCH.value]
    is_due, text = decide(others, code_failed_at=by_code, accepted=accepted, config=config)
    if not is_due or conviction_of(connection, site):
        return ""
    text = f"{text}; the last one: {reason.value}, {detail[:300]}"
    connection.execute("INSERT INTO convictions VALUES (?, ?, ?)", (site, text, now))
    audit.append(
        connection, AuditKind.QUARANTINE, subject=site, detail=f"{text}; {_trained(connection, site)}", now=now
    )
    return text


def release(connection: Connection, site: SiteId, *, reason: str, now: float) -> str:
    """End a site's quarantine; returns its reason.
    Failures and lost members are forgotten. Raises InvalidRequest: no reason was given, or the site is unknown."""
    if not reason.strip():
        raise InvalidRequest("reason: must not be empty; the audit log keeps it")
    if connection.execute("SELECT 1 FROM sites WHERE site = ?", (site,)).fetchone() is None:
        raise InvalidRequest(
            f"site: {site[:64]} never registered", action="take a name that `heterorl status` or `heterorl top` lists"
        )
    before = conviction_of(connection, site) or canary_reason_of(connection, site)
    for table in ("convictions", "failures", "quarantines", "lost_shares"):
        connection.execute(f"DELETE FROM {table} WHERE site = ?", (site,))
    connection.execute("DELETE FROM meta WHERE key = ?", (_news_key(site),))
    was = f"it was there because {before}" if before else "it was not in quarantine"
    audit.append(connection, AuditKind.RELEASE, subject=site, detail=f"{reason}; {was}", now=now)
    return before


def conviction_of(connection: Connection, site: SiteId) -> str:
    """Why the learner's checks put a site into quarantine, or empty."""
    row = connection.execute("SELECT reason FROM convictions WHERE site = ?", (site,)).fetchone()
    return str(row[0]) if row else ""


def read_reasons(connection: Connection) -> dict[str, str]:
    """Reasons of all quarantines of both kinds, by site."""
    canaries = dict(connection.execute("SELECT site, reason FROM quarantines"))
    return canaries | dict(connection.execute("SELECT site, reason FROM convictions"))


def count_failures(connection: Connection, *, window_groups: int) -> dict[str, int]:
    """Failures among the newest `window_groups` groups, by site."""
    rows = connection.execute(
        "SELECT f.site, count(*) FROM failures f JOIN (SELECT site, sum(accepted) AS total FROM sites GROUP BY site) t"
        " USING (site) WHERE f.accepted > total - ? GROUP BY f.site",
        (window_groups,),
    )
    return dict(rows.fetchall())


def check_site(connection: Connection, site: SiteId) -> None:
    """Refuse a site in quarantine. Raises Quarantined: with the reason."""
    release_command = f"heterorl sites release {site} HOST:PORT --reason TEXT"
    reason, action = conviction_of(connection, site), f"an operator ends it: {release_command}"
    if not reason:
        reason = canary_reason_of(connection, site)
        action = (
            "reload the weights or correct the engine's settings; a version that scores right ends the quarantine,"
            f" and so does an operator: {release_command}"
        )
    if reason:
        raise Quarantined(f"site {site} is in quarantine: {reason}", action=action, retry_after_s=5.0)


def convicted_sites(connection: Connection) -> list[SiteId]:
    """Sites that the learner's checks put into quarantine."""
    return [SiteId(site) for (site,) in connection.execute("SELECT site FROM convictions")]


def _trained(connection: Connection, site: str) -> str:
    count, first, last = connection.execute(
        "SELECT count(*), min(version), max(version) FROM groups WHERE site = ? AND state = 'consumed'", (site,)
    ).fetchone()
    return f"versions {first} to {last} hold {count} groups of it" if count else "no version holds a group of it"
