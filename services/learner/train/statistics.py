"""Numbers of one optimizer step: pure functions of what its micro-batches and groups left behind.

Suffixes: M importance weights, B sequences, N completion tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from heterorl.common.types.common import StepReport
from heterorl.common.types.rollout import QueuedGroup
from heterorl.learner.train.extras import SequenceSample, ess_fraction


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MicroBatchSample:
    """What one micro-batch measured; all on the CPU, float64, without gradient.

    `weights_M` and `is_clipped_M` are per sequence or per token, as the loss counts; `kl_B` is summed over tokens;
    `sequences` is what `extras` compares algorithms by.
    """

    loss: float
    weights_M: torch.Tensor
    is_clipped_M: torch.Tensor
    kl_B: torch.Tensor
    entropies_N: torch.Tensor
    sequences: SequenceSample


def mean(values: torch.Tensor) -> float:
    """Arithmetic mean; 0 of nothing."""
    return float(values.double().mean()) if values.numel() else 0.0


def build_report(
    samples: Sequence[MicroBatchSample],
    groups: Sequence[QueuedGroup],
    *,
    step: int,
    head_version: int,
    grad_norm: float,
    step_s: float,
    is_applied: bool,
) -> StepReport:
    """Close a step.

    `version` is the one this step leads to, head_version + 1. `kl` estimates KL(q || p) of whole sequences in nats:
    mean over rollouts of sum_t k3_t (see `losses.kl_estimates`); the plain sum of log q - log p has the same
    expectation, can be negative and varies far more. `ess_fraction` and `iw_variance` (ddof 0) are of the weights the
    loss used. `entropy` is a mean over tokens; staleness and policy age are over groups.
    """
    weights_M = _concatenate([sample.weights_M for sample in samples])
    kl_B = _concatenate([sample.kl_B for sample in samples])
    entropies_N = _concatenate([sample.entropies_N for sample in samples])
    staleness = [head_version - queued.group.oldest_version for queued in groups]
    rewards = [rollout.reward for queued in groups for rollout in queued.group.rollouts]
    return StepReport(
        step=step,
        version=head_version + 1,
        loss=sum(sample.loss for sample in samples),
        reward_mean=float(np.mean(rewards)) if rewards else 0.0,
        kl=mean(kl_B),
        ess_fraction=ess_fraction(weights_M),
        iw_variance=float(weights_M.var(correction=0)) if weights_M.numel() else 0.0,
        clip_fraction=mean(_concatenate([sample.is_clipped_M.double() for sample in samples])),
        entropy=mean(entropies_N),
        grad_norm=grad_norm,
        staleness_mean=float(np.mean(staleness)) if staleness else 0.0,
        staleness_max=max(staleness, default=0),
        policy_age_p50_s=float(np.median([queued.policy_age_s for queued in groups])) if groups else 0.0,
        num_groups=len(groups),
        num_tokens=entropies_N.numel(),
        step_s=step_s,
        is_applied=is_applied,
    )


def _concatenate(parts: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64)
