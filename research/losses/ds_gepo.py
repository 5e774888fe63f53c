"""GEPO with a defensive mixture as denominator: (1 - a) E + a sg(p), so weights never exceed 1 / a."""

from __future__ import annotations

from heterorl.learner.loss.custom import LossBatch, LossOutput
from heterorl.learner.loss.importance import defensive_log_denominators
from heterorl_research.losses.parts import clipped, learner_means, minimised


def loss(
    batch: LossBatch, *, eps_low: float = 0.2, eps_high: float = 0.2, defensive_fraction: float = 0.005
) -> LossOutput:
    """GEPO's objective with that denominator; a is `defensive_fraction`."""
    means_B = learner_means(batch)
    denominators_B = defensive_log_denominators(batch.log_expectations_B, means_B, fraction=defensive_fraction)
    return minimised(batch, clipped(batch, (means_B - denominators_B)[:, None], eps_low=eps_low, eps_high=eps_high))
