"""AdamW over the weights of many runs, each with its own step size: `torch.optim.AdamW`, written for rows.

Suffixes: R runs, P weights of a model.
"""

from __future__ import annotations

import torch
from torch import Tensor

from heterorl.learner.train.config import TorchBackendConfig

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
        self._steps = 0

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
        beta_first, beta_second = settings.betas
        norms_R = torch.linalg.vector_norm(gradients_RP, dim=1)
        norms: list[float] = norms_R.tolist()
        is_applied_R = norms_R.isfinite() & torch.tensor(is_finite, device=norms_R.device)
        gradients_RP.mul_((settings.grad_clip / (norms_R + 1e-6)).clamp(max=1.0)[:, None])
        kept = None if bool(is_applied_R.all()) else self._copy()
        self._steps += 1
        sizes_R1 = torch.tensor(step_sizes, dtype=torch.float64, device=norms_R.device)[:, None]
        if settings.weight_decay:
            self.masters_RP.mul_((1.0 - sizes_R1 * settings.weight_decay).float())
        self._first_RP.lerp_(gradients_RP, 1.0 - beta_first)
        self._second_RP.mul_(beta_second).addcmul_(gradients_RP, gradients_RP, value=1.0 - beta_second)
        scale = (1.0 - beta_second**self._steps) ** 0.5
        update_RP = torch.sqrt(self._second_RP).div_(scale).add_(EPS)
        torch.div(self._first_RP, update_RP, out=update_RP)
        self.masters_RP.sub_(update_RP.mul_((sizes_R1 / (1.0 - beta_first**self._steps)).float()))
        if kept is not None:
            for now, before in zip((self.masters_RP, self._first_RP, self._second_RP), kept, strict=True):
                now.copy_(torch.where(is_applied_R[:, None], now, before))
        return norms

    def _copy(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.masters_RP.clone(), self._first_RP.clone(), self._second_RP.clone()
