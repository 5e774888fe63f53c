"""FSDP2 with fp32 masters as a TrainBackend: what is its own beside `ranks.backend`.

Passes in fp32 see the masters rounded to the published type. Passes in bf16 gather the masters as bf16, which is
how they are published by default.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from torch import nn

from heterorl.common.model import tensors
from heterorl.common.model.adapters import attach, start_of, trainable
from heterorl.common.model.contract import LoraConfig
from heterorl.common.process.clock import Clock
from heterorl.common.types.common import NO_LORA, SamplingSemantics
from heterorl.learner import progress
from heterorl.learner.backends.fsdp2.reference import open_reference
from heterorl.learner.backends.fsdp2.sharding import local_part, piece_of, shard
from heterorl.learner.backends.fsdp2.state import ShardedState
from heterorl.learner.backends.loading.opened import OpenedModel, digest_of_opened, hold_untrained
from heterorl.learner.backends.ranks.backend import DividedBackend
from heterorl.learner.backends.ranks.collectives import Collectives, rank_device
from heterorl.learner.backends.ranks.division import (
    Division,
    check_divisible,
    check_experts,
    check_products,
    untrained_buffers,
)
from heterorl.learner.backends.ranks.opening import open_together
from heterorl.learner.backends.slices.engine import slice_passes
from heterorl.learner.loss.config import LossConfig
from heterorl.learner.train.config import Fsdp2BackendConfig
from heterorl.learner.train.kernels import apply_liger, choose_attention


class Fsdp2Backend(DividedBackend):
    """One rank of a learner whose model `fully_shard` divides."""

    def __init__(
        self,
        *,
        model_dir: str | Path,
        config: Fsdp2BackendConfig,
        loss: LossConfig,
        sampling: SamplingSemantics,
        ranks: Collectives,
        lora: LoraConfig,
        clock: Clock | None = None,
        passes: progress.PassCount | None = None,
        replays_routing: bool = False,
    ) -> None:
        """Load the model, check that it can be trained this way, and divide it.

        Raises:
            ConfigError: the model cannot be loaded or trained in the chosen layout, there are no layers for the
                adapters, the loss depends on how a step is cut into passes, or its reference is no such model.
        """
        rule = check_divisible(loss, ranks, has_reference=True)
        opened = open_together(model_dir, config, ranks)
        settings = NO_LORA
        if lora.is_on:
            settings = lora.settings(digest_of_opened(opened))
            attach(opened.model, settings)
        hold_untrained(opened)
        super().__init__(
            division=_ShardedDivision(
                opened,
                config,
                temperature=sampling.logprob_temperature,
                ranks=ranks,
                reference_dir=(config.reference_model_dir or str(model_dir)) if rule.needs_reference else "",
            ),
            config=config,
            loss=loss,
            sampling=sampling,
            ranks=ranks,
            lora=settings,
            clock=clock,
            passes=passes,
            replays_routing=replays_routing,
        )


class _ShardedDivision(Division):
    """See Division."""

    def __init__(
        self,
        opened: OpenedModel,
        config: Fsdp2BackendConfig,
        *,
        temperature: float,
        ranks: Collectives,
        reference_dir: str,
    ) -> None:
        self.model = opened.model
        check_experts(self.model, ranks)
        is_low = config.compute_dtype == "bf16"
        if is_low:
            check_products(self.model)
        choose_attention(self.model, config)
        frozen: OpenedModel | None = None
        if reference_dir:
            # Before this model's own names are those of divided tensors; and before Liger, whose classes for GPUs alone
            # models of the same kind would have that are opened later, and checked on the CPU.
            frozen = open_reference(reference_dir, config, ranks, learner=self.model)
        apply_liger(self.model, config)
        self.layout = tensors.layout_of(self.model, config.published_dtype)
        self.device = rank_device(config.device, ranks.place)
        types = {spec.name: tensors.TORCH_DTYPE[spec.dtype] for spec in self.layout.specs}
        is_rounded = config.forward_weights == "published" and config.published_dtype != "fp32"
        sharded = shard(
            self.model,
            config=config,
            temperature=temperature,
            products=torch.bfloat16 if is_low else None,
            device=self.device,
        )
        _fill(opened, ranks)
        self.buffers = untrained_buffers(self.model, self.layout)
        self.engine = sharded
        if config.sequence_parallel > 1:
            self.engine = slice_passes(
                sharded,
                self.model,
                size=config.sequence_parallel,
                ranks=ranks,
                batching=config.batching,
                is_low=is_low,
                device=self.device,
            )
            sharded.free()
        self.state: ShardedState = ShardedState(trainable(self.model), config=config, ranks=ranks)
        if frozen is not None:
            self.reference = shard(
                frozen.model,
                config=config.model_copy(update={"compile": False}),
                temperature=temperature,
                products=torch.bfloat16 if is_low else None,
                device=self.device,
                is_frozen=True,
            )
            _fill(frozen, ranks)
            if is_rounded:
                _round(frozen.model, types)
        # Gathered as bf16, a master is rounded already.
        self._rounds_to = types if is_rounded and not (is_low and config.published_dtype == "bf16") else None

    def computing(self) -> AbstractContextManager[None]:
        """See Division."""
        return contextlib.nullcontext() if self._rounds_to is None else self.state.rounded(self._rounds_to)

    def update(self, loss: float, lr: float) -> tuple[bool, float]:
        """See Division."""
        return self.state.update(loss, lr)

    def settle(self) -> None:
        """Nothing: passes gather the masters themselves."""


@torch.no_grad()
def _fill(opened: OpenedModel, ranks: Collectives) -> None:
    """Read this rank's rows of every parameter; adapters start as adapters do."""
    for name, parameter in opened.model.named_parameters():
        start = start_of(name, parameter.shape)
        whole = opened.flat(name) if start is None else start.reshape(-1)
        piece = piece_of(parameter.shape, rank=ranks.rank, world_size=ranks.world_size)
        part = local_part(parameter)
        part.copy_(whole[piece.start : piece.start + piece.size].view(part.shape))


@torch.no_grad()
def _round(model: nn.Module, types: Mapping[str, torch.dtype]) -> None:
    """As the learner's passes see what is published under these names."""
    parts = {name: local_part(parameter) for name, parameter in model.named_parameters()}
    for name, part in (*parts.items(), *model.named_buffers()):
        if name in types:
            part.copy_(part.to(types[name]))
