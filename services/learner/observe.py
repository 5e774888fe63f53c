"""Numbers of a step to metrics; the step's own log line."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from services.common import metrics
from services.common.types import QueuedGroup, StepReport

_LOG = logging.getLogger(__name__)


def observe_step(report: StepReport, groups: Sequence[QueuedGroup], *, head_version: int) -> None:
    """Export one step; staleness is counted from the coordinator's head, so that a restart cannot inflate it."""
    metrics.STEPS.labels(str(report.is_applied).lower()).inc()
    metrics.STEP_SECONDS.observe(report.step_s)
    metrics.TOKENS.labels("learner").inc(report.num_tokens)
    for queued in groups:
        metrics.STALENESS_VERSIONS.observe(head_version - queued.group.oldest_version)
        metrics.POLICY_AGE_SECONDS.observe(queued.policy_age_s)
    metrics.LOSS.set(report.loss)
    metrics.REWARD.set(report.reward_mean)
    metrics.KL.set(report.kl)
    metrics.ESS.set(report.ess_fraction)
    metrics.IW_VARIANCE.set(report.iw_variance)
    metrics.CLIP_FRACTION.set(report.clip_fraction)
    metrics.ENTROPY.set(report.entropy)
    metrics.GRAD_NORM.set(report.grad_norm)
    _LOG.info(
        "step %d: loss %.4g, reward %.3f, staleness up to %d versions, %d tokens in %.2f s",
        report.step,
        report.loss,
        report.reward_mean,
        report.staleness_max,
        report.num_tokens,
        report.step_s,
    )
