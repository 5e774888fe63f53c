"""The estimate of a run, from a model, GPUs and a link.

It assumes fp32 masters, AdamW moments, and bf16 versions of all weights, which all ranks round, code and checkpoint.
Samplers draw every token of a step on GPUs like the learner's.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any

from heterorl.common.errors import ConfigError
from heterorl.plan import costs
from heterorl.plan.assumptions import Assumptions, facts
from heterorl.plan.costs import ELEMENT, MASTER, MOMENTS, Cluster, Drawing, RankMemory, drawing, rank_memory
from heterorl.plan.model_shape import ModelShape, nearest

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
    changed: float = costs.changed_by(costs.LR)
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
    compute = costs.compute_s(shape, parameters, tokens=tokens, cluster=cluster, given=given)
    sharding = costs.sharding_s(
        parameters, backend=asked.backend, tokens=tokens, products=asked.products, cluster=cluster, given=given
    )
    optimizer = costs.optimizer_s(parameters, cluster=cluster, given=given)
    delta = costs.delta_bytes(parameters, changed=asked.changed, step_bits=given.step_bits)
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
        gather_s=costs.gather_s(MASTER * parameters, exchanged=weights, cluster=cluster, given=given),
        encode_s=costs.encode_s(weights, given=given, machines=cluster.nodes),
        write_s=delta / given.disk_gb_s / 1e9,
        send_s=send(delta),
        checkpoint_s=costs.gather_s((MASTER + MOMENTS) * parameters, cluster=cluster, given=given)
        + costs.CHECKPOINT_BYTES * parameters / given.disk_gb_s / 1e9
        + costs.read_s(parameters, cluster=cluster, given=given),
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
        ("--params", asked.parameters, 1e5),
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
