"""Assumptions of a plan: each number with unit and source.

`--set NAME=VALUE` changes one.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from heterorl.common.errors import ConfigError

_H100 = "NVIDIA's data sheet of the H100 SXM"
_ASSUMED = "assumed"


def _number(default: float, unit: str, meaning: str, source: str) -> Any:
    return field(default=default, metadata={"unit": unit, "meaning": meaning, "source": source})


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumptions:
    """Numbers of machines, network, codec and training.

    Example: Assumptions(mfu=0.4, gpu_tflops=312.0)
    """

    gpu_tflops: float = _number(989.0, "TFLOP/s", "of a GPU, dense products in bf16", _H100)
    mfu: float = _number(0.35, "", "share of them that passes reach", f"{_ASSUMED}; 0.15 on an H100 at 0.5 B")
    hbm_gb: float = _number(80.0, "GB", "memory of a GPU", _H100)
    hbm_gb_s: float = _number(3350.0, "GB/s", "its bandwidth", _H100)
    gpu_link_gb_s: float = _number(450.0, "GB/s", "GPU to GPU on one node, each way", _H100)
    node_link_gb_s: float = _number(50.0, "GB/s", "a node to others, each way", f"{_ASSUMED}: 400 Gbit/s")
    gather_gb_s: float = _number(1.0, "GB/s", "that a rank sends to the others over gloo", _ASSUMED)
    pcie_gb_s: float = _number(20.0, "GB/s", "from one GPU into its host's memory", _ASSUMED)
    disk_gb_s: float = _number(2.0, "GB/s", "written and synchronised", f"{_ASSUMED}: one NVMe disk")
    read_gb_s: float = _number(2.0, "GB/s", "of a checkpoint that one process reads for its digests", _ASSUMED)
    micro_batch_tokens: float = _number(16384, "tokens", "of one pass", "default of `backend.micro_batch_tokens`")
    sequence_tokens: float = _number(4096, "tokens", "of a prompt and its completion", _ASSUMED)
    coding_threads: float = _number(
        4, "threads", "that code at once in a process; more wait", "benchmarks/results/gpu/NVIDIA-H100-80GB-HBM3.json"
    )
    step_bits: float = _number(
        2.1, "bits", "of a changed element's step, besides its position", "benchmarks/results/weights.json, lr 1e-6"
    )
    encode_gb_s: float = _number(
        2.7, "GB/s", "of weights compared and coded by a thread", "benchmarks/results/weights.json, lr 1e-6"
    )
    pull_gb_s: float = _number(
        3.17, "GB/s", "of weights, from plan to verified state over loopback", "benchmarks/results/pull.json, delta"
    )
    snapshot_ratio: float = _number(1.46, "", "weights over a snapshot", "benchmarks/results/pull.json, snapshot")
    decode_share: float = _number(0.5, "", "share of hbm_gb_s that a sampler's decoding reaches", _ASSUMED)
    sampler_sequences: float = _number(256, "sequences", "that an engine decodes at once", "vLLM's max_num_seqs")
    token_bytes: float = _number(
        7.0, "bytes", "that a site sends for a token it drew", "benchmarks/results/groups.json, 4096 tokens"
    )

    @property
    def pass_tokens(self) -> float:
        """Tokens of one pass: a sequence longer than `micro_batch_tokens` has its own."""
        return max(self.micro_batch_tokens, self.sequence_tokens)


def facts(assumptions: Assumptions) -> list[dict[str, Any]]:
    """Name, value, unit, meaning and source (`set` if changed) of each assumption."""
    default = Assumptions()
    rows = []
    for entry in dataclasses.fields(Assumptions):
        value = getattr(assumptions, entry.name)
        is_default = value == getattr(default, entry.name)
        rows.append({"name": entry.name, "value": value, **entry.metadata} | ({} if is_default else {"source": "set"}))
    return rows


def parse(settings: Sequence[str]) -> Assumptions:
    """The defaults changed by `name=value` settings; raises ConfigError for bad ones."""
    names = [entry.name for entry in dataclasses.fields(Assumptions)]
    changes: dict[str, float] = {}
    for setting in settings:
        name, _, text = setting.partition("=")
        if name not in names:
            raise ConfigError("--set", f"{name!r} is unknown", action=f"use one of {', '.join(names)}")
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not 0.0 < value < math.inf:
            raise ConfigError("--set", f"{name} must be a number above 0; got {text!r}")
        changes[name] = value
    assumptions = dataclasses.replace(Assumptions(), **changes)
    if assumptions.mfu > 1.0:
        raise ConfigError("--set", f"mfu must be at most 1, a share of gpu_tflops; got {assumptions.mfu:g}")
    return assumptions
