"""Which sites compute what the learner computes: the learner's canary per version, and the quarantine of a site.

A site enters when its canary differs by more than the threshold, and leaves when one of its versions is right. In
quarantine it gets no work, so that no rollout says log-probs that its engine did not draw with; it is durable, since a
restarted coordinator must not trust what the last one did not.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from heterorl.common.errors import InvalidRequest, Quarantined
from heterorl.common.types.policy import PublishRequest
from heterorl.common.types.run import CanaryReport, CanaryVerdict
from heterorl.coordinator.store.connection import Connection

MAX_LOGPROBS = 4096
KEPT_VERSIONS = 4096
"""Versions whose canary is kept; no sampler may be so far behind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """What a canary means: the new reason of the quarantine (empty: none), or None to leave things as they are."""

    difference: float | None
    quarantine: str | None


def judge(report: CanaryReport, stated: tuple[float, ...], *, threshold: float) -> Judgement:
    """Decide on a site from its canary and the learner's of the same version."""
    if not stated or threshold == 0:
        return Judgement(difference=None, quarantine=None)
    if len(report.logprobs) != len(stated):
        reason = f"version {report.version}: {len(report.logprobs)} canary log-probs, the learner has {len(stated)}"
        return Judgement(difference=None, quarantine=reason)
    if not np.isfinite(report.logprobs).all():
        return Judgement(difference=None, quarantine=f"version {report.version}: canary log-probs are not finite")
    differences = np.abs(np.asarray(stated, np.float64) - np.asarray(report.logprobs, np.float64))
    difference = float(np.median(differences))
    reason = f"version {report.version}: canary log-probs are {difference:.3g} nats off (median), allowed {threshold:g}"
    return Judgement(difference=difference, quarantine=reason if difference > threshold else "")


def write_stated(connection: Connection, version: int, request: PublishRequest) -> None:
    """Set: record the learner's canary of a version, and of each of its flavours.

    Raises:
        InvalidRequest: too many log-probs, or one that is not finite.
    """
    canaries = {"": request.canary, **{entry.flavour: entry.canary for entry in request.flavours}}
    for flavour, stated in canaries.items():
        if len(stated) > MAX_LOGPROBS or not np.isfinite(stated).all():
            raise InvalidRequest(f"canary_logprobs: more than {MAX_LOGPROBS}, or not all finite")
        if stated:
            logprobs = np.asarray(stated, "<f4").tobytes()
            connection.execute(
                "INSERT INTO canaries VALUES (?, ?, ?) ON CONFLICT (flavour, version)"
                " DO UPDATE SET logprobs = excluded.logprobs",
                (version, logprobs, flavour),
            )
        oldest = version - KEPT_VERSIONS
        connection.execute("DELETE FROM canaries WHERE flavour = ? AND version < ?", (flavour, oldest))


def read_stated(connection: Connection, version: int, flavour: str = "") -> tuple[float, ...]:
    """The learner's canary of a version; empty when it stated none."""
    row = connection.execute(
        "SELECT logprobs FROM canaries WHERE flavour = ? AND version = ?", (flavour, version)
    ).fetchone()
    return tuple(np.frombuffer(row[0], "<f4").tolist()) if row else ()


def compare(connection: Connection, report: CanaryReport, *, threshold: float, flavour: str = "") -> CanaryVerdict:
    """Set: judge a site's canary by what the learner computes with the same weights, and keep the outcome."""
    if len(report.logprobs) > MAX_LOGPROBS:
        raise InvalidRequest(f"logprobs: {len(report.logprobs)}, allowed are {MAX_LOGPROBS}")
    judgement = judge(report, read_stated(connection, report.version, flavour), threshold=threshold)
    if judgement.quarantine:
        connection.execute(
            "INSERT INTO quarantines VALUES (?, ?, ?) ON CONFLICT (site)"
            " DO UPDATE SET version = excluded.version, reason = excluded.reason",
            (report.site, report.version, judgement.quarantine),
        )
    elif judgement.quarantine is not None:
        connection.execute("DELETE FROM quarantines WHERE site = ?", (report.site,))
    return CanaryVerdict(difference=judgement.difference, quarantine=read_quarantines(connection).get(report.site, ""))


def read_quarantines(connection: Connection) -> dict[str, str]:
    """Reasons by site."""
    return dict(connection.execute("SELECT site, reason FROM quarantines"))


def check_site(connection: Connection, site: str) -> None:
    """Refuse a site in quarantine.

    Raises:
        Quarantined: with the reason.
    """
    row = connection.execute("SELECT reason FROM quarantines WHERE site = ?", (site,)).fetchone()
    if row is not None:
        raise Quarantined(
            f"site {site} is in quarantine: {row[0]}",
            action="reload the weights or correct the engine's settings; a version that scores right ends the"
            f" quarantine, and so does an operator: heterorl sites release {site} HOST:PORT --reason TEXT",
            retry_after_s=5.0,
        )
