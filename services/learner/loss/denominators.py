"""What the learner's sequence probability is divided by, as log values over one whole group.

Guarantees: computed in float64 from sampler log-probs alone, by logsumexp, so it is the same number under any split
of the group into micro-batches and finite for any finite log-probs.
Suffixes: G group members, T tokens.
"""

from __future__ import annotations

import math

import torch

from heterorl.learner.loss.config import Denominator
from heterorl.learner.loss.rule import Rule


def masked_mean(values_GT: torch.Tensor, mask_GT: torch.Tensor) -> torch.Tensor:
    """Mean over the marked tokens of each row; 0 for a row without any."""
    assert values_GT.shape == mask_GT.shape
    assert mask_GT.dtype == torch.bool
    counts_G = mask_GT.sum(1).clamp(min=1)
    return torch.where(mask_GT, values_GT, 0.0).sum(1) / counts_G


def group_log_denominator(mean_logprobs_G: torch.Tensor, *, kind: Denominator) -> float:
    """Log of a mean of q_i = exp(mean token log-prob of rollout i) over the group.

    contraharmonic: log E = LSE(2 l) - LSE(l), that is sum q^2 / sum q, arXiv 2508.17850 equation 2 with the length
    normalisation of its reference implementation; arithmetic: LSE(l) - log G; geometric: mean(l). leave_one_out has one
    for each rollout: see `log_denominators`.

    Args:
        mean_logprobs_G: float64 [G], mean sampler log-prob of each rollout.
        kind: which mean.
    """
    assert mean_logprobs_G.dim() == 1
    assert mean_logprobs_G.dtype == torch.float64
    assert kind != "leave_one_out"
    if kind == "geometric":
        return float(mean_logprobs_G.mean())
    log_sum = torch.logsumexp(mean_logprobs_G, 0)
    if kind == "arithmetic":
        return float(log_sum) - math.log(mean_logprobs_G.numel())
    return float(torch.logsumexp(2.0 * mean_logprobs_G, 0) - log_sum)


def log_denominators(rule: Rule, log_probs_G: torch.Tensor) -> torch.Tensor:
    """Log of what each rollout's probability is divided by, float64 [G], over one whole group.

    Args:
        rule: says whether a rollout is divided by its own probability or by a mean of the group's. The expectation
            over learner probabilities is not known yet; contraharmonic stands in for it.
        log_probs_G: float64 [G], mean (or, raw, sum) of the sampler's token log-probs of each rollout.
    """
    if rule.denominator == "own":
        return log_probs_G
    if rule.denominator == "leave_one_out":
        return _others_log_denominators(log_probs_G)
    kind: Denominator = "contraharmonic" if rule.denominator == "expected_learner" else rule.denominator
    return torch.full_like(log_probs_G, group_log_denominator(log_probs_G, kind=kind))


def _others_log_denominators(log_probs_G: torch.Tensor) -> torch.Tensor:
    """Contraharmonic mean of the other members, float64 [G]; a member that is alone has its own probability."""
    num_members = log_probs_G.numel()
    if num_members < 2:
        return log_probs_G
    others = ~torch.eye(num_members, dtype=torch.bool, device=log_probs_G.device)
    others_GG = log_probs_G.expand(num_members, num_members).masked_fill(~others, -math.inf)
    return torch.logsumexp(2.0 * others_GG, 1) - torch.logsumexp(others_GG, 1)


def expected_learner_log_denominator(learner_means_G: torch.Tensor, sampler_means_G: torch.Tensor) -> torch.Tensor:
    """Log of sum_j q^_j p_j with q^_j = q_j / sum q, float64 scalar; both arguments are mean token log-probs."""
    assert learner_means_G.shape == sampler_means_G.shape
    shares_G = sampler_means_G - torch.logsumexp(sampler_means_G, 0)
    return torch.logsumexp(shares_G + learner_means_G, 0)
