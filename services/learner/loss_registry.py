"""From a loss configuration to the functions it names; nothing else in the learner asks for `kind`."""

from __future__ import annotations

import torch

from services.learner.denominators import group_log_denominator
from services.learner.loss_config import GepoConfig, LossConfig
from services.learner.losses import LossTerms, sequence_ratio_loss, token_ratio_loss


def log_denominators(config: LossConfig, mean_logprobs_G: torch.Tensor, is_valid_G: torch.Tensor) -> torch.Tensor:
    """Log of what each rollout's probability is divided by, float64 [G], over one whole group.

    Args:
        config: GEPO divides by the group's mean probability; the others by the rollout's own.
        mean_logprobs_G: float64 [G], mean sampler log-prob of each rollout.
        is_valid_G: bool [G]; False for a rollout without tokens.
    """
    if isinstance(config, GepoConfig):
        log_mean = group_log_denominator(mean_logprobs_G, is_valid_G, kind=config.denominator)
        return torch.full_like(mean_logprobs_G, log_mean)
    return mean_logprobs_G


def policy_loss(
    config: LossConfig,
    *,
    learner_logprobs_BT: torch.Tensor,
    sampler_logprobs_BT: torch.Tensor,
    log_denominators_B: torch.Tensor,
    mask_BT: torch.Tensor,
    advantages_B: torch.Tensor,
    coefficients_BT: torch.Tensor,
) -> LossTerms:
    """Apply the configured loss to one micro-batch; shapes and meaning as in `losses`."""
    if config.kind == "grpo":
        return token_ratio_loss(
            learner_logprobs_BT=learner_logprobs_BT,
            sampler_logprobs_BT=sampler_logprobs_BT,
            mask_BT=mask_BT,
            advantages_B=advantages_B,
            coefficients_BT=coefficients_BT,
            eps_low=config.eps_low,
            eps_high=config.eps_high,
        )
    return sequence_ratio_loss(
        learner_logprobs_BT=learner_logprobs_BT,
        log_denominators_B=log_denominators_B,
        mask_BT=mask_BT,
        advantages_B=advantages_B,
        coefficients_BT=coefficients_BT,
        eps_low=config.eps_low,
        eps_high=config.eps_high,
    )
