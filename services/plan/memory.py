"""Bytes that a rank of the learner holds while a step computes, and rank 0's host beside it.

    torch           one rank with everything, the rounded stand-ins of its masters, and autocast's copies in bf16
    fsdp2           rows of everything; two layers and what is outside of them are gathered in the type of the passes,
                    and gradients of a layer and of what is outside in fp32 before they are divided
    zero-1, zero-2  masters and moments divided, whole weights in the type of the passes; 2 divides gradients too
    zero-3          as fsdp2, with rows of the weights in the type of the passes beside the masters

Activations are those of checkpointed layers: the input of each layer, and one layer in full; attention keeps no matrix
of scores. Logits are held a chunk at a time (`common/model/logprobs.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

from heterorl.common.errors import ConfigError
from heterorl.plan.shape import ModelShape

MASTER, MOMENTS, GRADIENT = 4, 8, 4
"""Bytes a parameter; all of it fp32."""
CHUNK_LOGITS = 64 << 20
BACKENDS = ("torch", "fsdp2", "zero-1", "zero-2", "zero-3")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Bytes on the device of a rank; `rounded` and `gathered` are weights beside the masters, for the passes."""

    masters: float
    moments: float
    gradients: float
    rounded: float
    gathered: float
    activations: float
    logits: float

    @property
    def state(self) -> float:
        """What is there between two steps: masters and moments."""
        return self.masters + self.moments

    @property
    def total(self) -> float:
        """All of it; an allocator's fragments and the packages' own memory come on top."""
        return self.state + self.gradients + self.rounded + self.gathered + self.activations + self.logits


def rank_memory(
    shape: ModelShape, parameters: float, *, backend: str, ranks: int, micro_batch_tokens: float, products: str
) -> RankMemory:
    """Of the ranks with most of it.

    Args:
        shape: of the layers.
        parameters: all of them; layers are scaled where this is not the shape's own number.
        backend: one of BACKENDS.
        ranks: processes, one GPU each.
        micro_batch_tokens: of one pass.
        products: bf16 or fp32, as backend.compute_dtype.

    Raises:
        ConfigError: the backend is unknown, or is one process.
    """
    if backend not in BACKENDS:
        raise ConfigError("--backend", f"{backend!r} is unknown", action=f"use one of {', '.join(BACKENDS)}")
    if backend == "torch" and ranks > 1:
        raise ConfigError("--backend", "torch is one process", action="use --gpus 1, or backend fsdp2")
    scale, share = parameters / shape.parameters, parameters / ranks
    width = 2 if products == "bf16" else 4
    block, outside = shape.block * scale, shape.outside * scale
    gradients, rounded, gathered = GRADIENT * share, 0.0, 0.0
    if backend == "torch":
        rounded = (4 + width * (products == "bf16")) * parameters
    elif backend == "fsdp2":
        # Gathered as bf16, a master is rounded already.
        rounded = 4 * share if products == "fp32" else 0.0
    else:
        rounded = width * (share if backend == "zero-3" else parameters)
    if backend in ("fsdp2", "zero-3"):
        gathered = width * (2 * block + outside) + GRADIENT * (block + outside)
    if backend == "zero-1":
        gradients = GRADIENT * parameters
    return RankMemory(
        masters=MASTER * share,
        moments=MOMENTS * share,
        gradients=gradients,
        rounded=rounded,
        gathered=gathered,
        activations=_activations(shape, micro_batch_tokens, width=width),
        # A chunk, its softmax and its gradient.
        logits=3.0 * 4 * max(CHUNK_LOGITS, shape.vocab),
    )


def host_memory(parameters: float) -> float:
    """Bytes of all hosts: two versions of the published weights in bf16, and a checkpoint's copy."""
    return 2 * 2 * parameters + (MASTER + MOMENTS) * parameters


def _activations(shape: ModelShape, tokens: float, *, width: int) -> float:
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    # Two norms, two sums; queries, keys, values, what attention gives; gate, its sigmoid's product, up, their product.
    layer = 4 * shape.hidden + 2 * queries + 2 * keys + 4 * shape.intermediate
    return tokens * width * (shape.layers * shape.hidden + layer)
