"""Backend of one process and device: fp32 masters and AdamW.

Passes see the masters rounded as they are published. On the CPU a run is a pure function of its inputs, its weights and
the number of threads.
"""

import contextlib
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from torch import nn

from heterorl.common.errors import ConfigError
from heterorl.common.model import tensors
from heterorl.common.model.adapters import attach, base_digest, trainable
from heterorl.common.model.contract import ALL_WEIGHTS, LoraConfig
from heterorl.common.model.router_replay import RouterReplay
from heterorl.common.process.clock import SystemClock
from heterorl.common.types.common import Digest, SamplingSemantics, StepReport
from heterorl.common.types.rollout import QueuedGroup
from heterorl.common.weights.arena import Arena
from heterorl.learner.backends.loading import blocks_of, fill, open_model
from heterorl.learner.backends.optimizer_state import build_optimizer, copy_state, read_state
from heterorl.learner.backends.ranks.passes import alone
from heterorl.learner.loss.loss_config import LossConfig
from heterorl.learner.loss.loss_spec import caveats
from heterorl.learner.step_metrics import PassCount
from heterorl.learner.train.backend_config import TorchBackendConfig
from heterorl.learner.train.batch import build_batch
from heterorl.learner.train.model import (
    Rounding,
    apply_liger,
    check_forward,
    choose_attention,
    compile_block,
    load_reference,
)
from heterorl.learner.train.step import StepRecorder, apply_gradients
from heterorl.learner.train.step_report import wanted_log_ratios

_LOG = logging.getLogger(__name__)


class TorchBackend(StepRecorder):
    """Trains a model in this process."""

    def __init__(
        self,
        *,
        model_dir: str | Path,
        config: TorchBackendConfig,
        loss: LossConfig,
        sampling: SamplingSemantics,
        lora: LoraConfig = ALL_WEIGHTS,
        passes: PassCount | None = None,
        replays_routing: bool = False,
    ) -> None:
        """Load the model and check that it can be trained this way.

        Raises ConfigError: model or reference cannot be loaded or trained in the chosen layout, the device does not
        exist, or there are no layers for the adapters.
        """
        super().__init__(config, loss)
        opened = open_model(model_dir, gradient_checkpointing=config.gradient_checkpointing)
        try:
            self.torch_model = fill(opened, device=config.device)
        except (RuntimeError, AssertionError) as error:
            raise ConfigError(
                "backend.device",
                f"cannot use {config.device}: {error}",
                action='set backend.device = "cpu", or install a torch for this GPU',
            ) from error
        # Free a model that was read whole.
        del opened
        self.lora = lora.settings(base_digest(self.torch_model) if lora.is_on else Digest(""))
        if self.lora.rank:
            tensors.round_base(self.torch_model, config.published_dtype)
            attach(self.torch_model, self.lora)
        apply_liger(self.torch_model, config)
        check_forward(self.torch_model, batching=config.batching)
        # After the check, which is in fp32.
        choose_attention(self.torch_model, config)
        for block in blocks_of(self.torch_model):
            compile_block(block, config)
        self._config = config
        for note in caveats(self._loss_spec, max_new_tokens=sampling.max_new_tokens):
            _LOG.warning("%s", note)
        self._clock = SystemClock()
        self.layout = tensors.layout_of(self.torch_model, config.published_dtype)
        reference: nn.Module | None = None
        if self._loss_spec.needs_reference:
            directory = config.reference_model_dir or str(model_dir)
            reference = load_reference(directory, config, learner=self.torch_model, layout=self.layout)
        self._passes = alone(
            self.torch_model,
            loss=loss,
            temperature=sampling.logprob_temperature,
            max_new_tokens=sampling.max_new_tokens,
            micro_batch_tokens=config.micro_batch_tokens,
            batching=config.batching,
            autocast_dtype=torch.bfloat16 if config.compute_dtype == "bf16" else None,
            reference=reference,
            replay=RouterReplay(self.torch_model) if replays_routing else None,
            note_pass=(passes or PassCount()).note,
        )
        self._rounding: Rounding | None = None
        if config.forward_weights == "published":
            self._rounding = Rounding(self.torch_model, self.layout)
        self._optimizer = self._new_optimizer()

    def computing(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext() if self._rounding is None else self._rounding.applied()

    def train_step(self, groups: Sequence[QueuedGroup], *, head_version: int, step: int) -> StepReport:
        started = self._clock.monotonic()
        batch = build_batch([queued.group for queued in groups], loss=self._loss, head_version=head_version)
        try:
            with self.computing():
                samples = self._passes.accumulate(batch)
            end = self._end_step(samples, step=step, update=self._update)
        except BaseException:
            # The step after an undo must not add to this one's gradient.
            self._optimizer.zero_grad(set_to_none=True)
            raise
        self.last_log_ratios = wanted_log_ratios(samples, groups)
        step_s = self._clock.monotonic() - started
        return end.report(groups, step=step, head_version=head_version, step_s=step_s)

    def store(self, arena: Arena) -> None:
        tensors.store(self.torch_model, arena)

    def load_published(self, arena: Arena, *, keep_optimizer: bool = False) -> None:
        tensors.load(arena, self.torch_model)
        if keep_optimizer:
            return
        self._optimizer = self._new_optimizer()
        self._applied_steps = 0

    def freeze(self, directory: Path) -> Callable[[], None]:
        write = copy_state(self.torch_model, self._optimizer, applied_steps=self._applied_steps, lora=self.lora)
        return lambda: write(directory)

    def restore(self, directory: Path) -> None:
        optimizer = self._new_optimizer()
        self._applied_steps = read_state(directory, self.torch_model, optimizer)
        self._optimizer = optimizer

    def _update(self, loss: float, lr: float) -> tuple[bool, float]:
        return apply_gradients(
            self.torch_model.parameters(), self._optimizer, loss=loss, lr=lr, grad_clip=self._config.grad_clip
        )

    def _new_optimizer(self) -> torch.optim.Optimizer:
        return build_optimizer(trainable(self.torch_model).values(), self._config)
