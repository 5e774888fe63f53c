"""Which rollouts and tokens take part in the policy loss: pure selections without gradient.

Suffixes: B sequences, T completion tokens, N tokens of the whole step.
"""

from __future__ import annotations

import torch

from heterorl.learner.loss.denominators import masked_mean


def has_not_drifted(
    learner_BT: torch.Tensor,
    sampler_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    advantages_B: torch.Tensor,
    *,
    limit: float,
    is_total: bool = False,
) -> torch.Tensor:
    """Off-policy sequence mask of DeepSeek-V3.2: False where A < 0 and mean_t(log q - log p) > limit; bool [B].

    With `is_total` the sum over the completion takes the mean's place.

    Args:
        learner_BT: log p.
        sampler_BT: log q.
        mask_BT: bool, True at completion tokens.
        advantages_B: A.
        limit: nats.
        is_total: whether the limit is for the whole completion, not for its mean token.
    """
    drift_BT = torch.where(mask_BT, sampler_BT.detach() - learner_BT.detach(), 0.0)
    drift_B = drift_BT.sum(1) if is_total else masked_mean(drift_BT, mask_BT)
    return ~((advantages_B < 0) & (drift_B > limit))


def within_second_moment(log_ratios_N: torch.Tensor, advantages_N: torch.Tensor, *, budget: float) -> torch.Tensor:
    """M2PO's token selection over a whole step, arXiv 2510.01161 section 4; bool [N].

    Harmful tokens, A > 0 with r > 1 or A < 0 with r < 1, are left out from the largest (log r)^2 down until the mean
    of (log r)^2 over those that remain is at most the budget; all others stay. The selection is exact, so all the
    step's tokens are needed at once. Of equal squares the earlier token stays.

    Args:
        log_ratios_N: log p - log q.
        advantages_N: A of each token's rollout.
        budget: tau, positive.
    """
    assert log_ratios_N.dim() == 1
    assert log_ratios_N.shape == advantages_N.shape
    is_kept_N = torch.ones_like(log_ratios_N, dtype=torch.bool)
    harmful = torch.nonzero(log_ratios_N * advantages_N > 0)[:, 0]
    squares, order = torch.sort(log_ratios_N[harmful].double() ** 2, stable=True)
    means = torch.cumsum(squares, 0) / torch.arange(1, squares.numel() + 1, device=squares.device)
    # Ascending squares have ascending means, so those within the budget are a prefix.
    is_kept_N[harmful[order[means > budget]]] = False
    return is_kept_N
