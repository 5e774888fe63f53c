"""The backend on DeepSpeed's ZeRO, with fp32 masters.

Pieces of masters and AdamW moments, by parameter name:

    stage 0       every rank holds everything; rank 0 reports for all
    stage 1, 2    parameters are laid end to end and cut by rank: a parameter may cross a cut
    stage 3       every parameter is cut into equal pieces, the last one padded

One count of steps serves the whole model.

Guarantees: the masters are exactly the model's fp32 weights. No rank holds the whole model in fp32 where its stage
shards it: DeepSpeed shards parameters of no content, whose pages were never touched. Each rank then reads its piece of
the masters, and in stages 1 and 2 the whole model in the type that it computes with.
"""

import contextlib
import logging
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

from heterorl.common.errors import ConfigError, DependencyMissing
from heterorl.common.model import tensors
from heterorl.common.model.library_versions import check_package
from heterorl.common.types.common import SamplingSemantics
from heterorl.learner.backends.loading import OpenedModel, blocks_of, hold_untrained, replace_parameters
from heterorl.learner.backends.optimizer_state import build_optimizer
from heterorl.learner.backends.ranks.collectives import Collectives, rank_device
from heterorl.learner.backends.ranks.passes import LogprobModel
from heterorl.learner.backends.ranks.sharded_state import Key, Piece, Pieces, ShardedState
from heterorl.learner.backends.ranks.sharding import (
    Sharding,
    check_divisible,
    check_experts,
    check_products,
    open_together,
    untrained_buffers,
)
from heterorl.learner.loss.loss_config import LossConfig
from heterorl.learner.train.backend_config import DeepSpeedBackendConfig
from heterorl.learner.train.model import Rounding, apply_liger, choose_attention, compile_block
from heterorl.learner.train.step import apply_gradients


