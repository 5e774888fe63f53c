"""Advantages of the rollouts of one whole group.

Guarantees: finite for finite rewards, also in groups of one and in groups whose rewards are all equal; rollouts
without tokens get zero and do not move the others. Never sees part of a group. Suffix: G group members.
"""

from __future__ import annotations

import torch

from services.learner.loss_config import Advantage

STD_FLOOR = 1e-4


def group_advantages(rewards_G: torch.Tensor, is_valid_G: torch.Tensor, *, kind: Advantage) -> torch.Tensor:
    """Centre rewards on their group: A = r - mean(r), or A = (r - mean(r)) / (std(r) + 1e-4).

    Source: arXiv 2508.17850 section 2.1 (mean) and arXiv 2402.03300 section 4.1 (mean_std); std has ddof 1.

    Args:
        rewards_G: float64 [G].
        is_valid_G: bool [G]; False for a rollout without tokens.
        kind: which of the two.

    Returns:
        float64 [G]; 0 where not valid.
    """
    assert rewards_G.dim() == 1
    assert rewards_G.shape == is_valid_G.shape
    assert rewards_G.dtype == torch.float64
    valid = rewards_G[is_valid_G]
    advantages_G = torch.zeros_like(rewards_G)
    if valid.numel() < 2:
        return advantages_G  # a single rollout has nothing to be compared with, and its ddof-1 deviation is 0 / 0
    centred = valid - valid.mean()
    advantages_G[is_valid_G] = centred if kind == "mean" else centred / (valid.std(correction=1) + STD_FLOOR)
    return advantages_G
