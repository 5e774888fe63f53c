"""What an engine makes of a model that several ranks train, and which losses can be divided so."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager

import torch
from torch import nn

from heterorl.common.errors import ConfigError
from heterorl.common.model import tensors
from heterorl.common.weights.arena import Layout
from heterorl.learner.backends.ranks.collectives import Collectives
from heterorl.learner.backends.ranks.passes import PassEngine
from heterorl.learner.backends.ranks.state import DividedState
from heterorl.learner.loss.config import LossConfig
from heterorl.learner.loss.rule import Rule, caveats, rule_of

_LOG = logging.getLogger(__name__)


class Division(ABC):
    """A model that an engine divides among the ranks."""

    model: nn.Module
    """Its configuration and names; the weights may be elsewhere."""
    layout: Layout
    """Of the published weights."""
    buffers: Mapping[str, torch.Tensor]
    """What is published and never trained, by the names of the layout: the model's own, with which it computes."""
    engine: PassEngine
    """Takes the passes."""
    reference: PassEngine | None = None
    """Takes the passes of the reference model; None of a loss without one."""
    state: DividedState
    """Masters and moments."""
    device: torch.device
    """Of this rank's passes."""

    @abstractmethod
    def computing(self) -> AbstractContextManager[None]:
        """While it lasts, passes see the weights that a step computes with."""

    @abstractmethod
    def update(self, loss: float, lr: float) -> tuple[bool, float]:
        """Clip and step, unless loss or gradient is not finite; returns whether, and the norm before clipping."""

    @abstractmethod
    def settle(self) -> None:
        """Masters were written: let what passes see follow."""


def check_divisible(loss: LossConfig, ranks: Collectives, *, has_reference: bool) -> Rule:
    """The rule of a loss that does not depend on how a step is divided.

    Args:
        loss: the learner's.
        ranks: who is there.
        has_reference: whether this engine can divide a reference model too.

    Raises:
        ConfigError: it depends on how a step is cut into passes, or on a reference model that cannot be had.
    """
    rule = rule_of(loss)
    if rule.scope == "microbatch" and ranks.world_size > 1:
        raise ConfigError(
            "loss.scope", "microbatch makes the loss depend on the number of ranks", action="train with one rank"
        )
    if rule.needs_reference and not has_reference:
        problem = "needs log-probs of a reference model, which this backend does not divide"
        raise ConfigError("loss", problem, action='set backend.kind to "fsdp2" or "torch", or take another loss')
    if ranks.rank == 0:
        for note in caveats(rule):
            _LOG.warning("%s", note)
    return rule


def untrained_buffers(model: nn.Module, layout: Layout) -> dict[str, torch.Tensor]:
    """What is published of a model beside its parameters, tied ones once; `hold_untrained` made buffers of the rest."""
    published = tensors.published_tensors(model)
    return {
        spec.name: published[spec.name]
        for spec in layout.specs
        if not spec.alias_of and not isinstance(published[spec.name], nn.Parameter)
    }


@torch.no_grad()
def settle_untrained(division: Division, *, is_rounded: bool) -> None:
    """See that all that is published is written, and let passes see buffers as samplers have them.

    Args:
        division: what it writes is its state and its buffers; an element of neither would reach samplers as 0.
        is_rounded: round the buffers; for good, since no step changes them.
    """
    layout = division.layout
    written = {layout.spec(name).name for name in (*division.state.shapes, *division.buffers)}
    apart = written ^ {spec.name for spec in layout.specs if not spec.alias_of}
    assert not apart, f"published or written, but not both: {sorted(apart)}"
    if is_rounded:
        for name, buffer in division.buffers.items():
            buffer.copy_(buffer.to(tensors.TORCH_DTYPE[layout.spec(name).dtype]))


def check_products(model: nn.Module) -> None:
    """See that weights may be held in bf16 for the passes.

    Raises:
        ConfigError: the model keeps some of them in fp32, as its samplers do.
    """
    types = tensors.types_of(model, "bf16")
    kept = [name for name, _ in model.named_parameters() if types.get(name) == "fp32"]
    if kept:
        problem = f"bf16 would round {kept[0]} and {len(kept) - 1} other weights that the model keeps in fp32"
        raise ConfigError("backend.compute_dtype", problem, action='set it to "fp32", or backend.kind to "torch"')


def check_experts(model: nn.Module, ranks: Collectives) -> None:
    """See that no rank can be without a gradient that another one has.

    Raises:
        ConfigError: experts are modules of their own: ranks reduce those that their tokens went to, which differ.
    """
    for name, module in model.named_modules():
        if ranks.world_size > 1 and name.rpartition(".")[2] == "experts" and isinstance(module, nn.ModuleList):
            problem = f"each of {name} is a module of its own, and ranks have gradients for different ones"
            raise ConfigError("model_dir", problem, action="train with one rank, or upgrade transformers")
