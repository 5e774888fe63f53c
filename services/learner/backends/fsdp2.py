"""The backend on torch's `fully_shard` (FSDP2), with fp32 masters.

    one group       each block of the outermost lists of modules: gathered for its forward and for its backward pass
    the root        the other tensors: embeddings, last norm, head; gathered once a pass

Passes in fp32 see the masters rounded to the published type; passes in bf16 gather the masters as bf16. AdamW works by
element, so it runs on plain tensors that share the storage of the sharded parameters. Only the gradient's norm is
computed over all ranks.

Guarantees: no rank holds the whole model; parameters have no content until their block is sharded, then each rank reads
its rows by name. Gradients are added up in fp32 and sharded after each micro-batch. A bad reference directory is
refused on every rank, under its own key.
"""

import contextlib
import math
import struct
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from heterorl.common.errors import ConfigError
from heterorl.common.model import tensors
from heterorl.common.model.adapters import PARTS, attach, start_of, trainable
from heterorl.common.model.contract import LoraConfig
from heterorl.common.types.common import SamplingSemantics
from heterorl.learner.backends.loading import (
    OpenedModel,
    blocks_of,
    digest_of_opened,
    hold_untrained,
    replace_parameters,
)
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
from heterorl.learner.backends.sequence_parallel import slice_passes
from heterorl.learner.loss.loss_config import LossConfig
from heterorl.learner.train.backend_config import Fsdp2BackendConfig
from heterorl.learner.train.model import REFERENCE_KEY, apply_liger, check_reference, choose_attention, compile_block


def shard(
    model: nn.Module,
    *,
    config: Fsdp2BackendConfig,
    temperature: float,
    products: torch.dtype | None,
    device: torch.device,
    is_frozen: bool = False,
) -> LogprobModel:
    """Shard a model without content over all ranks, in place.

    Its parameters then have arbitrary content. The model is on the meta device except for its buffers, which are moved.
    `products` is the type of passes, weights included; None for fp32. A frozen model is sharded again after each pass.
    """
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    # Copies from pinned memory overlap with a GPU's computing.
    is_offloaded, is_pinned = config.offload_optimizer, device.type == "cuda"
    options: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(param_dtype=products, reduce_dtype=torch.float32),
        "offload_policy": CPUOffloadPolicy(pin_memory=is_pinned) if is_offloaded else OffloadPolicy(),
    }

    def without_content(_: str, meta: nn.Parameter) -> torch.Tensor:
        return torch.empty(meta.shape, dtype=torch.float32, device=device)

    coming = replace_parameters(model, without_content)
    for block in blocks_of(model):
        # In the order of the model's names, in which blocks are contiguous.
        while any(parameter.is_meta for parameter in block.parameters()):
            next(coming)
        compile_block(block, config)
        fully_shard(block, **options)
    for _ in coming:
        pass
    for buffer in model.buffers():
        buffer.data = buffer.to(device)
    wrapped = LogprobModel(model, temperature=temperature, autocast_dtype=None)
    # Before a backward pass the root would be gathered again at once.
    fully_shard(wrapped, reshard_after_forward=is_frozen, **options)
    return wrapped


def local_part(parameter: nn.Parameter) -> torch.Tensor:
    """This rank's rows of a sharded parameter, sharing its storage."""
    assert isinstance(parameter, DTensor)
    return parameter.to_local().detach()


