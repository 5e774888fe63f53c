"""Costs of a run: memory, seconds, WAN bytes, GPUs of samplers.

Memory of a rank while a step computes:

    torch           one rank with everything, the rounded stand-ins of its masters, and autocast's copies in bf16
    fsdp2           rows of everything; two layers and the parameters outside of layers are gathered in the type of the
                    passes, and gradients of one layer and of the parameters outside in fp32 before they are divided
    zero-1, zero-2  masters and moments divided, whole weights in the type of the passes; 2 divides gradients too
    zero-3          as fsdp2, with rows of the weights in the type of the passes besides the masters

Activations count as in checkpointed layers: the input of each layer, and one layer in full; attention keeps no matrix
of scores. Logits are held a chunk at a time (`common/model/logprobs.py`).

Seconds are only products and transfers at stated speeds:

passes        t tokens of sequences of s tokens: 6 P t + 6 L s q t FLOPs, q = heads * head_dim, and a third more
              for layers that are computed again in the backward pass; arXiv 2204.02311, appendix B, causal
sharding      fsdp2 and zero-3 gather the weights twice and divide the gradients once a pass; fsdp2 does so during
              the products, zero after them
optimizer     28 bytes a parameter through the memory of the GPU
publication   ranks round their masters and exchange them by chunk; all code, rank 0 writes and sends the delta
checkpoint    each rank writes its masters and moments, 14 bytes a parameter with the version, to one `state_dir`; then
              rank 0 reads all of it for the digests of the checkpoint, and on several machines masters and moments
              once more, to compare them with what the ranks wrote

A delta has one entry for each changed element: its position and its step. The position costs the binary entropy of the
share that changes. The step is in units in the last place.

A decoding step reads the weights once, and the keys and values of every sequence in it; its products are smaller. A
sequence has half of its tokens on average. Weights that do not fit on one GPU are divided among several.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from heterorl.common.errors import ConfigError
from heterorl.plan.assumptions import Assumptions
from heterorl.plan.model_shape import ModelShape

MASTER, MOMENTS, GRADIENT = 4, 8, 4
"""Bytes a parameter, in fp32."""
CHUNK_LOGITS = 64 << 20
BACKENDS = ("torch", "fsdp2", "zero-1", "zero-2", "zero-3")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Bytes on one rank's device; passes use `rounded` and `gathered` weights."""

    masters: float
    moments: float
    gradients: float
    rounded: float
    gathered: float
    activations: float
    logits: float

    @property
    def state(self) -> float:
        """Bytes between two steps: masters and moments."""
        return self.masters + self.moments

    @property
    def total(self) -> float:
        """All bytes, without the allocator's fragments and the packages' own memory."""
        return self.state + self.gradients + self.rounded + self.gathered + self.activations + self.logits


def rank_memory(
    shape: ModelShape, parameters: float, *, backend: str, ranks: int, micro_batch_tokens: float, products: str
) -> RankMemory:
    """Memory of the fullest rank, the shape's layers scaled to `parameters`.

    `products` is bf16 or fp32, as backend.compute_dtype. Raises ConfigError for a backend that is unknown or one
    process.
    """
    if backend not in BACKENDS:
        raise ConfigError("--backend", f"{backend!r} is unknown", action=f"use one of {', '.join(BACKENDS)}")
    if backend == "torch" and ranks > 1:
        raise ConfigError("--backend", "torch runs in one process", action="use --gpus 1, or backend fsdp2")
    scale, share = parameters / shape.parameters, parameters / ranks
    width = 2 if products == "bf16" else 4
    block, outside = shape.block * scale, shape.outside * scale
    gradients, rounded, gathered = GRADIENT * share, 0.0, 0.0
    if backend == "torch":
        rounded = (4 + width * (products == "bf16")) * parameters
    elif backend == "fsdp2":
        # Gathering as bf16 rounds the masters already.
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


def _activations(shape: ModelShape, tokens: float, *, width: int) -> float:
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    # Two norms, two sums; queries, keys, values, output of attention; gate, its sigmoid's product, up, their product.
    layer = 4 * shape.hidden + 2 * queries + 2 * keys + 4 * shape.intermediate
    return tokens * width * (shape.layers * shape.hidden + layer)


