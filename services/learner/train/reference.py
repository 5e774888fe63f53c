"""A frozen model that losses compare the learner with.

Guarantees: never trained, never published; given the learner's own directory it computes what the learner computed
with before its first step, so the two agree exactly there.
"""

from __future__ import annotations

import torch
from torch import nn

from heterorl.common.errors import ConfigError
from heterorl.common.model.directory import check_model_dir
from heterorl.common.model.tensors import TORCH_DTYPE, published_tensors
from heterorl.common.weights.arena import Layout
from heterorl.learner.train.config import TorchBackendConfig
from heterorl.learner.train.model import load_model

KEY = "backend.reference_model_dir"


def load_reference(model_dir: str, config: TorchBackendConfig, *, learner: nn.Module, layout: Layout) -> nn.Module:
    """Load a second model beside the learner's, rounded as the learner's passes round theirs.

    Args:
        model_dir: of the reference.
        config: device and precision.
        learner: the model that it is compared with; under adapters lie the weights that it would have without them.
        layout: of the learner's published weights.

    Raises:
        ConfigError: it cannot be loaded, or is not of the learner's shape.
    """
    try:
        check_model_dir(model_dir)
        model = load_model(model_dir).requires_grad_(False)
    except ConfigError as error:
        raise ConfigError(KEY, str(error), action=error.action) from error
    tensors = published_tensors(model)
    shapes = {name: tensor.shape for name, tensor in learner.state_dict(keep_vars=True).items()}
    if any(tensor.shape != shapes.get(name, tensor.shape) for name, tensor in tensors.items()):
        raise ConfigError(KEY, f"{model_dir} has other shapes than the learner's model")
    if config.forward_weights == "published":
        dtypes = {spec.name: TORCH_DTYPE[spec.dtype] for spec in layout.specs}
        with torch.no_grad():
            for name in tensors.keys() & dtypes.keys():
                tensors[name].copy_(tensors[name].to(dtypes[name]))
    return model.to(config.device)
