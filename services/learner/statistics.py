"""Numbers of one optimizer step, gathered over its micro-batches: pure accumulation, no decisions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from services.common.types import QueuedGroup, StepReport


class StepStatistics:
    """Accumulates over micro-batches; `report` closes the step."""

    def __init__(self) -> None:
        self._weights: list[Tensor] = []
        self._num_clipped = 0
        self._num_terms = 0
        self._kl_sum = 0.0
        self._entropy_sum = 0.0
        self._num_tokens = 0
        self._num_sequences = 0

    @torch.no_grad()
    def add(
        self,
        *,
        weights: Tensor,
        is_clipped: Tensor,
        learner_logprobs_BT: Tensor,
        sampler_logprobs_BT: Tensor,
        entropy_BT: Tensor,
        mask_BT: Tensor,
    ) -> None:
        """Take in one micro-batch; weights are per sequence [B] or per token [B, T]."""
        # A token-level method has one term per completion token; padding is none.
        chosen = weights[mask_BT > 0] if weights.ndim == 2 else weights
        self._weights.append(chosen.double().cpu())
        self._num_terms += chosen.numel()
        self._num_clipped += int(is_clipped.sum())
        self._kl_sum += float(((sampler_logprobs_BT - learner_logprobs_BT) * mask_BT).sum())
        self._entropy_sum += float((entropy_BT * mask_BT).sum())
        self._num_tokens += int(mask_BT.sum())
        self._num_sequences += len(mask_BT)

    def report(
        self,
        *,
        step: int,
        head_version: int,
        loss: float,
        grad_norm: float,
        step_s: float,
        is_applied: bool,
        groups: Sequence[QueuedGroup],
    ) -> StepReport:
        """Close the step.

        ess_fraction = (sum w)^2 / (N sum w^2); kl = mean over sequences of sum_t (log q - log p), the estimate of
        KL(q || p) on samples of q; staleness = head version - oldest version of the group.
        """
        weights = torch.cat(self._weights) if self._weights else torch.ones(1, dtype=torch.float64)
        square_sum = float((weights**2).sum())
        staleness = [head_version - queued.group.oldest_version for queued in groups]
        rewards = [rollout.reward for queued in groups for rollout in queued.group.rollouts]
        tokens = max(self._num_tokens, 1)
        return StepReport(
            step=step,
            version=head_version + 1,
            loss=loss,
            reward_mean=float(np.mean(rewards)) if rewards else 0.0,
            kl=self._kl_sum / max(self._num_sequences, 1),
            ess_fraction=float(weights.sum()) ** 2 / (len(weights) * square_sum) if square_sum > 0 else 0.0,
            iw_variance=float(weights.var(correction=0)),
            clip_fraction=self._num_clipped / max(self._num_terms, 1),
            entropy=self._entropy_sum / tokens,
            grad_norm=grad_norm,
            staleness_mean=float(np.mean(staleness)) if staleness else 0.0,
            staleness_max=max(staleness, default=0),
            policy_age_p50_s=float(np.median([queued.policy_age_s for queued in groups])) if groups else 0.0,
            num_groups=len(groups),
            num_tokens=self._num_tokens,
            step_s=step_s,
            is_applied=is_applied,
        )
