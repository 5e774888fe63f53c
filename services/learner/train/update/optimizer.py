"""The optimizers, and what each keeps of a parameter between two steps.

    adamw       two moments as large as the parameter: 8 bytes of each element; any piece of a parameter by itself
    adafactor   arXiv 1804.04235: of a matrix the mean square of each row and of each column, of a vector of each
                element, and no first moment

Adafactor needs whole matrices: columns, the size of a parameter and that of its update are sums over all rows, so a
rank that has some of them would take another step than one that has all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import nn

from heterorl.learner.train.update.schedule import OptimizerName

STEP = "step"
"""Beside the moments of every parameter: how many steps they have seen."""
_EPSILONS = (1e-16, 1e-3)


def build_optimizer(
    parameters: Iterable[nn.Parameter],
    *,
    optimizer: OptimizerName,
    lr: float,
    betas: tuple[float, float],
    weight_decay: float,
) -> torch.optim.Optimizer:
    """The optimizer that is configured, before its first step."""
    if optimizer == "adafactor":
        # torch's own first epsilon, 1.2e-7, is above the mean square of a gradient of norm 1 of ten million elements.
        return torch.optim.Adafactor(parameters, lr=lr, eps=_EPSILONS, weight_decay=weight_decay)
    return torch.optim.AdamW(parameters, lr=lr, betas=betas, weight_decay=weight_decay)


def moments_of(optimizer: OptimizerName, shape: torch.Size) -> Mapping[str, torch.Size]:
    """Names and shapes of what is kept of a parameter beside its count of steps; all of it fp32."""
    if optimizer == "adamw":
        return {"exp_avg": shape, "exp_avg_sq": shape}
    if len(shape) < 2:
        return {"variance": shape}
    return {
        "row_var": torch.Size((*shape[:-1], 1)),
        "col_var": torch.Size((*shape[:-2], 1, shape[-1])),
    }
