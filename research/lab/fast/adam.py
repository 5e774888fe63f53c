"""AdamW over the weights of many runs, each with its own step size: torch's own, a row at a time.

Suffixes: R runs, P weights of a model.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from heterorl.learner.train.backend_config import TorchBackendConfig

EPS = 1e-8
"""Added to the root of the second moment, torch's default."""


class Adam:
    """Masters and moments, float32 [R, P]; changed in place."""

    def __init__(self, masters_RP: Tensor, settings: TorchBackendConfig) -> None:
        """Start with moments of 0.

        Args:
            masters_RP: the weights.
            settings: decay rates, weight decay and the largest norm of a gradient; step sizes are those of `step`.
        """
        self.masters_RP = masters_RP
        self._first_RP, self._second_RP = torch.zeros_like(masters_RP), torch.zeros_like(masters_RP)
        self._settings = settings
        self._steps = [torch.zeros((), device=masters_RP.device) for _ in masters_RP]

    def step(self, gradients_RP: Tensor, *, step_sizes: list[float], is_finite: list[bool]) -> list[float]:
        """Clip each run's gradient and move its weights; those whose loss or gradient is not finite stay.

        Args:
            gradients_RP: overwritten.
            step_sizes: of the runs.
            is_finite: whether a run's loss is.

        Returns:
            Norms of the gradients before clipping.
        """
        settings = self._settings
        norms_R = torch.linalg.vector_norm(gradients_RP, dim=1)
        # Gradients are divided by it.
        scales_R = ((norms_R + 1e-6) / settings.grad_clip).clamp(min=1.0)
        norms: list[float] = norms_R.tolist()
        rows = zip(
            self.masters_RP.unbind(),
            gradients_RP.unbind(),
            self._first_RP.unbind(),
            self._second_RP.unbind(),
            self._steps,
            scales_R.unbind(),
            step_sizes,
            norms,
            is_finite,
            strict=True,
        )
        for master, gradient, first, second, step, scale, size, norm, is_whole in rows:
            if is_whole and math.isfinite(norm):
                step += 1
                torch._fused_adamw_(
                    [master],
                    [gradient],
                    [first],
                    [second],
                    [],
                    [step],
                    lr=size,
                    beta1=settings.betas[0],
                    beta2=settings.betas[1],
                    weight_decay=settings.weight_decay,
                    eps=EPS,
                    amsgrad=False,
                    maximize=False,
                    grad_scale=scale,
                )
        return norms
