"""Numbers of one whole group: advantages, and denominators of sequence probabilities.

Guarantees: float64, from rewards and sampler log-probs only, so any split into micro-batches gives the same; finite for
finite input, also in groups of one and of equal rewards. Never sees part of a group. Suffixes: G group members, P
unique prompts of a step, T tokens.
"""

import math

import torch

from heterorl.common.errors import ConfigError
from heterorl.learner.loss.loss_config import Advantage, Denominator
from heterorl.learner.loss.loss_spec import LossSpec

STD_FLOOR = 1e-4
MIN_BETA_RANGE = 1e-9
"""Prompts whose mean rewards differ by less count as alike."""
MAX_BETA_WEIGHT = 1e6
"""Largest 1 / density; where the density vanishes a prompt's rewards are all equal and centre to 0."""


def masked_mean(values_GT: torch.Tensor, mask_GT: torch.Tensor) -> torch.Tensor:
    """Mean over each row's marked tokens; 0 for a row without any."""
    assert values_GT.shape == mask_GT.shape
    assert mask_GT.dtype == torch.bool
    counts_G = mask_GT.sum(1).clamp(min=1)
    return torch.where(mask_GT, values_GT, 0.0).sum(1) / counts_G


def group_log_denominator(mean_logprobs_G: torch.Tensor, *, kind: Denominator) -> float:
    """Log of a mean of q_i over the group.

    q_i = exp(mean token log-prob of rollout i); logarithms are float64 [G]. contraharmonic: log E = LSE(2 l) - LSE(l),
    that is sum q^2 / sum q, arXiv 2508.17850 equation 2 with the length normalisation of its reference implementation;
    arithmetic: LSE(l) - log G; geometric: mean(l). For leave_one_out, one for each rollout, see `log_denominators`.
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


def log_denominators(spec: LossSpec, log_probs_G: torch.Tensor) -> torch.Tensor:
    """Log of each rollout's denominator, float64 [G], over one whole group.

    `log_probs_G` are means (or, raw, sums) of the sampler's token log-probs. The expectation over learner probabilities
    is not known yet; contraharmonic stands in for it.
    """
    if spec.denominator == "own":
        return log_probs_G
    if spec.denominator == "leave_one_out":
        return _others_log_denominators(log_probs_G)
    kind: Denominator = "contraharmonic" if spec.denominator == "expected_learner" else spec.denominator
    return torch.full_like(log_probs_G, group_log_denominator(log_probs_G, kind=kind))


def _others_log_denominators(log_probs_G: torch.Tensor) -> torch.Tensor:
    """Log of the other members' contraharmonic mean, float64 [G].
    A single member has its own probability."""
    num_members = log_probs_G.numel()
    if num_members < 2:
        return log_probs_G
    others = ~torch.eye(num_members, dtype=torch.bool, device=log_probs_G.device)
    others_GG = log_probs_G.expand(num_members, num_members).masked_fill(~others, -math.inf)
    return torch.logsumexp(2.0 * others_GG, 1) - torch.logsumexp(others_GG, 1)


def expected_learner_log_denominator(learner_means_G: torch.Tensor, sampler_means_G: torch.Tensor) -> torch.Tensor:
    """Log of sum_j q^_j p_j with q^_j = q_j / sum q.
    A float64 scalar; both arguments are mean token log-probs."""
    assert learner_means_G.shape == sampler_means_G.shape
    shares_G = sampler_means_G - torch.logsumexp(sampler_means_G, 0)
    return torch.logsumexp(shares_G + learner_means_G, 0)


def group_advantages(rewards_G: torch.Tensor, *, kind: Advantage) -> torch.Tensor:
    """Centre rewards on their group: A = r - mean(r).

    mean_std also divides by std(r) + 1e-4. Source: arXiv 2508.17850 section 2.1 (mean) and arXiv 2402.03300 section 4.1
    (mean_std); std has ddof 1. beta gives mean, to be multiplied by the prompt's `beta_weights`.
    """
    assert rewards_G.dim() == 1
    assert rewards_G.dtype == torch.float64
    if rewards_G.numel() < 2:
        return torch.zeros_like(rewards_G)
    centred_G = rewards_G - rewards_G.mean()
    # Masks read the sign, and a reward may differ from an equal mean by rounding.
    rounding = rewards_G.numel() * torch.finfo(rewards_G.dtype).eps * rewards_G.abs().max()
    centred_G = torch.where(centred_G.abs() <= rounding, 0.0, centred_G)
    return centred_G / (rewards_G.std(correction=1) + STD_FLOOR) if kind == "mean_std" else centred_G


def beta_weights(means_P: torch.Tensor) -> torch.Tensor:
    """1 / Beta(p; alpha, beta) for each prompt, at most 1e6.

    The prompts are a step's: BNPO, arXiv 2506.02864 equations 9 to 12. alpha = 1 + a / 3 and beta = 1 + b / 3, each at
    least 1, with the moments' a = (m (1 - m) / v - 1) m and b = (m (1 - m) / v - 1) (1 - m); m and v (ddof 1) are mean
    and variance of p over the unique prompts. Prompts that are all alike, or a single one, determine no density: their
    weights are 1. `means_P` are mean rewards; raises ConfigError for one outside [0, 1], where Beta has no meaning.
    """
    assert means_P.dim() == 1
    assert means_P.dtype == torch.float64
    if ((means_P < 0.0) | (means_P > 1.0)).any():
        problem = "beta needs rewards in [0, 1]; this step has others"
        raise ConfigError("loss.advantage", problem, action="scale the rewards, or choose mean or mean_std")
    # Equal means differ by rounding, and a variance of 1e-33 would be a density of all weight on one point.
    if means_P.numel() < 2 or float(means_P.max() - means_P.min()) < MIN_BETA_RANGE:
        return torch.ones_like(means_P)
    variance = float(means_P.var(correction=1))
    mean = float(means_P.mean())
    scale = mean * (1.0 - mean) / variance - 1.0
    alpha, beta = max(1.0 + scale * mean / 3.0, 1.0), max(1.0 + scale * (1.0 - mean) / 3.0, 1.0)
    log_norm = math.lgamma(alpha + beta) - math.lgamma(alpha) - math.lgamma(beta)
    # xlogy: at p = 0 or 1 an exponent of 0 gives 0 and not 0 * -inf.
    log_density_P = (
        log_norm
        + torch.special.xlogy(torch.full_like(means_P, alpha - 1.0), means_P)
        + torch.special.xlogy(torch.full_like(means_P, beta - 1.0), 1.0 - means_P)
    )
    return torch.exp(-log_density_P).clamp(max=MAX_BETA_WEIGHT)