_GIGA = 1e9
OPTIMIZER_BYTES = 28
"""Bytes read (gradient, master, two moments) and written (master, two moments) for a parameter, in fp32."""
CHECKPOINT_BYTES = 14
"""Bytes for a parameter: master and two moments in fp32, published weights in bf16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """GPUs of a learner, one rank each."""

    gpus: int
    gpus_per_node: int

    @property
    def nodes(self) -> int:
        return -(-self.gpus // self.gpus_per_node)


def compute_s(shape: ModelShape, parameters: float, *, tokens: float, cluster: Cluster, given: Assumptions) -> float:
    """Seconds of all passes of a step."""
    attention = 6.0 * shape.layers * given.sequence_tokens * shape.heads * shape.head_dim
    flops = tokens * (6.0 * parameters + attention) * 4.0 / 3.0
    return flops / (cluster.gpus * given.gpu_tflops * 1e12 * given.mfu)


def sharding_s(
    parameters: float, *, backend: str, tokens: float, products: str, cluster: Cluster, given: Assumptions
) -> float:
    """Seconds to move weights and gradients between ranks in a step."""
    width = 2 if products == "bf16" else 4
    passes = math.ceil(tokens / cluster.gpus / given.pass_tokens)
    if backend in ("fsdp2", "zero-3"):
        moved = passes * (2 * width + 4)
    else:
        # Stage 1 reduces gradients once a step, stage 2 once a pass; both gather the weights once.
        moved = 4 * (passes if backend == "zero-2" else 1) + width
    return _collective_s(moved * parameters, cluster=cluster, given=given)


def _collective_s(num_bytes: float, *, cluster: Cluster, given: Assumptions) -> float:
    """Seconds to gather or reduce among ranks; the slower link decides."""
    local = min(cluster.gpus, cluster.gpus_per_node)
    inside = num_bytes * (local - 1) / local / given.gpu_link_gb_s
    between = num_bytes * (cluster.nodes - 1) / cluster.nodes / given.node_link_gb_s
    return max(inside, between) / _GIGA


def optimizer_s(parameters: float, *, cluster: Cluster, given: Assumptions) -> float:
    """Seconds to update a rank's share."""
    return OPTIMIZER_BYTES * parameters / cluster.gpus / given.hbm_gb_s / _GIGA


def gather_s(num_bytes: float, *, cluster: Cluster, given: Assumptions, exchanged: float = 0.0) -> float:
    """Seconds until hosts have their shares, and ranks exchanged `exchanged` bytes."""
    between = exchanged / cluster.gpus / given.gather_gb_s if cluster.gpus > 1 else 0.0
    return (num_bytes / cluster.gpus / given.pcie_gb_s + between) / _GIGA


def encode_s(num_bytes: float, *, given: Assumptions, machines: int = 1) -> float:
    """Seconds to compare and code these bytes of weights."""
    return num_bytes / machines / given.encode_gb_s / given.coding_threads / _GIGA


def read_s(parameters: float, *, cluster: Cluster, given: Assumptions) -> float:
    """Seconds in which rank 0 reads a checkpoint for its digests."""
    compared = (CHECKPOINT_BYTES - 2) * (cluster.nodes > 1)
    return (CHECKPOINT_BYTES + compared) * parameters / given.read_gb_s / _GIGA


ELEMENT = 2
"""Bytes of a published weight, bf16."""


def delta_bytes(parameters: float, *, changed: float, step_bits: float) -> float:
    """Bytes of a delta, bounded by the bytes of all weights.

    It is parameters * (H(changed) + changed * step_bits) / 8, where H(f) = -f log2 f - (1 - f) log2 (1 - f) bits
    (Shannon 1948). `changed` is a share in [0, 1].
    """
    entropy = sum(-share * math.log2(share) for share in (changed, 1.0 - changed) if share > 0.0)
    return min(parameters * (entropy + changed * step_bits) / 8.0, ELEMENT * parameters)


LR = 1e-6
"""The learning rate of a plan that states neither rate nor share."""
MEASURED = ((1e-6, 0.01369), (3e-6, 0.03466), (1e-5, 0.09055), (1e-4, 0.43195))
"""AdamW's step size, and the share of bf16 elements that a version changed: benchmarks/results/weights.json."""


def changed_by(lr: float) -> float:
    """Share of elements that a step changes: power laws through MEASURED.

    Several steps change about as many as one of their sum: 1 to 17 % more than measured for 8 and 24 steps.
    """
    above = next((index for index, (known, _) in enumerate(MEASURED) if lr <= known), len(MEASURED))
    first = min(max(above - 1, 0), len(MEASURED) - 2)
    (low, least), (high, most) = MEASURED[first : first + 2]
    power = math.log(most / least) / math.log(high / low)
    return min(1.0, least * math.pow(lr / low, power))


ROOM = 0.9
"""Share of GPU memory that an engine uses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """One engine: its GPUs, concurrent sequences, and seconds of one decoding step."""

    gpus: int
    sequences: int
    step_s: float

    @property
    def tokens_per_gpu_s(self) -> float:
        return self.sequences / self.step_s / self.gpus


def drawing(shape: ModelShape, parameters: float, *, given: Assumptions) -> Drawing:
    """An engine of this model on GPUs like the learner's."""
    weights = ELEMENT * parameters
    # At least a quarter of the memory is for keys and values.
    gpus = max(1, math.ceil(weights / (0.75 * ROOM * given.hbm_gb * _GIGA)))
    cache = 2 * ELEMENT * shape.layers * shape.kv_heads * shape.head_dim * given.sequence_tokens / 2
    room = gpus * ROOM * given.hbm_gb * _GIGA - weights
    sequences = max(1, min(int(given.sampler_sequences), int(room / cache)))
    read_s = (weights + sequences * cache) / (gpus * given.hbm_gb_s * given.decode_share * _GIGA)
    product_s = 2.0 * parameters * sequences / (gpus * given.gpu_tflops * 1e12 * given.mfu)
    return Drawing(gpus=gpus, sequences=sequences, step_s=max(read_s, product_s))