class ZeroState(ShardedState):
    """One rank's pieces in DeepSpeed's buffers."""

    def __init__(
        self, engine: Any, *, stage: int, parameters: dict[str, Any], shapes: dict[str, torch.Size], ranks: Collectives
    ) -> None:
        self._engine = engine
        self._stage = stage
        self._parameters = parameters
        self.shapes = shapes
        self._ranks = ranks
        self._own = {name: self._piece(name) for name in parameters}
        # In stage 0 rank 0 has everything.
        speaks = stage > 0 or ranks.rank == 0
        own = self._own if speaks else dict.fromkeys(parameters, Piece(start=0, size=0))
        self.pieces = Pieces(own, shapes=shapes, ranks=ranks)

    def read(self, name: str, key: Key, *, start: int, size: int) -> torch.Tensor:
        piece = self._piece_3(name, key) if self._stage == 3 else self._view(name, key).detach()
        return piece[start : start + size]

    @torch.no_grad()
    def put(self, name: str, key: Key, whole: torch.Tensor) -> None:
        """Set this rank's piece, and the model's copy of a master."""
        piece = self._own[name]
        values = whole[piece.start : piece.start + piece.size]
        parameter = self._parameters[name]
        if self._stage == 3:
            self._put_padded(parameter, key, values)
        else:
            self._view(name, key).copy_(values)
            if key == "" and self._stage:
                parameter.data.view(-1).copy_(whole)

    @torch.no_grad()
    def round_copies(self, types: Mapping[str, torch.dtype]) -> None:
        """Round the model's copies in stages 1 to 3; the masters stay.

        Every rank rounds its whole copy or its own piece alike. A copy in bf16 is narrower already. `types` are the
        layout's, by name.
        """
        assert self._stage, "in stage 0 the model computes with the masters"
        for name, parameter in self._parameters.items():
            copy = parameter.ds_tensor.data if self._stage == 3 else parameter.data
            if copy.dtype == torch.float32:
                copy.copy_(copy.to(types[name]))

    def steps(self) -> int:
        return max((int(self._optimizer.state.get(flat, {}).get("step", 0)) for flat in self._flats()), default=0)

    @torch.no_grad()
    def reset(self, *, steps: int) -> None:
        for flat in self._flats():
            state = self._optimizer.state[flat]
            if "exp_avg" not in state:
                state["step"] = torch.zeros((), dtype=torch.float32)
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(flat), torch.zeros_like(flat)
            state["exp_avg"].zero_()
            state["exp_avg_sq"].zero_()
            state["step"].fill_(steps)
        if self._stage in (1, 2):
            self._engine.optimizer._lazy_init_hp_params_optimizer_state()

    @property
    def _optimizer(self) -> Any:
        return self._engine.optimizer.optimizer if self._stage else self._engine.optimizer

    def _flats(self) -> list[Any]:
        if self._stage == 0:
            return list(self._parameters.values())
        names = ("single_partition_of_fp32_groups", "fp32_groups_flat_partition", "fp32_partitioned_groups_flat")
        return next(
            list(getattr(self._engine.optimizer, name)) for name in names if hasattr(self._engine.optimizer, name)
        )

    def _piece(self, name: str) -> Piece:
        parameter, num_elements = self._parameters[name], self.shapes[name].numel()
        if self._stage == 0:
            return Piece(start=0, size=num_elements)
        if self._stage == 3:
            length = parameter.ds_tensor.numel()
            start = min(length * self._ranks.rank, num_elements)
            return Piece(start=start, size=min(length, num_elements - start))
        if parameter._hp_mapping is None:
            return Piece(start=0, size=0)
        address = parameter._hp_mapping.lp_fragment_address
        return Piece(start=address.start, size=address.numel)

    def _view(self, name: str, key: Key) -> torch.Tensor:
        """This rank's view of a tensor in stages 0 to 2."""
        parameter = self._parameters[name]
        view: torch.Tensor
        if self._stage == 0:
            view = (self._optimizer.state[parameter][key] if key else parameter.data).view(-1)
        elif parameter._hp_mapping is None:
            view = torch.empty(0)
        else:
            view = parameter._hp_mapping.get_hp_fragment(key or None).view(-1)
        return view

    @torch.no_grad()
    def _piece_3(self, name: str, key: Key) -> torch.Tensor:
        """This rank's piece in stage 3."""
        from deepspeed.utils import safe_get_local_fp32_param, safe_get_local_optimizer_state

        parameter = self._parameters[name]
        padded = safe_get_local_optimizer_state(parameter, key) if key else safe_get_local_fp32_param(parameter)
        piece: torch.Tensor = padded.detach().view(-1)[: self._own[name].size]
        return piece

    @staticmethod
    def _put_padded(parameter: Any, key: Key, values: torch.Tensor) -> None:
        from deepspeed.utils import safe_set_local_fp32_param, safe_set_local_optimizer_state

        padded = torch.zeros(parameter.ds_tensor.numel(), dtype=torch.float32)
        padded[: values.numel()] = values
        if key:
            safe_set_local_optimizer_state(parameter, padded, key)
        else:
            safe_set_local_fp32_param(parameter, padded)
            parameter.ds_tensor.data.view(-1).copy_(padded)


def import_deepspeed(device: str = "cpu") -> Any:
    """Import DeepSpeed quietly.
    At its first import it chooses its kind of device.

    Raises:
        DependencyMissing: it is not installed.
        DependencyUnsupported: this release works with other versions.
    """
    check_package("deepspeed")
    os.environ.setdefault("DS_ACCELERATOR", device)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import deepspeed
    except ImportError as error:
        raise DependencyMissing("deepspeed", "deepspeed") from error
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    # It calls deprecated names of torch at every step.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed\.c10d_logger")
    # DeepSpeed would compile a shared-memory all-reduce, behind a lock that a kill leaves.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def engine_config(config: DeepSpeedBackendConfig, *, world_size: int) -> dict[str, Any]:
    """DeepSpeed's own configuration.

    The counts of samples only have to agree with each other: passes are cut by tokens, and `ranks.passes` multiplies
    back what is divided by them. In stage 0 heterorl clips.
    """
    is_low = config.compute_dtype == "bf16" and config.stage > 0
    zero: dict[str, Any] = {"stage": config.stage, "contiguous_gradients": True, "overlap_comm": False}
    if config.stage == 3:
        # Cut small parameters like all others, so that one rule places them.
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


