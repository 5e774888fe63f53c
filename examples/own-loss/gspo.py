"""GSPO, arXiv 2507.18071 equation 5, as a loss of one's own: docs/own-losses.md says what it is given and returns."""

import torch

from heterorl.learner.loss.custom import LossBatch, LossOutput


def loss(batch: LossBatch, *, eps_low: float = 0.2, eps_high: float = 0.2) -> LossOutput:
    """-min(w A, clip(w) A) of each rollout, w = e^(mean of log p - mean of log q)."""
    learner_means_B = batch.learner_BT.sum(1) / batch.lengths_B
    log_weights_B = (learner_means_B - batch.sampler_means_B).clamp(max=batch.max_log_weight)
    weights_B, good_B = log_weights_B.exp(), batch.advantages_B > 0
    clipped_B = weights_B.clamp(1.0 - eps_low, 1.0 + eps_high)
    is_outside_B = torch.where(good_B, weights_B > clipped_B, (batch.advantages_B < 0) & (weights_B < clipped_B))
    return LossOutput(
        losses=-torch.minimum(weights_B * batch.advantages_B, clipped_B * batch.advantages_B),
        metrics={"weight": weights_B, "good": good_B},
        weights=weights_B,
        is_clipped=is_outside_B,
    )
