"""All ranks open one model: each reads by name what it keeps, or rank 0 alone holds the whole and sends it by tensor.

Must never let one rank leave while others wait for it: what is wrong on one rank is raised on all.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import nn

from heterorl.common.errors import ConfigError
from heterorl.common.model import tensors
from heterorl.learner.backends.loading.opened import OpenedModel, open_model
from heterorl.learner.backends.loading.streamed import streamed
from heterorl.learner.backends.ranks.collectives import Collectives
from heterorl.learner.train.config import RanksConfig
from heterorl.learner.train.model import check_forward

_REFUSED = b"refused"


def open_together(model_dir: str | Path, config: RanksConfig, ranks: Collectives) -> OpenedModel:
    """The model without its weights on every rank, checked by rank 0, which reads them for that block by block.

    Raises:
        ConfigError: on all ranks, where one cannot load the model or it cannot be trained in the chosen layout.
    """
    opened, is_alike = _open(model_dir, config, ranks, may_hold=ranks.rank == 0)
    if not is_alike:
        # transformers made another model of the files than of the configuration alone.
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
    """What two ranks must have in common: where their weights are, and what they are."""
    state = {
        name: [str(tensor.dtype), list(tensor.shape), tensor.requires_grad]
        for name, tensor in opened.model.state_dict(keep_vars=True).items()
    }
    return json.dumps([opened.is_held, tensors.layout_of(opened.model, "fp32").layout_id, state]).encode()


def _relayed(opened: OpenedModel, ranks: Collectives) -> OpenedModel:
    """The model with weights of rank 0's memory, which all ranks ask for in the same order."""
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
