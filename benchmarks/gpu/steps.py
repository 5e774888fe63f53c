"""A learner's step by each backend and by TRL: tokens a second, memory, and the share of the card's products."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.gpu.rows import PEAK, Place, Rows
from benchmarks.learner import VOCAB_SIZE, write_model
from heterorl.common.model.model_shape import ModelShape
from heterorl.plan.assumptions import Assumptions
from heterorl.plan.estimate import Cluster, compute_s, optimizer_s, rank_memory

GROUPS, GROUP_SIZE, MICRO_BATCH_TOKENS = 4, 4, 16_384
SIZES = ((1280, 24), (768, 12))
"""Hidden width and layers: half a billion weights and a tenth of it."""
VARIANTS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("", ("heterorl", "fsdp2", "trl"), ""),
    ("--checkpointing", ("heterorl", "trl"), ""),
    ("--compile", ("heterorl", "fsdp2"), "triton"),
    ("--liger", ("fsdp2",), "liger_kernel"),
)
"""Option of benchmarks.learner, the systems that take it, and the package that it needs."""


def run(rows: Rows, place: Place) -> None:
    """Every system in a process of its own, on a model of half a billion weights and one of a tenth of it."""
    for hidden_size, layers in ((64, 1),) if place.is_small else SIZES:
        with tempfile.TemporaryDirectory() as name:
            directory = Path(name)
            parameters = write_model(directory, hidden_size=hidden_size, layers=layers)
            shape = _shape(hidden_size, layers)
            for option, systems, package in VARIANTS:
                if package and (find_spec(package) is None or place.device == "cpu"):
                    rows.note(f"{parameters / 1e6:.0f} M, {option[2:]}", f"skipped: needs a card and {package}")
                    continue
                for system in systems:
                    title = f"{parameters / 1e6:.0f} M, {system}{', ' * bool(option)}{option[2:]}"
                    if system == "trl" and find_spec("trl") is None:
                        rows.note(title, "skipped: trl is not installed")
                        continue
                    found = _measure(system, option, directory, hidden_size, layers, place)
                    if isinstance(found, str):
                        rows.note(title, f"failed: {found}")
                    else:
                        _report(rows, title, found, shape, parameters, peak_tflops=place.peak_tflops)


def _measure(
    system: str, option: str, directory: Path, hidden_size: int, layers: int, place: Place
) -> dict[str, Any] | str:
    answer = subprocess.run(
        [sys.executable, "-m", "benchmarks.learner", "--system", system, "--model-dir", str(directory),
         "--device", place.device, "--hidden-size", str(hidden_size), "--layers", str(layers),
         "--groups", str(place.pick(GROUPS, 1)), "--group-size", str(GROUP_SIZE),
         "--max-tokens", str(place.pick(1024, 16)), "--steps", "3", *([option] if option else [])],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    line = next((line for line in answer.stdout.splitlines() if line.startswith("ROW ")), "")
    if not line:
        return " | ".join(answer.stderr.strip().splitlines()[-3:])[-400:] or f"exit code {answer.returncode}"
    found: dict[str, Any] = json.loads(line.removeprefix("ROW "))
    return found


def _report(
    rows: Rows, title: str, found: dict[str, Any], shape: ModelShape, parameters: int, *, peak_tflops: float
) -> None:
    tokens, speed = found["tokens"], found["tokens_per_wall_s"]
    mean_length = tokens / (GROUPS * GROUP_SIZE)
    given = Assumptions(sequence_tokens=mean_length)
    cluster = Cluster(gpus=1, gpus_per_node=1)
    forecast = forecast_mb = None
    if "trl" not in title:
        taken = compute_s(shape, parameters, tokens=tokens, cluster=cluster, given=given)
        taken += optimizer_s(parameters, cluster=cluster, given=given)
        backend = "fsdp2" if "fsdp2" in title else "torch"
        memory = rank_memory(
            shape, parameters, backend=backend, ranks=1, micro_batch_tokens=MICRO_BATCH_TOKENS, products="bf16"
        )
        forecast = tokens / taken
        # The plan's activations are those of layers that are computed again.
        forecast_mb = memory.total / (1 << 20) if "checkpointing" in title else None
    rows.add(f"{title}: speed", speed, "tokens/s", forecast=forecast)
    rows.add(f"{title}: peak memory", found["peak_memory_mb"] / 1024, "GiB", forecast=_gib(forecast_mb))
    if peak_tflops:
        flops = tokens * (6.0 * parameters + 6.0 * shape.layers * shape.heads * shape.head_dim * mean_length)
        share = flops / (tokens / speed) / (peak_tflops * 1e12)
        rows.add(f"{title}: share of {PEAK}", share, "", forecast=None if forecast is None else given.mfu)


def _gib(mebibytes: float | None) -> float | None:
    return None if mebibytes is None else mebibytes / 1024


def _shape(hidden_size: int, layers: int) -> ModelShape:
    return ModelShape(
        name="made", vocab=VOCAB_SIZE, hidden=hidden_size, intermediate=3 * hidden_size, layers=layers,
        heads=hidden_size // 64, kv_heads=max(1, hidden_size // 128), head_dim=64, is_tied=True,
    )  # fmt: skip