def piece_of(shape: torch.Size, *, rank: int, world_size: int) -> Piece:
    """A rank's rows of a tensor, cut as `torch.chunk` cuts them."""
    num_rows = shape[0] if shape else 1
    width = shape.numel() // num_rows if num_rows else 0
    length = -(-num_rows // world_size)
    start = min(length * rank, num_rows)
    return Piece(start=start * width, size=(min(start + length, num_rows) - start) * width)


class Fsdp2State(ShardedState):
    """This rank's part of the trained state. All ranks call together."""

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], *, config: Fsdp2BackendConfig, ranks: Collectives
    ) -> None:
        self._parameters = dict(parameters)
        self.shapes = {name: parameter.shape for name, parameter in parameters.items()}
        self._config = config
        self._ranks = ranks
        own = {
            name: piece_of(shape, rank=ranks.rank, world_size=ranks.world_size) for name, shape in self.shapes.items()
        }
        self._locals = {name: nn.Parameter(local_part(parameter)) for name, parameter in parameters.items()}
        for name, piece in own.items():
            assert self._locals[name].numel() == piece.size, f"{name} is cut otherwise"
        self.pieces = Pieces(own, shapes=self.shapes, ranks=ranks)
        self._optimizer = self._new_optimizer()

    def read(self, name: str, key: Key, *, start: int, size: int) -> torch.Tensor:
        return self._part(name, key).reshape(-1)[start : start + size]

    @torch.no_grad()
    def put(self, name: str, key: Key, whole: torch.Tensor) -> None:
        piece, local = self.pieces.own[name], self._locals[name]
        target = self._optimizer.state[local][key] if key else local
        target.copy_(whole[piece.start : piece.start + piece.size].view(target.shape))

    def _part(self, name: str, key: Key) -> torch.Tensor:
        """This rank's rows of a tensor, sharing its storage.
        Moments without a gradient yet are zeros."""
        local = self._locals[name]
        if not key:
            return local.detach()
        state = self._optimizer.state.get(local, {})
        return state[key] if key in state else torch.zeros_like(local, requires_grad=False)

    def steps(self) -> int:
        return max((int(state["step"]) for state in self._optimizer.state.values()), default=0)

    def reset(self, *, steps: int) -> None:
        self._optimizer = self._new_optimizer()
        if not steps:
            return
        for local in self._locals.values():
            self._optimizer.state[local] = {
                "step": torch.tensor(float(steps)),
                "exp_avg": torch.zeros_like(local, requires_grad=False),
                "exp_avg_sq": torch.zeros_like(local, requires_grad=False),
            }

    @contextmanager
    def rounded(self, types: Mapping[str, torch.dtype]) -> Iterator[None]:
        """A context in which passes gather masters as they are published.

        It costs a copy of this rank's part. Afterwards the masters are back, bit for bit, also after an error. `types`
        are the layout's by name.
        """
        kept = {name: local.detach().clone() for name, local in self._locals.items() if types[name] != torch.float32}
        try:
            with torch.no_grad():
                for name in kept:
                    self._locals[name].copy_(self._locals[name].to(types[name]))
            yield
        finally:
            with torch.no_grad():
                for name, values in kept.items():
                    self._locals[name].copy_(values)

    @torch.no_grad()
    def update(self, loss: float, lr: float) -> tuple[bool, float]:
        """Clip and step, unless loss or gradient is not finite.

        Clears the gradient. Returns whether the step was taken, and the norm of the whole gradient before clipping.
        """
        gradients = {}
        for name, parameter in self._parameters.items():
            if isinstance(parameter.grad, DTensor):
                gradients[name] = parameter.grad.to_local()
        # Summed by rank, so that all ranks get the same bits and decide alike.
        squares = [gradient.double().square().sum() for gradient in gradients.values()]
        # One wait for the GPU, not one for each gradient.
        own = sum(torch.stack(squares).tolist(), start=0.0) if squares else 0.0
        row = struct.pack("<d?", own, bool(gradients))
        rows = [struct.unpack("<d?", data) for data in self._ranks.all_gather_bytes(row)]
        norm = math.sqrt(sum(part for part, _ in rows))
        is_applied = any(has_gradients for _, has_gradients in rows)
        is_applied = is_applied and math.isfinite(loss) and math.isfinite(norm)
        if is_applied:
            factor = min(1.0, self._config.grad_clip / (norm + 1e-6))
            for name, gradient in gradients.items():
                self._locals[name].grad = gradient.mul_(factor)
            for options in self._optimizer.param_groups:
                options["lr"] = lr
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        for parameter in self._parameters.values():
            parameter.grad = None
        return is_applied, norm

    def _new_optimizer(self) -> torch.optim.Optimizer:
        return build_optimizer(self._locals.values(), self._config)


def open_reference(
    model_dir: str, config: Fsdp2BackendConfig, ranks: Collectives, *, learner: nn.Module
) -> OpenedModel:
    """Open the reference; its weights stay on the disk. All ranks call.

    Raises ConfigError: it cannot be loaded, or has other shapes than the learner's model.
    """
    try:
        opened = open_together(model_dir, config, ranks)
    except ConfigError as error:
        raise ConfigError(REFERENCE_KEY, str(error), action=error.action) from error
    model = opened.model.requires_grad_(False)
    check_reference(model_dir, model.state_dict(), learner=learner)
    choose_attention(model, config)
    apply_liger(model, config)
    return opened


