"""The estimate of a run, from a model, GPUs and a link.

It assumes fp32 masters, AdamW moments, and bf16 versions of all weights, which all ranks round, code and checkpoint.
Samplers draw every token of a step on GPUs like the learner's.

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

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any

from heterorl.common.errors import ConfigError
from heterorl.common.model.model_shape import ModelShape, nearest
from heterorl.plan.assumptions import Assumptions, facts

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
    """With backend.gradient_checkpointing."""
    kept_activations: float
    """Without it."""
    logits: float

    @property
    def state(self) -> float:
        """Bytes between two steps: masters and moments."""
        return self.masters + self.moments

    @property
    def total(self) -> float:
        """All bytes with gradient_checkpointing, without fragments and the packages' own memory."""
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
        activations=shape.activations(micro_batch_tokens, width=width, is_checkpointed=True),
        kept_activations=shape.activations(micro_batch_tokens, width=width, is_checkpointed=False),
        # A chunk, its softmax and its gradient.
        logits=3.0 * 4 * max(CHUNK_LOGITS, shape.vocab),
    )


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


DAY_S = 86400.0
_TABLES = ("question", "shape", "memory", "drawing")


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """The inputs of an estimate.

    `shape` None takes the published model nearest in size. `changed` is the share of published elements that a version
    of `steps_per_version` steps changes. `tokens_per_step` counts prompts and completions of all `sites` together.

    Example: Question(parameters=8e9, gpus=8, link_bits_per_s=1e9)
    """

    parameters: float
    shape: ModelShape | None = None
    gpus: int = 8
    gpus_per_node: int = 8
    backend: str = "fsdp2"
    products: str = "bf16"
    link_bits_per_s: float = 1e9
    rtt_s: float = 0.1
    tokens_per_step: float = 1 << 20
    steps_per_version: int = 1
    sites: int = 1
    changed: float = changed_by(LR)
    given: Assumptions = field(default_factory=Assumptions)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The results: seconds and bytes.

    `gather_s` to `send_s` are parts of a publication. `pull_s` is for a sampler one version behind, `join_s` for a new
    one. `groups_bytes` come from all sites for a step. `sampler_gpus` keep the learner busy.
    """

    question: Question
    shape: ModelShape
    memory: RankMemory
    host_bytes: float
    compute_s: float
    sharding_s: float
    optimizer_s: float
    step_s: float
    gather_s: float
    encode_s: float
    write_s: float
    send_s: float
    checkpoint_s: float
    delta_bytes: float
    snapshot_bytes: float
    groups_bytes: float
    pull_s: float
    join_s: float
    applying_s: float
    drawing: Drawing
    sampler_gpus: int

    @property
    def version_s(self) -> float:
        """Between two versions."""
        return self.step_s * self.question.steps_per_version

    @property
    def publication_s(self) -> float:
        """From a step's end to the coordinator's durable answer, without checkpoint."""
        return self.gather_s + self.encode_s + self.write_s + self.send_s

    @property
    def fits(self) -> bool:
        return self.memory.total <= 0.9e9 * self.question.given.hbm_gb

    @property
    def staleness_versions(self) -> float:
        """Approximate versions from the first token's policy to its training step.

        It sums a pull, drawing a whole sequence, and the step itself.
        """
        drawn_s = self.drawing.step_s * self.question.given.sequence_tokens
        return (self.pull_s + drawn_s + self.step_s) / self.version_s

    @property
    def is_line_enough(self) -> bool:
        return self.pull_s <= self.version_s

    @property
    def least_link_bits_per_s(self) -> float:
        """The slowest link for `is_line_enough`; infinite if applying takes longer."""
        left_s = self.version_s - self.applying_s - self.question.rtt_s
        return 8 * self.delta_bytes / left_s if left_s > 0 else math.inf

    @property
    def day_in_bytes(self) -> float:
        return DAY_S / self.version_s * self.delta_bytes

    @property
    def day_out_bytes(self) -> float:
        return DAY_S / self.step_s * self.groups_bytes / self.question.sites

    def as_dict(self) -> dict[str, Any]:
        asked = self.question
        inputs = {name: getattr(asked, name) for name in _names(Question) if name not in ("shape", "given")}
        numbers = {name: getattr(self, name) for name in _names(Plan) if name not in _TABLES}
        least = self.least_link_bits_per_s
        return {
            "question": inputs | {"nodes": _cluster(asked).nodes},
            "shape": dataclasses.asdict(self.shape) | {"parameters": self.shape.parameters},
            "memory_per_rank": dataclasses.asdict(self.memory) | {"total": self.memory.total, "fits": self.fits},
            **numbers,
            "version_s": self.version_s,
            "publication_s": self.publication_s,
            "drawing": dataclasses.asdict(self.drawing) | {"tokens_per_gpu_s": self.drawing.tokens_per_gpu_s},
            "staleness_versions": self.staleness_versions,
            "line": {"is_enough": self.is_line_enough, "least_bits_per_s": least if math.isfinite(least) else None},
            "site_day": {"in_bytes": self.day_in_bytes, "out_bytes": self.day_out_bytes},
            "assumptions": facts(asked.given),
        }


def plan(asked: Question) -> Plan:
    """Estimate a run; raises ConfigError for a bad number or backend."""
    _check(asked)
    given, cluster, parameters = asked.given, _cluster(asked), asked.parameters
    tokens = asked.tokens_per_step
    shape = asked.shape or nearest(parameters)
    memory = rank_memory(
        shape,
        parameters,
        backend=asked.backend,
        ranks=asked.gpus,
        micro_batch_tokens=min(given.pass_tokens, tokens / asked.gpus),
        products=asked.products,
    )
    compute = compute_s(shape, parameters, tokens=tokens, cluster=cluster, given=given)
    sharding = sharding_s(
        parameters, backend=asked.backend, tokens=tokens, products=asked.products, cluster=cluster, given=given
    )
    optimizer = optimizer_s(parameters, cluster=cluster, given=given)
    delta = delta_bytes(parameters, changed=asked.changed, step_bits=given.step_bits)
    weights = ELEMENT * parameters
    snapshot = weights / given.snapshot_ratio
    applying = weights / given.pull_gb_s / 1e9

    def send(num_bytes: float) -> float:
        return 8 * num_bytes / asked.link_bits_per_s + asked.rtt_s

    step = (max(compute, sharding) if asked.backend == "fsdp2" else compute + sharding) + optimizer
    drawn = drawing(shape, parameters, given=given)
    engines = math.ceil(tokens / step / (drawn.tokens_per_gpu_s * drawn.gpus))
    return Plan(
        question=asked,
        shape=shape,
        memory=memory,
        # Two published versions and a checkpoint's copy, of all hosts.
        host_bytes=(2 * weights + (MASTER + MOMENTS) * parameters) * min(1.0, asked.gpus_per_node / asked.gpus),
        compute_s=compute,
        sharding_s=sharding,
        optimizer_s=optimizer,
        step_s=step,
        gather_s=gather_s(MASTER * parameters, exchanged=weights, cluster=cluster, given=given),
        encode_s=encode_s(weights, given=given, machines=cluster.nodes),
        write_s=delta / given.disk_gb_s / 1e9,
        send_s=send(delta),
        checkpoint_s=gather_s((MASTER + MOMENTS) * parameters, cluster=cluster, given=given)
        + CHECKPOINT_BYTES * parameters / given.disk_gb_s / 1e9
        + read_s(parameters, cluster=cluster, given=given),
        delta_bytes=delta,
        snapshot_bytes=snapshot,
        groups_bytes=tokens * given.token_bytes,
        pull_s=send(delta) + applying,
        join_s=send(snapshot) + applying,
        applying_s=applying,
        drawing=drawn,
        sampler_gpus=engines * drawn.gpus,
    )


def _names(of: type[Question] | type[Plan]) -> list[str]:
    return [entry.name for entry in dataclasses.fields(of)]


def _cluster(asked: Question) -> Cluster:
    return Cluster(gpus=asked.gpus, gpus_per_node=asked.gpus_per_node)


def _check(asked: Question) -> None:
    for key, value, least in (
        # A stated number below it lacks its zeros, such as 8 in place of 8e9.
        ("--params", asked.parameters, 1 if asked.shape else 1e5),
        ("--gpus", asked.gpus, 1),
        ("--gpus-per-node", asked.gpus_per_node, 1),
        ("--link", asked.link_bits_per_s, 1.0),
        ("--tokens-per-step", asked.tokens_per_step, 1),
        ("--steps-per-version", asked.steps_per_version, 1),
        ("--rtt", asked.rtt_s, 0.0),
        ("--sites", asked.sites, 1),
    ):
        if not least <= value < 1e18:
            raise ConfigError(key, f"must be at least {least:g}; got {value:g}")
    if not 0.0 <= asked.changed <= 1.0:
        raise ConfigError("--changed-fraction", f"must be from 0 to 1; got {asked.changed:g}")
    if asked.products not in ("bf16", "fp32"):
        raise ConfigError("--compute-dtype", f"{asked.products!r} is unknown", action="use bf16 or fp32")
