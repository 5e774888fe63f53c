"""Tables of plans: three models, and predictions next to measurements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from heterorl.cli.plan import size_words, time_words
from heterorl.plan.assumptions import Assumptions
from heterorl.plan.costs import delta_bytes, rank_memory
from heterorl.plan.estimate import Question, plan
from heterorl.plan.model_shape import SHAPES, ModelShape

Rows = tuple[Sequence[str], list[Sequence[str]]]
MODELS = ("Qwen3-1.7B", "Qwen3-8B", "Qwen3-32B")
GPUS = (8, 64)
PUBLISHED = (("torch", 1), ("fsdp2", 4))
"""Rows of benchmarks/publish.py that a plan is made of."""
CORE_TFLOPS = 0.1
"""fp32 of a core of that machine at its best: 32 operations in each of 3e9 cycles a second."""
CORE_GB_S = 10.0
"""A core and its memory."""


def plans() -> Rows:
    """Models by GPUs, with the defaults of the command."""
    header = [
        "model, GPUs", "step", "publication", "checkpoint", "memory of a rank", "between steps", "a version up",
        "a pull", "a new sampler",
    ]  # fmt: skip
    rows = []
    for name in MODELS:
        for gpus in GPUS:
            shape = SHAPES[name]
            found = plan(Question(parameters=shape.parameters, shape=shape, gpus=gpus))
            total = size_words(found.memory.total)
            rows.append(
                [
                    f"{name}, {gpus}",
                    time_words(found.step_s),
                    time_words(found.publication_s),
                    time_words(found.checkpoint_s),
                    total if found.fits else f"{total}, **too much**",
                    size_words(found.memory.state),
                    size_words(found.delta_bytes),
                    time_words(found.pull_s),
                    f"{size_words(found.snapshot_bytes)}, {time_words(found.join_s)}",
                ]
            )
    return header, rows


def checks(weights: dict[str, Any], load: dict[str, Any], publish: dict[str, Any]) -> Rows:
    """Predicted, measured and their ratio.

    Args:
        weights: benchmarks/results/weights.json.
        load: benchmarks/results/load.json.
        publish: benchmarks/results/publish.json.
    """
    elements, found = weights["num_elements"], []
    for row in weights["rows"]:
        if row["scheme"] == "gapulp" and row["lag_versions"] == 1:
            predicted = delta_bytes(elements, changed=row["changed_fraction"], step_bits=Assumptions().step_bits)
            name = f"delta, lr {row['lr']:g}, {row['changed_fraction']:.1%} of the elements changed"
            found.append((name, predicted, 2 * elements / row["ratio"]))
    for row in load["rows"]:
        if row["backend"] == "torch":
            shape = SHAPES["Qwen3-0.6B"]
            memory = rank_memory(
                shape, row["parameters"], backend="torch", ranks=1, micro_batch_tokens=1, products="bf16"
            )
            name = f"masters of a loaded model of {row['parameters'] / 1e6:.1f}M parameters, backend torch"
            found.append((name, memory.masters, 1e6 * row["after"]["kept"][0]))
    rows = [
        [name, size_words(predicted), size_words(measured), f"{predicted / measured:.2f}"]
        for name, predicted, measured in found
    ]
    rows += [row for entry in publish["rows"] if _is_planned(entry) for row in _run(entry)]
    return ["what", "predicted", "measured", "ratio"], rows


def _is_planned(entry: dict[str, Any]) -> bool:
    return entry["nodes"] == 1 and (entry["backend"], entry["ranks"]) in PUBLISHED


def _run(entry: dict[str, Any]) -> list[Sequence[str]]:
    """A row of benchmarks/publish.py beside the plan of such a run on such a machine."""
    ranks, nodes = entry["ranks"], entry["nodes"]
    # All ranks share two cores.
    share = min(1.0, 2 / ranks)
    given = Assumptions(
        gpu_tflops=CORE_TFLOPS * share, hbm_gb_s=CORE_GB_S * share, pcie_gb_s=CORE_GB_S * share, gpu_link_gb_s=1.0,
        node_link_gb_s=1.0, gather_gb_s=1.0, disk_gb_s=1.0, read_gb_s=1.0, coding_threads=2, micro_batch_tokens=64,
        sequence_tokens=11,
    )  # fmt: skip
    shape = ModelShape(
        name="of the benchmark", vocab=8192, hidden=768, intermediate=1536, layers=18, heads=4, kv_heads=4,
        head_dim=192, is_tied=True,
    )  # fmt: skip
    found = plan(
        Question(
            parameters=entry["parameters"], shape=shape, gpus=ranks, gpus_per_node=ranks // nodes,
            backend=entry["backend"], products="fp32", link_bits_per_s=1e10, rtt_s=0.001, tokens_per_step=180,
            changed=0.09, given=given,
        )
    )  # fmt: skip
    where = f"backend {entry['backend']}, {ranks} rank{'s' * (ranks > 1)}" + f", {nodes} nodes" * (nodes > 1)
    times = (
        ("step", found.step_s, entry["step_s"]),
        ("publication", found.publication_s, entry["publish_s"]),
        ("checkpoint", found.checkpoint_s, entry["checkpoint_s"]),
    )
    held = max(peak - base for peak, base in zip(entry["phases_rss_mb"]["step"], entry["base_rss_mb"], strict=True))
    return [
        *([f"{what}, {where}", time_words(one), time_words(other), f"{one / other:.2f}"] for what, one, other in times),
        [
            f"memory of a rank in a step, {where}", size_words(found.memory.total), size_words(1e6 * held),
            f"{found.memory.total / 1e6 / held:.2f}",
        ],
    ]  # fmt: skip
