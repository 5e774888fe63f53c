"""What the learner's sequence probability is divided by, as log values over one whole group.

Guarantees: computed in float64 from sampler log-probs alone, by logsumexp, so it is the same number under any split
of the group into micro-batches and finite for any finite log-probs; rollouts without tokens do not enter.
Suffixes: G group members, T tokens.
"""

from __future__ import annotations

import math

import torch

from services.learner.loss_config import Denominator


def masked_mean(values_GT: torch.Tensor, mask_GT: torch.Tensor) -> torch.Tensor:
    """Mean over the marked tokens of each row; 0 for a row without any."""
    assert values_GT.shape == mask_GT.shape
    assert mask_GT.dtype == torch.bool
    counts_G = mask_GT.sum(1).clamp(min=1)
    return torch.where(mask_GT, values_GT, 0.0).sum(1) / counts_G


def group_log_denominator(mean_logprobs_G: torch.Tensor, is_valid_G: torch.Tensor, *, kind: Denominator) -> float:
    """Log of a mean of q_i = exp(mean token log-prob of rollout i) over the group.

    contraharmonic: log E = LSE(2 l) - LSE(l), that is sum q^2 / sum q, arXiv 2508.17850 equation 2 with the length
    normalisation of its reference implementation; arithmetic: LSE(l) - log G; geometric: mean(l).

    Args:
        mean_logprobs_G: float64 [G], mean sampler log-prob of each rollout.
        is_valid_G: bool [G]; False for a rollout without tokens, whose q would otherwise count as 1.
        kind: which mean.

    Returns:
        The log of the mean; 0 for a group without any token.
    """
    assert mean_logprobs_G.dim() == 1
    assert mean_logprobs_G.shape == is_valid_G.shape
    assert mean_logprobs_G.dtype == torch.float64
    valid = mean_logprobs_G[is_valid_G]
    if valid.numel() == 0:
        return 0.0
    if kind == "geometric":
        return float(valid.mean())
    log_sum = torch.logsumexp(valid, 0)
    if kind == "arithmetic":
        return float(log_sum) - math.log(valid.numel())
    return float(torch.logsumexp(2.0 * valid, 0) - log_sum)
