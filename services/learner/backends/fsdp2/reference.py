"""The frozen model that a loss compares with, opened by all ranks like the learner's own.

Guarantees: a directory that cannot be the reference is refused on every rank, under its own key.
"""

from __future__ import annotations

from torch import nn

from heterorl.common.errors import ConfigError
from heterorl.learner.backends.loading.opened import OpenedModel
from heterorl.learner.backends.ranks.collectives import Collectives
from heterorl.learner.backends.ranks.opening import open_together
from heterorl.learner.train.config import Fsdp2BackendConfig
from heterorl.learner.train.kernels import apply_liger, choose_attention
from heterorl.learner.train.reference import KEY


def open_reference(
    model_dir: str, config: Fsdp2BackendConfig, ranks: Collectives, *, learner: nn.Module
) -> OpenedModel:
    """Open the reference; its weights are still on the disk.

    Args:
        model_dir: of the reference.
        config: of the learner's passes.
        ranks: all of them call.
        learner: the model that it is compared with; under adapters lie the weights that it would have without them.

    Raises:
        ConfigError: it cannot be loaded, or is not of the learner's shape.
    """
    try:
        opened = open_together(model_dir, config, ranks)
    except ConfigError as error:
        raise ConfigError(KEY, str(error), action=error.action) from error
    model = opened.model.requires_grad_(False)
    shapes = {name: tensor.shape for name, tensor in learner.state_dict(keep_vars=True).items()}
    if any(tensor.shape != shapes.get(name, tensor.shape) for name, tensor in model.state_dict().items()):
        raise ConfigError(KEY, f"{model_dir} has other shapes than the learner's model")
    choose_attention(model, config)
    apply_liger(model, config)
    return opened
