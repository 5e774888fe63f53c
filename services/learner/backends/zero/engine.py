"""From an opened language model to a DeepSpeed engine whose masters are exactly the model's fp32 weights.

Guarantees: no rank holds the whole model in fp32 where its stage divides it. DeepSpeed divides parameters of no
content, whose pages on the CPU nothing has touched, and each rank then reads what it keeps: its piece of the masters,
and in stages 1 and 2 the whole in the type that the model computes with.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from heterorl.common.errors import ConfigError, DependencyMissing
from heterorl.common.model.packages import check_engine
from heterorl.learner.backends.loading.empty import replace_parameters
from heterorl.learner.backends.loading.opened import OpenedModel
from heterorl.learner.backends.ranks.collectives import Collectives, rank_device
from heterorl.learner.backends.ranks.passes import LogprobModel
from heterorl.learner.backends.zero.state import ZeroState
from heterorl.learner.train.config import DeepSpeedBackendConfig


def import_deepspeed(device: str = "cpu") -> Any:
    """The package, quietly; it chooses its kind of device once, when it is first imported.

    Raises:
        DependencyMissing: it is not installed.
        DependencyUnsupported: another version is than this release works with.
    """
    check_engine("deepspeed")
    os.environ.setdefault("DS_ACCELERATOR", device)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import deepspeed
    except ImportError as error:
        raise DependencyMissing("deepspeed", "deepspeed") from error
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    # It calls torch by names that torch is about to drop, at every step.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed\.c10d_logger")
    # A shared-memory all-reduce that DeepSpeed would compile at each first start, behind a lock that a kill leaves.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def engine_config(config: DeepSpeedBackendConfig, *, world_size: int) -> dict[str, Any]:
    """DeepSpeed's own configuration.

    The counts of samples mean nothing here, but must agree with each other: passes are cut by tokens, and what is
    divided by them is multiplied back (see `ranks.passes`). In stage 0 clipping is ours.
    """
    is_low = config.compute_dtype == "bf16" and config.stage > 0
    zero: dict[str, Any] = {"stage": config.stage, "contiguous_gradients": True, "overlap_comm": False}
    if config.stage == 3:
        # Small parameters are cut like all others, so that there is one rule for where a parameter is.
        zero["stage3_param_persistence_threshold"] = 0
    if config.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": config.device == "cuda"}
    return {
        "train_batch_size": world_size,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": config.grad_clip if config.stage else 0.0,
        "steps_per_print": None,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": is_low},
        "communication_data_type": "fp32",
        "data_types": {"grad_accum_dtype": "fp32"},
    }


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Engine:
    """An engine and the names behind it."""

    engine: Any
    state: ZeroState
    device: torch.device


def build_engine(
    opened: OpenedModel, config: DeepSpeedBackendConfig, *, temperature: float, ranks: Collectives
) -> Engine:
    """Hand a model over to DeepSpeed and read its weights; the model object stays the same.

    Raises:
        DependencyMissing: DeepSpeed is not installed.
        ConfigError: DeepSpeed found another kind of device.
    """
    deepspeed = import_deepspeed(config.device)
    device = rank_device(config.device, ranks.place)
    if device.type != deepspeed.get_accelerator().device_name():
        raise ConfigError(
            "backend.device",
            f"DeepSpeed found {deepspeed.get_accelerator().device_name()}, not {device.type}",
            action=f"set DS_ACCELERATOR={device.type} in the environment, or change backend.device",
        )
    model = opened.model
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers() if buffer.is_floating_point()}
    is_low = config.compute_dtype == "bf16" and config.stage > 0
    products = torch.bfloat16 if config.compute_dtype == "bf16" and not is_low else None
    wrapped = LogprobModel(model, temperature=temperature, autocast_dtype=products)
    own = engine_config(config, world_size=ranks.world_size)

    def without_content(_: str, meta: nn.Parameter) -> torch.Tensor:
        return torch.empty(meta.shape, dtype=torch.bfloat16 if is_low else torch.float32, device=device)

    parameters = (parameter for _, parameter in replace_parameters(model, without_content))
    with warnings.catch_warnings(), _without_broadcast(deepspeed.DeepSpeedEngine):
        warnings.simplefilter("ignore")
        deepspeed.init_distributed(
            dist_backend="gloo" if device.type == "cpu" else "nccl", auto_mpi_discovery=False, verbose=False
        )
        if config.stage == 3:
            # Parameter by parameter, so that no rank ever holds the whole model.
            deepspeed.zero.Init(module=_OneByOne(parameters), config_dict_or_path=own)
            deepspeed.zero.register_external_parameter(wrapped.head, wrapped.head.weight)
        else:
            list(parameters)
        optimizer = torch.optim.AdamW(
            list(wrapped.parameters()),
            lr=config.lr,
            betas=config.betas,
            weight_decay=config.weight_decay,
        )
        engine, *_ = deepspeed.initialize(model=wrapped, optimizer=optimizer, config=own)
    named = dict(model.named_parameters())
    state = ZeroState(engine, stage=config.stage, parameters=named, shapes=shapes, ranks=ranks)
    for name in sorted(shapes):
        state.put(name, "", opened.flat(name))
    for name, buffer in model.named_buffers():
        if name in buffers:
            # It may have been rounded, such as the frequencies of positions.
            buffer.data = buffers[name].to(device)
    return Engine(engine=engine, state=state, device=device)


class _OneByOne(nn.Module):
    """A module whose parameters come to be as they are asked for."""

    def __init__(self, parameters: Iterator[nn.Parameter]) -> None:
        super().__init__()
        self._coming = parameters

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:  # noqa: ARG002 - torch's name
        return self._coming


@contextmanager
def _without_broadcast(engine: Any) -> Iterator[None]:
    """While it lasts, an engine does not send rank 0's parameters to all, which would touch every page of them."""
    own = engine._broadcast_model
    engine._broadcast_model = lambda _: None
    try:
        yield
    finally:
        engine._broadcast_model = own
