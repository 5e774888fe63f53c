"""GEPO without upper clip for good rollouts; of the step's bad ones, those of the largest ratios count 1.

Suffixes: B sequences of a pass, N rollouts of the step.
"""

from __future__ import annotations

import dataclasses
import math

import torch

from heterorl.learner.loss.custom import LossBatch, LossOutput
from heterorl.learner.loss.objectives import with_likelihood_of_bad
from heterorl_research.losses.gepo_tempered import log_effective_share
from heterorl_research.losses.parts import log_products, minimised, one_sided_gepo


def loss(
    batch: LossBatch, step: LossBatch, *, eps_low: float = 0.2, eps_high: float = 100.0, negative_keep: float = 0.3
) -> LossOutput:
    """A >= 0: GEPO; A < 0: A log p for rollouts `within_quantile`, nothing for the others."""
    objective = one_sided_gepo(batch, eps_low=eps_low, eps_high=eps_high)
    ones_B1 = torch.zeros_like(batch.advantages_B)[:, None]
    objective = with_likelihood_of_bad(objective, batch.learner_BT, batch.advantages_B[:, None], ones_B1)
    is_kept_B = within_quantile(log_products(step), step.advantages_B, least=negative_keep)[batch.rows_B]
    output = minimised(batch, objective)
    return dataclasses.replace(output, losses=torch.where(is_kept_B[:, None], output.losses, 0.0))


def within_quantile(log_products_N: torch.Tensor, advantages_N: torch.Tensor, *, least: float) -> torch.Tensor:
    """False where A < 0 and z is not among the largest k n of the step's n rollouts with A < 0; bool [N].

    k = max(least, effective share of e^z over those n), so that nothing is left out while all ratios are alike. The
    threshold is a quantile of z itself: adding a constant to all z changes nothing. Equal z share a side.

    Args:
        log_products_N: z, log ratios of whole rollouts.
        advantages_N: A of each rollout.
        least: in (0, 1].
    """
    assert log_products_N.dim() == 1
    assert log_products_N.shape == advantages_N.shape
    is_bad_N = advantages_N < 0
    bad = log_products_N[is_bad_N].double()
    if not bad.numel():
        return torch.ones_like(is_bad_N)
    share = max(least, math.exp(float(log_effective_share(bad))))
    # Shares such as .3 of 10 are 3 and a rounding; that of equal ratios may be 1 and a rounding.
    count = min(bad.numel(), math.ceil(share * bad.numel() - 1e-9))
    threshold = bad.sort(descending=True).values[count - 1]
    return ~is_bad_N | (log_products_N.double() >= threshold)