def build_engine(
    opened: OpenedModel, config: DeepSpeedBackendConfig, *, temperature: float, ranks: Collectives
) -> tuple[Any, ZeroState, torch.device]:
    """Hand a model over to DeepSpeed and read its weights.
    The model object stays the same.

    Raises:
        DependencyMissing: DeepSpeed is not installed.
        ConfigError: DeepSpeed found another kind of device.
    """
    deepspeed = import_deepspeed(config.device)
    device = rank_device(config.device, ranks.rank_env)
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
        optimizer = build_optimizer(list(wrapped.parameters()), config)
        engine, *_ = deepspeed.initialize(model=wrapped, optimizer=optimizer, config=own)
    named = dict(model.named_parameters())
    state = ZeroState(engine, stage=config.stage, parameters=named, shapes=shapes, ranks=ranks)
    for name in sorted(shapes):
        state.put(name, "", opened.flat(name))
    for name, buffer in model.named_buffers():
        if name in buffers:
            # It may have been rounded, such as the frequencies of positions.
            buffer.data = buffers[name].to(device)
    return engine, state, device


class _OneByOne(nn.Module):
    """A module that makes its parameters as they are iterated."""

    def __init__(self, parameters: Iterator[nn.Parameter]) -> None:
        super().__init__()
        self._coming = parameters

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:  # noqa: ARG002 - torch's name
        return self._coming


@contextmanager
def _without_broadcast(engine: Any) -> Iterator[None]:
    """A context in which an engine does not broadcast rank 0's parameters.
    The broadcast would touch all their pages."""
    own = engine._broadcast_model
    engine._broadcast_model = lambda _: None
    try:
        yield
    finally:
        engine._broadcast_model = own


class ZeroSharding(Sharding):
    """A model that DeepSpeed shards."""

    def __init__(
        self,
        model_dir: str,
        config: DeepSpeedBackendConfig,
        *,
        loss: LossConfig,
        sampling: SamplingSemantics,
        ranks: Collectives,
    ) -> None:
        """Load the model, check that ranks can train it, and shard it.

        Raises:
            DependencyMissing: DeepSpeed is not installed.
            ConfigError: the model cannot be loaded or trained in the chosen layout, the device does not exist, or the
                loss depends on how a step is cut into passes.
        """
        check_divisible(loss, ranks, max_new_tokens=sampling.max_new_tokens)
        opened = open_together(model_dir, config, ranks)
        hold_untrained(opened)
        self.model = opened.model
        if config.stage == 3:
            check_experts(self.model, ranks)
        if config.stage and config.compute_dtype == "bf16":
            check_products(self.model)
        # After the check, which is on the CPU.
        choose_attention(self.model, config)
        apply_liger(self.model, config)
        self.layout = tensors.layout_of(self.model, config.published_dtype)
        self._config = config
        self.engine: Any
        self.state: ZeroState
        self.engine, self.state, self.device = build_engine(
            opened, config, temperature=sampling.logprob_temperature, ranks=ranks
        )
        self.buffers = untrained_buffers(self.model, self.layout)
        for block in blocks_of(self.model):
            compile_block(block, config)
        self._rounding: Rounding | None = None
        if config.forward_weights == "published" and config.stage == 0:
            self._rounding = Rounding(self.model, self.layout)

    def computing(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext() if self._rounding is None else self._rounding.applied()

    def update(self, loss: float, lr: float) -> tuple[bool, float]:
        """Clip and step; DeepSpeed skips a gradient that is not finite."""
        optimizer = self.engine.optimizer
        if self._config.stage == 0:
            return apply_gradients(
                self.model.parameters(), optimizer, loss=loss, lr=lr, grad_clip=self._config.grad_clip
            )
        for options in optimizer.param_groups:
            options["lr"] = lr
        self.engine.step()
        self.settle()
        return not optimizer.overflow, float(optimizer._global_grad_norm)

    def settle(self) -> None:
        """In stages 1 to 3 round DeepSpeed's copies as they are published."""
        if self._config.forward_weights == "published" and self._config.stage:
            self.state.round_copies({spec.name: tensors.TORCH_DTYPE[spec.dtype] for spec in self.layout.specs})
