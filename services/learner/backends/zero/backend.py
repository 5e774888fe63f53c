"""DeepSpeed's ZeRO with fp32 masters as a TrainBackend: what is DeepSpeed's own beside `ranks.backend`."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from heterorl.common.model import tensors
from heterorl.common.process.clock import Clock
from heterorl.common.types.common import SamplingSemantics
from heterorl.learner import progress
from heterorl.learner.backends.loading.opened import hold_untrained
from heterorl.learner.backends.ranks.backend import DividedBackend
from heterorl.learner.backends.ranks.collectives import Collectives
from heterorl.learner.backends.ranks.division import (
    Division,
    check_divisible,
    check_experts,
    check_products,
    untrained_buffers,
)
from heterorl.learner.backends.ranks.opening import open_together
from heterorl.learner.backends.zero.engine import build_engine
from heterorl.learner.backends.zero.state import ZeroState
from heterorl.learner.loss.config import LossConfig
from heterorl.learner.train.config import DeepSpeedBackendConfig
from heterorl.learner.train.kernels import apply_liger, choose_attention, compile_forward
from heterorl.learner.train.stand_in import Rounding
from heterorl.learner.train.step import apply_gradients


class DeepSpeedBackend(DividedBackend):
    """One rank of a learner whose model DeepSpeed divides."""

    def __init__(
        self,
        *,
        model_dir: str | Path,
        config: DeepSpeedBackendConfig,
        loss: LossConfig,
        sampling: SamplingSemantics,
        ranks: Collectives,
        clock: Clock | None = None,
        passes: progress.PassCount | None = None,
    ) -> None:
        """Load the model, check that it can be trained this way, and divide it.

        Raises:
            DependencyMissing: DeepSpeed is not installed.
            ConfigError: the model cannot be loaded or trained in the chosen layout, the device does not exist, or the
                loss depends on how a step is cut into passes or on a reference model.
        """
        check_divisible(loss, ranks, has_reference=False)
        super().__init__(
            division=_ZeroDivision(model_dir, config, temperature=sampling.logprob_temperature, ranks=ranks),
            config=config,
            loss=loss,
            sampling=sampling,
            ranks=ranks,
            clock=clock,
            passes=passes,
        )


class _ZeroDivision(Division):
    """See Division."""

    def __init__(
        self, model_dir: str | Path, config: DeepSpeedBackendConfig, *, temperature: float, ranks: Collectives
    ) -> None:
        opened = open_together(model_dir, config, ranks)
        hold_untrained(opened)
        self.model = opened.model
        if config.stage == 3:
            check_experts(self.model, ranks)
        if config.stage and config.compute_dtype == "bf16":
            check_products(self.model)
        # After the check, which is on the CPU.
        choose_attention(self.model, config)
        apply_liger(self.model, config)
        self.layout = tensors.layout_of(self.model, config.published_dtype)
        self._config = config
        built = build_engine(opened, config, temperature=temperature, ranks=ranks)
        self.engine: Any = built.engine
        self.buffers = untrained_buffers(self.model, self.layout)
        self.state: ZeroState = built.state
        self.device = built.device
        compile_forward(self.model, config)
        self._rounding: Rounding | None = None
        if config.forward_weights == "published" and config.stage == 0:
            # Without the dead band, which counts from an arena that rank 0 alone has: ranks must compute alike.
            self._rounding = Rounding(self.model, self.layout, dead_band_ulp=0.0)

    def computing(self) -> AbstractContextManager[None]:
        """See Division."""
        return contextlib.nullcontext() if self._rounding is None else self._rounding.applied()

    def update(self, loss: float, lr: float) -> tuple[bool, float]:
        """Clip and step; DeepSpeed leaves everything alone when the gradient is not finite."""
        optimizer = self.engine.optimizer
        if self._config.stage == 0:
            return apply_gradients(
                self.model.parameters(), optimizer, loss=loss, lr=lr, grad_clip=self._config.grad_clip
            )
        for options in optimizer.param_groups:
            options["lr"] = lr
        self.engine.step()
        self.settle()
        return not optimizer.overflow, float(optimizer._global_grad_norm)

    def settle(self) -> None:
        """Stages 1 to 3: DeepSpeed wrote the masters into what the model computes with; make it what is published."""
        if self._config.forward_weights == "published" and self._config.stage:
            self.state.round_copies({spec.name: tensors.TORCH_DTYPE[spec.dtype] for spec in self.layout.specs})
