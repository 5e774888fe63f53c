"""VCPO, arXiv 2602.17616: truncated ratios of rollouts, optimal off-policy baseline; its step size is `ess_uncapped`.

Suffixes: B sequences of a pass, S of the whole step, G members of a group, T completion tokens.
"""

from __future__ import annotations

import torch

from heterorl.learner.loss.custom import LossBatch, LossOutput
from heterorl.learner.loss.objectives import score_objective
from heterorl_research.losses.parts import by_group, log_products, minimised


def loss(batch: LossBatch, step: LossBatch, *, cap: float = 8.0) -> LossOutput:
    """sg(min(e^z, cap)) (A - b) log p, b the group's `optimal_baseline`."""
    objective = score_objective(
        log_products(batch)[:, None],
        batch.learner_BT,
        _advantages(step)[batch.rows_B][:, None],
        low=0.0,
        high=cap,
        max_log_weight=batch.max_log_weight,
    )
    return minimised(batch, objective)


def _advantages(step: LossBatch) -> torch.Tensor:
    logs_S = log_products(step).clamp(max=step.max_log_weight)
    # What the loss multiplies grad log p_i with; 1 / (N T_i) where it is a mean over tokens.
    norms_S = score_square_norm(step.learner_BT) * step.coefficients_BT.amax(1).square()
    return by_group(
        step,
        step.advantages_B,
        lambda advantages_G, rows: advantages_G - optimal_baseline(advantages_G, logs_S[rows], norms_S[rows]),
    )


def optimal_baseline(
    advantages_G: torch.Tensor, log_products_G: torch.Tensor, square_norms_G: torch.Tensor
) -> torch.Tensor:
    """b = sum_i W_i A_i / sum_i W_i with W_i = ||g_i||^2 e^(2 z_i), float64 scalar: arXiv 2602.17616 equation 7.

    The variance of mean_i e^(z_i) (A_i - b) g_i over samples is smallest there (its derivative in b is linear). g_i is
    what the loss takes of a rollout, c_i grad log p_i: c_i is 1 / T_i where it is a mean over tokens. Given
    A = (r - mean) / std, A - b is (r - b') / std with the optimal b' of the rewards. Its authors measure ||g_i|| by one
    backward pass for each rollout.

    Args:
        advantages_G: A of one whole group.
        log_products_G: z, log ratios of whole rollouts.
        square_norms_G: ||g_i||^2 up to a common factor, see `score_square_norm`.
    """
    assert advantages_G.shape == log_products_G.shape == square_norms_G.shape
    logs_G = 2.0 * log_products_G + square_norms_G.clamp(min=torch.finfo(square_norms_G.dtype).tiny).log()
    return (torch.softmax(logs_G, -1) * advantages_G).sum(-1)


def score_square_norm(logprobs_T: torch.Tensor) -> torch.Tensor:
    """sum_t (1 - p_t)^2, which stands for ||grad log p||^2 of a rollout where only its own log-probs are known; scalar.

    The gradient of log p_t by the logits is onehot - softmax, whose square norm is (1 - p_t)^2 + sum over other tokens
    of p^2, between (1 - p_t)^2 and twice that.
    """
    return torch.expm1(logprobs_T.clamp(max=0.0)).square().sum(-1)
