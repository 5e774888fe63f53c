"""Token rules that look at the prefix: PNPO, MinPRO and CPPO.

The exact correction of token t is the product of the ratios of tokens 1 to t, whose logarithm grows with t. PNPO and
MinPRO put a tamer ratio in its place, CPPO leaves out tokens behind a prefix that has drifted.

    w_t of PNPO     (prod_{j <= t} r_j)^(1 / t)                      arXiv 2608.01418
    w_t of MinPRO   r_t min_{j < t} r_j, and r_1 for the first       arXiv 2601.22718
    mask of CPPO    see `within_prefix_budget`                       arXiv 2606.10968

How PNPO and MinPRO bound w was not found; here w is a constant and truncated, as in CISPO and TIS.
"""

from __future__ import annotations

import torch

from heterorl.learner.loss.custom import LossBatch, LossOutput
from heterorl.learner.loss.objectives import ratio_objective, score_objective
from heterorl_research.losses.parts import log_ratios


def pnpo(batch: LossBatch, *, cap: float = 2.0) -> LossOutput:
    """sg(min(w_t, cap)) A log p_t with `prefix_means`."""
    return _truncated(batch, prefix_means(log_ratios(batch)), cap=cap)


def minpro(batch: LossBatch, *, cap: float = 2.0) -> LossOutput:
    """sg(min(w_t, cap)) A log p_t with `ratios_by_least`."""
    return _truncated(batch, ratios_by_least(log_ratios(batch)), cap=cap)


def cppo(batch: LossBatch, *, delta: float = 0.2, least_weight: float = 0.8, budget: float = 0.02) -> LossOutput:
    """m_t r_t A, m_t of `within_prefix_budget`; tokens that the update brings back to the sampler always count."""
    ratios_BT = log_ratios(batch)
    objective = ratio_objective(
        ratios_BT, batch.advantages_B[:, None], low=0.0, high=float("inf"), max_log_weight=batch.max_log_weight
    )
    shifts_BT = (batch.learner_BT.detach().exp() - batch.sampler_BT.exp()).abs()
    is_kept_BT = (batch.advantages_B[:, None] * ratios_BT.detach() <= 0.0) | within_prefix_budget(
        shifts_BT, batch.mask_BT, delta=delta, least_weight=least_weight, budget=budget
    )
    return LossOutput(
        losses=torch.where(is_kept_BT, -objective.values, 0.0),
        weights=objective.weights,
        is_clipped=~is_kept_BT | objective.is_clipped,
    )


def _truncated(batch: LossBatch, log_weights_BT: torch.Tensor, *, cap: float) -> LossOutput:
    objective = score_objective(
        log_weights_BT,
        batch.learner_BT,
        batch.advantages_B[:, None],
        low=0.0,
        high=cap,
        max_log_weight=batch.max_log_weight,
    )
    return LossOutput(losses=-objective.values, weights=objective.weights, is_clipped=objective.is_clipped)


def prefix_means(log_ratios_BT: torch.Tensor) -> torch.Tensor:
    """log of the geometric mean of the ratios of tokens 1 to t; [B, T]."""
    return log_ratios_BT.cumsum(1) / _positions(log_ratios_BT)


def ratios_by_least(log_ratios_BT: torch.Tensor) -> torch.Tensor:
    """log r_t plus the least log r_j of the tokens before t, 0 for the first; [B, T]."""
    least_BT = torch.zeros_like(log_ratios_BT)
    least_BT[:, 1:] = log_ratios_BT.cummin(1).values[:, :-1]
    return log_ratios_BT + least_BT


def within_prefix_budget(
    shifts_BT: torch.Tensor, mask_BT: torch.Tensor, *, delta: float, least_weight: float, budget: float
) -> torch.Tensor:
    """Whether a token's probability moved little enough for its place and its prefix; bool [B, T].

    With D = |p - q|, weights w_t that fall evenly from 1 to `least_weight`, and b the .9 quantile of D over the rollout
    within [budget, 2 budget]: w_t D_t <= min(delta, delta + sum_{j < t} w_j (b - D_j)). Equations 8 to 11 of arXiv
    2606.10968 and its authors' code in UniRL, whose defaults these are.

    Args:
        shifts_BT: D; padding is not read.
        mask_BT: drawn tokens.
        delta: largest weighted shift of a token.
        least_weight: weight of the last token.
        budget: mean shift that a prefix may have without a tighter limit.
    """
    shifts_BT = torch.where(mask_BT, shifts_BT, 0.0)
    last_B1 = (mask_BT.sum(1, keepdim=True) - 1).clamp(min=0)
    weights_BT = 1.0 - (1.0 - least_weight) * (_positions(shifts_BT) - 1.0) / last_B1.clamp(min=1)
    sorted_BT = torch.where(mask_BT, shifts_BT, float("inf")).sort(1).values
    place_B1 = 0.9 * last_B1.double()
    low_B1, high_B1 = (sorted_BT.gather(1, place.long()) for place in (place_B1.floor(), place_B1.ceil()))
    allowed_B1 = torch.lerp(low_B1, high_B1, place_B1.frac()).clamp(budget, 2.0 * budget)
    saved_BT = weights_BT * (allowed_B1 - shifts_BT)
    # The sum is over tokens before t.
    limits_BT = (delta + saved_BT.cumsum(1) - saved_BT).clamp(max=delta)
    return weights_BT * shifts_BT <= limits_BT


def _positions(like_BT: torch.Tensor) -> torch.Tensor:
    return torch.arange(1, like_BT.shape[1] + 1, device=like_BT.device, dtype=torch.float64)
