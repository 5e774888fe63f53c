"""Opening one model on all ranks, and the interface of sharding engines.

Each rank reads the tensors that it keeps by name; or rank 0 holds the whole model and sends it tensor by tensor. An
error of one rank is raised on all, so that no rank leaves while others wait for it.
"""

import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from torch import nn

from heterorl.common.errors import ConfigError
from heterorl.common.model import tensors
from heterorl.common.types.common import NO_LORA, LoraSettings
from heterorl.common.weights.arena import Layout
from heterorl.learner.backends.loading import OpenedModel, open_model, streamed
from heterorl.learner.backends.ranks.collectives import Collectives
from heterorl.learner.backends.ranks.passes import PassEngine
from heterorl.learner.backends.ranks.sharded_state import ShardedState
from heterorl.learner.loss.loss_config import LossConfig
from heterorl.learner.loss.loss_spec import LossSpec, caveats, loss_spec_of
from heterorl.learner.train.backend_config import RanksConfig
from heterorl.learner.train.model import check_forward

_LOG = logging.getLogger(__name__)
_REFUSED = b"refused"


def open_together(model_dir: str | Path, config: RanksConfig, ranks: Collectives) -> OpenedModel:
    """Open the model without weights on every rank.
    Rank 0 checks it, and reads weights for that block by block.

    Raises ConfigError: on all ranks: one cannot load the model, or it cannot be trained in the chosen layout.
    """
    opened, is_alike = _open(model_dir, config, ranks, may_hold=ranks.rank == 0)
    if not is_alike:
        # transformers made another model of the files than of the configuration.
        opened, _ = _open(model_dir, config, ranks, may_hold=True)
        return opened
    if ranks.world_size > 1 and opened.is_held:
        return _relayed(opened, ranks)
    return opened


def _open(
    model_dir: str | Path, config: RanksConfig, ranks: Collectives, *, may_hold: bool
) -> tuple[OpenedModel, bool]:
    problem: Exception | None = None
    word = _REFUSED
    try:
        opened = open_model(model_dir, gradient_checkpointing=config.gradient_checkpointing, may_hold=may_hold)
        if ranks.rank == 0:
            with streamed(opened) as model:
                check_forward(model, batching=config.batching)
        word = _table(opened)
    except Exception as error:  # noqa: BLE001 - told below, when the other ranks know of it
        problem = error
    words = ranks.all_gather_bytes(word)
    if _REFUSED in words:
        raise problem or ConfigError("model_dir", f"{model_dir} is refused by another rank", action="see its log")
    return opened, len(set(words)) == 1


def _table(opened: OpenedModel) -> bytes:
    """Facts that ranks must share: types and shapes, and weights' place."""
    state = {
        name: [str(tensor.dtype), list(tensor.shape), tensor.requires_grad]
        for name, tensor in opened.model.state_dict(keep_vars=True).items()
    }
    return json.dumps([opened.is_held, tensors.layout_of(opened.model, "fp32").layout_id, state]).encode()


def _relayed(opened: OpenedModel, ranks: Collectives) -> OpenedModel:
    """The model with weights from rank 0's memory.
    All ranks ask for tensors in the same order."""
    model = opened.model
    for tensor in model.state_dict(keep_vars=True).values():
        if not isinstance(tensor, nn.Parameter):
            values = tensor.detach().reshape(-1).view(torch.uint8)
            ranks.broadcast(values)
            tensor.detach().copy_(values.view(tensor.dtype).view(tensor.shape))
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters(remove_duplicate=False)}

    def flat(name: str) -> torch.Tensor:
        values = torch.empty(sizes[name]) if ranks.rank else opened.flat(name).contiguous()
        ranks.broadcast(values)
        return values

    return OpenedModel(model=model, flat=flat, is_held=False)


class Sharding(ABC):
    """A model that an engine shards among the ranks."""

    model: nn.Module
    """Its configuration and names; the weights may be elsewhere."""
    layout: Layout
    """Layout of the published weights."""
    buffers: Mapping[str, torch.Tensor]
    """Published tensors that are never trained, by the names of the layout; the model's own objects."""
    engine: PassEngine
    reference: PassEngine | None = None
    """The engine of the reference model; None for a loss without one."""
    state: ShardedState
    device: torch.device
    lora: LoraSettings = NO_LORA
    """Settings of adapters; then only they are trained."""

    @abstractmethod
    def computing(self) -> AbstractContextManager[None]:
        """A context with the weights that a step's passes compute with."""

    @abstractmethod
    def update(self, loss: float, lr: float) -> tuple[bool, float]:
        """Clip and step, unless loss or gradient is not finite.
        Returns whether it stepped, and the norm before clipping."""

    @abstractmethod
    def settle(self) -> None:
        """Update what passes see after the masters were written."""


def check_divisible(loss: LossConfig, ranks: Collectives, *, max_new_tokens: int) -> LossSpec:
    """The loss spec of a loss that may be divided among ranks.

    Raises ConfigError: the loss depends on how a step is cut into passes.
    """
    loss_spec = loss_spec_of(loss)
    if loss_spec.scope == "microbatch" and ranks.world_size > 1:
        raise ConfigError(
            "loss.scope", "microbatch makes the loss depend on the number of ranks", action="train with one rank"
        )
    if ranks.rank == 0:
        for note in caveats(loss_spec, max_new_tokens=max_new_tokens):
            _LOG.warning("%s", note)
    return loss_spec


def untrained_buffers(model: nn.Module, layout: Layout) -> dict[str, torch.Tensor]:
    """Published tensors that are no parameters, tied ones once.
    `hold_untrained` made buffers of frozen ones."""
    published = tensors.published_tensors(model)
    return {
        spec.name: published[spec.name]
        for spec in layout.specs
        if not spec.alias_of and not isinstance(published[spec.name], nn.Parameter)
    }


@torch.no_grad()
def settle_untrained(sharding: Sharding, *, is_rounded: bool) -> None:
    """Check that every published tensor is written, and round the buffers.

    Rounded buffers are as samplers have them. An element that neither state nor buffers write would reach samplers as
    0. Buffers are rounded once, since no step changes them.
    """
    layout = sharding.layout
    written = {layout.spec(name).name for name in (*sharding.state.shapes, *sharding.buffers)}
    apart = written ^ {spec.name for spec in layout.specs if not spec.alias_of}
    assert not apart, f"published or written, but not both: {sorted(apart)}"
    if is_rounded:
        for name, buffer in sharding.buffers.items():
            buffer.copy_(buffer.to(tensors.TORCH_DTYPE[layout.spec(name).dtype]))


def check_products(model: nn.Module) -> None:
    """Refuse bf16 passes for a model that keeps weights in fp32."""
    types = tensors.types_of(model, "bf16")
    kept = [name for name, _ in model.named_parameters() if types.get(name) == "fp32"]
    if kept:
        problem = f"bf16 would round {kept[0]} and {len(kept) - 1} other weights that the model keeps in fp32"
        raise ConfigError("backend.compute_dtype", problem, action='set it to "fp32", or backend.kind to "torch"')


def check_experts(model: nn.Module, ranks: Collectives) -> None:
    """Refuse experts that are modules of their own."""
    for name, module in model.named_modules():
        if ranks.world_size > 1 and name.rpartition(".")[2] == "experts" and isinstance(module, nn.ModuleList):
            problem = f"each of {name} is a module of its own, and ranks have gradients for different ones"
            raise ConfigError("model_dir", problem, action="train with one rank, or upgrade transformers")
