"""From an opened language model to one whose parameters `fully_shard` divides by rows; masters stay fp32.

    one group       each block of the outermost lists of modules: gathered for its pass, and again for its backward pass
    the root        what is outside of them: embeddings, last norm, head; gathered once a pass

Guarantees: no rank holds the whole model: parameters have no content until their block is divided, and each rank then
reads its rows by name. Gradients are added up in fp32, and divided after each micro-batch.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from heterorl.learner.backends.loading.empty import replace_parameters
from heterorl.learner.backends.loading.streamed import blocks_of
from heterorl.learner.backends.ranks.passes import LogprobModel
from heterorl.learner.backends.ranks.state import Piece
from heterorl.learner.train.config import Fsdp2BackendConfig
from heterorl.learner.train.kernels import compile_block


class ShardedEngine:
    """A divided `LogprobModel` as a PassEngine."""

    def __init__(self, wrapped: LogprobModel) -> None:
        self._wrapped = wrapped

    def __call__(
        self,
        input_ids_RS: torch.Tensor,
        position_ids_RS: torch.Tensor,
        sources_N: torch.Tensor,
        targets_N: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See PassEngine."""
        logprobs_N, entropies_N = self._wrapped(input_ids_RS, position_ids_RS, sources_N, targets_N)
        return logprobs_N, entropies_N

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Nothing: each pass divides its gradient, so that no rank holds a whole one between passes."""

    def free(self) -> None:
        """Forget gathered weights that a forward pass left for its backward pass, which is not to come."""
        wrapped: Any = self._wrapped
        wrapped.reshard()

    def backward(self, loss: torch.Tensor) -> None:
        """See PassEngine."""
        loss.backward()  # type: ignore[no-untyped-call]


def shard(
    model: nn.Module,
    *,
    config: Fsdp2BackendConfig,
    temperature: float,
    products: torch.dtype | None,
    device: torch.device,
    is_frozen: bool = False,
) -> ShardedEngine:
    """Divide a model without content over all ranks, in place; its parameters are then of arbitrary content.

    Args:
        model: on the meta device but for its buffers, which are moved.
        config: whether this rank's rows stay in host memory, and whether blocks are compiled.
        temperature: what logits are divided by.
        products: type that passes compute with, weights included; None for fp32.
        device: of this rank.
        is_frozen: no backward pass follows, so that after a pass nothing stays gathered.
    """
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    # Rows in pinned memory travel to a GPU beside its computing.
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
        # In the order of the model's names, in which a block is of one piece.
        while any(parameter.is_meta for parameter in block.parameters()):
            next(coming)
        compile_block(block, config)
        fully_shard(block, **options)
    for _ in coming:
        pass
    for buffer in model.buffers():
        buffer.data = buffer.to(device)
    wrapped = LogprobModel(model, temperature=temperature, autocast_dtype=None)
    # With a backward pass to come the root would be gathered again at once.
    fully_shard(wrapped, reshard_after_forward=is_frozen, **options)
    return ShardedEngine(wrapped)


def local_part(parameter: nn.Parameter) -> torch.Tensor:
    """This rank's rows of a divided parameter, sharing its storage."""
    assert isinstance(parameter, DTensor)
    return parameter.to_local().detach()


def piece_of(shape: torch.Size, *, rank: int, world_size: int) -> Piece:
    """The elements that rank has: rows are cut as `torch.chunk` does, so the last ranks may have fewer or none."""
    num_rows = shape[0] if shape else 1
    width = shape.numel() // num_rows if num_rows else 0
    length = -(-num_rows // world_size)
    start = min(length * rank, num_rows)
    return Piece(start=start * width, size=(min(start + length, num_rows) - start) * width)
