"""Seconds of a step, of a publication and of a checkpoint: products and transfers at stated speeds, nothing else.

passes        t tokens of sequences of s tokens: 6 P t + 6 L s q t FLOPs, q = heads * head_dim, and a third more
              for layers that are computed again in the backward pass; arXiv 2204.02311, appendix B, causal
sharding      fsdp2 and zero-3 gather the weights twice and divide the gradients once a pass; fsdp2 does so beside
              the products, zero after them
optimizer     28 bytes a parameter through the memory of the GPU
publication   ranks round their masters and exchange them by chunk; all code, rank 0 writes and sends the delta
checkpoint    each rank writes its masters and moments, 14 bytes a parameter with the version, to one `state_dir`; then
              rank 0 reads all of it for the digests of the checkpoint, and on several machines masters and moments
              once more, to compare them with what the ranks wrote
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from heterorl.plan.assumptions import Assumptions
from heterorl.plan.shape import ModelShape

_GIGA = 1e9
OPTIMIZER_BYTES = 28
"""Read: gradient, master, two moments; written: master, two moments; fp32."""
CHECKPOINT_BYTES = 14
"""Masters and two moments in fp32, what was published in bf16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """GPUs of a learner, one rank each."""

    gpus: int
    gpus_per_node: int

    @property
    def nodes(self) -> int:
        """Machines."""
        return -(-self.gpus // self.gpus_per_node)


def compute_s(shape: ModelShape, parameters: float, *, tokens: float, cluster: Cluster, given: Assumptions) -> float:
    """Seconds of all passes of a step."""
    attention = 6.0 * shape.layers * given.sequence_tokens * shape.heads * shape.head_dim
    flops = tokens * (6.0 * parameters + attention) * 4.0 / 3.0
    return flops / (cluster.gpus * given.gpu_tflops * 1e12 * given.mfu)


def sharding_s(
    parameters: float, *, backend: str, tokens: float, products: str, cluster: Cluster, given: Assumptions
) -> float:
    """Seconds that weights and gradients travel between the ranks in a step."""
    width = 2 if products == "bf16" else 4
    passes = math.ceil(tokens / cluster.gpus / given.micro_batch_tokens)
    if backend in ("fsdp2", "zero-3"):
        moved = passes * (2 * width + 4)
    else:
        # Stage 1 divides the gradients of a step once, stage 2 those of each pass; both gather the weights once.
        moved = 4 * (passes if backend == "zero-2" else 1) + width
    return _collective_s(moved * parameters, cluster=cluster, given=given)


def _collective_s(num_bytes: float, *, cluster: Cluster, given: Assumptions) -> float:
    """Seconds to gather or divide bytes among all ranks, by the slower of the two kinds of links; 0 of one rank."""
    local = min(cluster.gpus, cluster.gpus_per_node)
    inside = num_bytes * (local - 1) / local / given.gpu_link_gb_s
    between = num_bytes * (cluster.nodes - 1) / cluster.nodes / given.node_link_gb_s
    return max(inside, between) / _GIGA


def step_s(compute: float, sharding: float, optimizer: float, *, backend: str) -> float:
    """The whole step."""
    return (max(compute, sharding) if backend == "fsdp2" else compute + sharding) + optimizer


def optimizer_s(parameters: float, *, cluster: Cluster, given: Assumptions) -> float:
    """Seconds of the update of a rank's share."""
    return OPTIMIZER_BYTES * parameters / cluster.gpus / given.hbm_gb_s / _GIGA


def gather_s(num_bytes: float, *, cluster: Cluster, given: Assumptions, exchanged: float = 0.0) -> float:
    """Seconds until each rank's host has its share of these bytes, and ranks have exchanged theirs of the others."""
    between = exchanged / cluster.gpus / given.gather_gb_s if cluster.gpus > 1 else 0.0
    return (num_bytes / cluster.gpus / given.pcie_gb_s + between) / _GIGA


def encode_s(num_bytes: float, *, given: Assumptions, machines: int = 1) -> float:
    """Seconds of comparing and coding these bytes of weights."""
    return num_bytes / machines / given.encode_gb_s / given.coding_threads / _GIGA


def write_s(num_bytes: float, *, given: Assumptions) -> float:
    """Seconds until bytes are on the disk of `state_dir`."""
    return num_bytes / given.disk_gb_s / _GIGA


def read_s(parameters: float, *, cluster: Cluster, given: Assumptions) -> float:
    """Seconds in which rank 0 reads a checkpoint for its digests."""
    compared = (CHECKPOINT_BYTES - 2) * (cluster.nodes > 1)
    return (CHECKPOINT_BYTES + compared) * parameters / given.read_gb_s / _GIGA


def send_s(num_bytes: float, *, link_bits_per_s: float, rtt_s: float) -> float:
    """Seconds of bytes over the WAN, and one round trip for the answer."""
    return 8 * num_bytes / link_bits_per_s + rtt_s
