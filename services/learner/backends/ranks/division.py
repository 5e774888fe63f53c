"""What an engine makes of a model that several ranks train, and which losses can be divided so."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import nn

from heterorl.common.errors import ConfigError
from heterorl.common.weights.arena import Layout
from heterorl.learner.backends.ranks.collectives import Collectives
from heterorl.learner.backends.ranks.passes import PassEngine
from heterorl.learner.backends.ranks.state import DividedState
from heterorl.learner.loss.config import LossConfig
from heterorl.learner.loss.rule import Rule, caveats, rule_of

_LOG = logging.getLogger(__name__)


class Division(Protocol):
    """A model that is divided among the ranks, by whatever engine."""

    @property
    def model(self) -> nn.Module:
        """Its configuration and names; the weights may be elsewhere."""
        ...

    @property
    def layout(self) -> Layout:
        """Layout of the published weights."""
        ...

    @property
    def buffers(self) -> Mapping[str, torch.Tensor]:
        """Floating-point buffers, which are published and never trained."""
        ...

    @property
    def engine(self) -> PassEngine:
        """Takes the passes."""
        ...

    @property
    def reference(self) -> PassEngine | None:
        """Takes the passes of the reference model; None of a loss without one."""
        ...

    @property
    def state(self) -> DividedState:
        """Masters and moments."""
        ...

    @property
    def device(self) -> torch.device:
        """Of this rank's passes."""
        ...

    def computing(self) -> AbstractContextManager[None]:
        """While it lasts, passes see the weights that a step computes with."""
        ...

    def update(self, loss: float, lr: float) -> tuple[bool, float]:
        """Clip and step, unless loss or gradient is not finite; returns whether, and the norm before clipping."""
        ...

    def settle(self) -> None:
        """Masters were written: let what passes see follow."""
        ...


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


def check_experts(model: nn.Module, ranks: Collectives) -> None:
    """See that no rank can be without a gradient that another one has.

    Raises:
        ConfigError: experts are modules of their own: ranks reduce those that their tokens went to, which differ.
    """
    for name, module in model.named_modules():
        if ranks.world_size > 1 and name.rpartition(".")[2] == "experts" and isinstance(module, nn.ModuleList):
            problem = f"each of {name} is a module of its own, and ranks have gradients for different ones"
            raise ConfigError("model_dir", problem, action="train with one rank, or upgrade transformers")
