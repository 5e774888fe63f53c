"""GSPO-token, arXiv 2507.18071 section 4.3: the sequence weight with the gradient of each token."""

from __future__ import annotations

from heterorl.learner.loss.custom import LossBatch, LossOutput
from heterorl_research.losses.parts import clipped, learner_means, minimised


def loss(batch: LossBatch, *, eps_low: float = 0.2, eps_high: float = 0.2) -> LossOutput:
    """sg(w) p_t / sg(p_t) with PPO's clip; equals GSPO as long as all tokens of a rollout have one advantage."""
    log_weights_B = learner_means(batch) - batch.sampler_means_B
    log_weights_BT = log_weights_B.detach()[:, None] + (batch.learner_BT - batch.learner_BT.detach())
    return minimised(batch, clipped(batch, log_weights_BT, eps_low=eps_low, eps_high=eps_high))