class Fsdp2Sharding(Sharding):
    """A model that `fully_shard` shards."""

    def __init__(
        self,
        model_dir: str,
        config: Fsdp2BackendConfig,
        *,
        loss: LossConfig,
        sampling: SamplingSemantics,
        ranks: Collectives,
        lora: LoraConfig,
    ) -> None:
        """Load the model, check that ranks can train it, and shard it.

        Raises ConfigError: model or reference cannot be loaded or trained in the chosen layout, there are no layers for
        the adapters, or the loss depends on how a step is cut into passes.
        """
        loss_spec = check_divisible(loss, ranks, max_new_tokens=sampling.max_new_tokens)
        opened = open_together(model_dir, config, ranks)
        if lora.is_on:
            self.lora = lora.settings(digest_of_opened(opened))
            attach(opened.model, self.lora)
        hold_untrained(opened)
        temperature = sampling.logprob_temperature
        self.model = opened.model
        check_experts(self.model, ranks)
        is_low = config.compute_dtype == "bf16"
        if is_low:
            check_products(self.model)
        choose_attention(self.model, config)
        frozen: OpenedModel | None = None
        if loss_spec.needs_reference:
            # Before the parameters are sharded; and before Liger replaces transformers' classes by its own for GPUs,
            # which later models of the kind would have, and models are checked on the CPU.
            frozen = open_reference(config.reference_model_dir or model_dir, config, ranks, learner=self.model)
        apply_liger(self.model, config)
        self.layout = tensors.layout_of(self.model, config.published_dtype)
        self.device = rank_device(config.device, ranks.rank_env)
        types = {spec.name: tensors.TORCH_DTYPE[spec.dtype] for spec in self.layout.specs}
        is_rounded = config.forward_weights == "published" and config.published_dtype != "fp32"
        base = {
            name: tensors.TORCH_DTYPE[dtype]
            for name, dtype in tensors.types_of(self.model, config.published_dtype).items()
            if name.rpartition(".")[2] not in PARTS
        }
        sharded = shard(
            self.model,
            config=config,
            temperature=temperature,
            products=torch.bfloat16 if is_low else None,
            device=self.device,
        )
        _fill(opened, ranks)
        if self.lora.rank:
            _round(self.model, base)
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
            # Free weights gathered for a backward pass that does not come.
            assert isinstance(sharded, FSDPModule)
            sharded.reshard()
        self.state: Fsdp2State = Fsdp2State(trainable(self.model), config=config, ranks=ranks)
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
            if is_rounded or self.lora.rank:
                _round(frozen.model, base if self.lora.rank else types)
        # Gathered as bf16, a master is rounded already.
        self._rounds_to = types if is_rounded and not (is_low and config.published_dtype == "bf16") else None

    def computing(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext() if self._rounds_to is None else self.state.rounded(self._rounds_to)

    def update(self, loss: float, lr: float) -> tuple[bool, float]:
        return self.state.update(loss, lr)

    def settle(self) -> None:
        """Return at once: passes gather the masters themselves."""


@torch.no_grad()
def _fill(opened: OpenedModel, ranks: Collectives) -> None:
    """Read this rank's rows of every parameter; adapters get their start values."""
    for name, parameter in opened.model.named_parameters():
        start = start_of(name, parameter.shape)
        whole = opened.flat(name) if start is None else start.reshape(-1)
        piece = piece_of(parameter.shape, rank=ranks.rank, world_size=ranks.world_size)
        part = local_part(parameter)
        part.copy_(whole[piece.start : piece.start + piece.size].view(part.shape))


@torch.no_grad()
def _round(model: nn.Module, types: Mapping[str, torch.dtype]) -> None:
    """Round tensors of a reference, or of a base under adapters."""
    parts = {name: local_part(parameter) for name, parameter in model.named_parameters()}
    for name, part in (*parts.items(), *model.named_buffers()):
        if name in types:
            part.copy_(part.to(types[name]))
