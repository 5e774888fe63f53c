"""Numbers of a step to metrics; the step's own log line."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from heterorl.common.process import metrics
from heterorl.common.process.tracing import TRACER
from heterorl.common.types.common import StepReport
from heterorl.common.types.policy import Manifest, PayloadKind
from heterorl.common.types.rollout import QueuedGroup

_LOG = logging.getLogger(__name__)
_NUMBERS = (
    metrics.LOSS, metrics.REWARD, metrics.KL, metrics.ESS, metrics.IW_VARIANCE, metrics.CLIP_FRACTION,
    metrics.ENTROPY, metrics.GRAD_NORM, metrics.EVALUATION_ACCURACY, metrics.COMPRESSION_RATIO, metrics.CHANGED_RATIO,
)  # fmt: skip


WAITS = ("groups", "publication")
"""What a step may have waited for."""


def observe_step(
    report: StepReport,
    groups: Sequence[QueuedGroup],
    *,
    head_version: int,
    held_s: Sequence[float],
    waited_s: Mapping[str, float] = MappingProxyType({}),
) -> None:
    """Export one step; staleness is counted from the coordinator's head, so that a restart cannot inflate it.

    Args:
        report: the step.
        groups: those it trained on.
        head_version: the version that the step builds on.
        held_s: for each group, seconds since it arrived here; added to its age, which the coordinator stated then.
        waited_s: seconds since the step before in which nothing was computed, by one of WAITS.
    """
    for what in WAITS:
        metrics.WAITED_SECONDS.labels(what).inc(waited_s.get(what, 0.0))
    metrics.STEPS.labels(str(report.is_applied).lower()).inc()
    metrics.STEP_SECONDS.observe(report.step_s)
    metrics.TOKENS.inc(report.num_tokens)
    metrics.LAST_STEP_TIMESTAMP.set_to_current_time()
    for queued, held in zip(groups, held_s, strict=True):
        site = metrics.SITES.of(queued.group.id.site)
        metrics.STALENESS_VERSIONS.labels(site).observe(head_version - queued.group.oldest_version)
        metrics.POLICY_AGE_SECONDS.labels(site).observe(queued.policy_age_s + held)
        metrics.INBOX_SECONDS.observe(held)
        trace = queued.group.trace
        TRACER.add("inbox", trace=trace, lasted_s=held - report.step_s, ended_ago_s=report.step_s)
        TRACER.add(
            "train",
            trace=trace,
            lasted_s=report.step_s,
            attributes={
                "step": report.step,
                "staleness": head_version - queued.group.oldest_version,
                "is_applied": report.is_applied,
            },
        )
    metrics.LOSS.set(report.loss)
    metrics.REWARD.set(report.reward_mean)
    metrics.KL.set(report.kl)
    metrics.ESS.set(report.ess_fraction)
    metrics.IW_VARIANCE.set(report.iw_variance)
    metrics.CLIP_FRACTION.set(report.clip_fraction)
    metrics.ENTROPY.set(report.entropy)
    metrics.GRAD_NORM.set(report.grad_norm)
    _LOG.info(
        "step %d: loss %.4g, reward %.3f, staleness up to %d versions, %d tokens in %.2f s, after waiting %.2f s for"
        " groups and %.2f s for a publication",
        report.step,
        report.loss,
        report.reward_mean,
        report.staleness_max,
        report.num_tokens,
        report.step_s,
        *(waited_s.get(what, 0.0) for what in WAITS),
    )


def observe_start() -> None:
    """Say that nothing is known yet: times begin now, numbers are NaN, counters exist, so that no alert is misled."""
    metrics.LAST_STEP_TIMESTAMP.set_to_current_time()
    metrics.LAST_PUBLISH_TIMESTAMP.set_to_current_time()
    for gauge in _NUMBERS:
        gauge.set(math.nan)
    # A counter that appears with its first count shows no increase.
    for applied in ("true", "false"):
        metrics.STEPS.labels(applied)
    for what in WAITS:
        metrics.WAITED_SECONDS.labels(what)
    for kind in ("delta", "snapshot"):
        metrics.VERSIONS.labels(kind)
    for outcome in ("sent", "given_up"):
        metrics.SAMPLE_NOTES.labels(outcome)


def observe_version(manifest: Manifest, *, encode_s: float, publish_s: float) -> None:
    """Export one published version."""
    metrics.LEARNER_VERSION.set(manifest.version)
    metrics.LAST_PUBLISH_TIMESTAMP.set_to_current_time()
    metrics.ENCODE_SECONDS.observe(encode_s)
    metrics.VERSION_ENCODE_SECONDS.set(encode_s)
    metrics.PUBLISH_SECONDS.observe(publish_s)
    metrics.FULL_BYTES.set(manifest.full_bytes)
    if manifest.num_elements:
        metrics.CHANGED_RATIO.set(manifest.num_changed / manifest.num_elements)
    for payload in manifest.payloads:
        metrics.VERSION_BYTES.labels(payload.kind.value).set(payload.num_bytes)
    kinds = {payload.kind for payload in manifest.payloads}
    metrics.VERSIONS.labels("delta" if PayloadKind.DELTA in kinds else "snapshot").inc()
    metrics.COMPRESSION_RATIO.set(manifest.full_bytes / min(payload.num_bytes for payload in manifest.payloads))
