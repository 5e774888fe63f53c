"""Models without weights, and other parameters in the place of a model's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from heterorl.common.errors import ConfigError
from heterorl.common.model.building import BUILDING, hold_positions
from heterorl.common.model.directory import first_line


def empty_model(model_dir: str) -> nn.Module:
    """A causal language model whose parameters are on the meta device; its buffers are real, as they are computed.

    Raises:
        ConfigError: there is no such model, or its code needs values.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(model_dir)
        with BUILDING, _parameters_on_meta():
            model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    except Exception as error:
        raise ConfigError("model_dir", f"cannot load {model_dir}: {first_line(error)}") from error
    hold_positions(model)
    return model


def replace_parameters(
    model: nn.Module, make: Callable[[str, nn.Parameter], torch.Tensor]
) -> Iterator[tuple[str, nn.Parameter]]:
    """Put other parameters in the place of a model's, one at a time as they are asked for; what is tied stays tied.

    Args:
        model: any module.
        make: the tensor for a parameter and its name.

    Returns:
        The new parameters by name, each already in its place.
    """
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for owner in model.modules():
        for attribute, parameter in owner._parameters.items():
            if parameter is not None:
                places.setdefault(id(parameter), []).append((owner, attribute))
    for name, parameter in list(model.named_parameters()):
        new = nn.Parameter(make(name, parameter), requires_grad=parameter.requires_grad)
        for owner, attribute in places[id(parameter)]:
            owner._parameters[attribute] = new
        yield name, new


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """While it lasts, modules of this process register parameters without storage; BUILDING is held.

    Not torch's meta device: buffers such as the frequencies of positions are computed, and in no file.
    """
    register = nn.Module.register_parameter

    def register_on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        # One that is on meta already is tied to another: it must stay that object.
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
        register(self, name, param)

    module: Any = nn.Module
    module.register_parameter = register_on_meta
    try:
        yield
    finally:
        module.register_parameter = register
