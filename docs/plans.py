"""Tables of plans: three models, and predictions next to measurements."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.regions.arms import MAX_TOKENS, REGIONS, ROWS, SECONDS_PER_TOKEN
from heterorl.cli.plan import size_words, time_words
from heterorl.common.model.model_shape import SHAPES, ModelShape
from heterorl.plan.assumptions import Assumptions
from heterorl.plan.estimate import Drawing, Question, delta_bytes, plan, rank_memory

Rows = tuple[Sequence[str], list[Sequence[str]]]
MODELS = ("Qwen3-1.7B", "Qwen3-8B", "Qwen3-32B")
GPUS = (8, 64)
PUBLISHED = (("torch", 1), ("fsdp2", 4))
"""Rows of benchmarks/publish.py that a plan is made of."""
CORE_TFLOPS = 0.1
"""fp32 of a core of that machine at its best: 32 operations in each of 3e9 cycles a second."""
CORE_GB_S = 10.0
"""A core and its memory."""
NEAR = 0.2
"""Rows that are farther off name a term."""
TERMS = {
    "delta": "bits of a step grow with the rate",
    "step, backend torch": "no term: `mfu` was 0.44",
    "step, backend fsdp2": "gathers and AdamW in short passes",
    "publication": "round trips, file synchronisation",
    "checkpoint": "file synchronisation",
    "staleness": "outages",
    "tokens": "outages",
}
"""What the plan lacks, by the beginning of a row's name."""
Check = tuple[str, str, str, float]
"""What, predicted and measured in words, and their ratio."""


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


def checks(sources: dict[str, dict[str, Any]]) -> Rows:
    """Predicted, measured, their ratio, and the term that the plan lacks where they differ by more than NEAR.

    Args:
        sources: benchmarks/results/*.json by name: weights, load, publish, regions and loop.
    """
    found = [*_sizes(sources["weights"], sources["load"])]
    found += [row for entry in sources["publish"]["rows"] if _is_planned(entry) for row in _run(entry)]
    found += [*_regions(sources["regions"]), *_loop(sources["loop"])]
    rows = [[name, *words, f"{ratio:.2f}", _term(name, ratio)] for name, *words, ratio in found]
    return ["what", "predicted", "measured", "ratio", "the plan lacks"], rows


def _term(name: str, ratio: float) -> str:
    if abs(ratio - 1.0) <= NEAR:
        return "-"
    return next(term for beginning, term in TERMS.items() if name.startswith(beginning))


def _size(name: str, predicted: float, measured: float) -> Check:
    return name, size_words(predicted), size_words(measured), predicted / measured


def _sizes(weights: dict[str, Any], load: dict[str, Any]) -> Iterator[Check]:
    elements = weights["num_elements"]
    for row in weights["rows"]:
        if row["scheme"] == "gapulp" and row["lag_versions"] == 1:
            predicted = delta_bytes(elements, changed=row["changed_fraction"], step_bits=Assumptions().step_bits)
            name = f"delta, lr {row['lr']:g}, {row['changed_fraction']:.1%} of the elements changed"
            yield _size(name, predicted, 2 * elements / row["ratio"])
    for row in load["rows"]:
        if row["backend"] == "torch":
            shape = SHAPES["Qwen3-0.6B"]
            memory = rank_memory(
                shape, row["parameters"], backend="torch", ranks=1, micro_batch_tokens=1, products="bf16"
            )
            name = f"masters of a loaded model of {row['parameters'] / 1e6:.1f}M parameters, backend torch"
            yield _size(name, memory.masters, 1e6 * row["after"]["kept"][0])


def _regions(results: dict[str, Any]) -> Iterator[Check]:
    """Bytes, staleness and speed over four lines, of runs whose step and engine take stated times."""
    rows = [row for row in results["rows"] if row["arm"] == "heterorl"]
    summaries = {one["arm"]: one for one in results["summaries"]}
    elements = summaries["heterorl"]["schemes"]["full"] / 2
    line, changed = REGIONS["far"], sum(row["changed_share"] for row in rows) / len(rows)
    found = plan(
        Question(
            parameters=elements, gpus=1, backend="torch", link_bits_per_s=line.bits_per_s, rtt_s=line.rtt_s,
            changed=changed, given=Assumptions(sequence_tokens=MAX_TOKENS),
        )
    )  # fmt: skip
    timed = dataclasses.replace(
        found, step_s=results["how"]["version_s"], drawing=Drawing(gpus=1, sequences=ROWS, step_s=SECONDS_PER_TOKEN)
    )
    yield _size("delta, four regions", found.delta_bytes, summaries["heterorl"]["schemes"]["ours"])
    for arm, name in (("heterorl", "median of four regions"), ("outage", "95 % of groups, one region cut off")):
        measured = summaries[arm]["staleness_p50" if arm == "heterorl" else "staleness_p95"]
        predicted = timed.staleness_versions
        yield f"staleness, {name}", f"{predicted:.1f} versions", f"{measured:.1f} versions", predicted / measured
    share = summaries["heterorl"]["share"]["mean"]
    yield "tokens, four regions over one", "1", f"{share:.2f}", 1 / share


def _loop(results: dict[str, Any]) -> Iterator[Check]:
    """A sampler's speed over its engine's alone; the plan takes the engine's."""
    for row in results["rows"]:
        if row["release"] == "now":
            cut = f", {row['outage_s']:.0f} s cut off" if row["outage_s"] else ""
            most = row["lengths"].rpartition(" ")[2]
            name, share = f"tokens, {row['engine']} of a sampler over itself, at most {most}{cut}", row["utilisation"]
            yield name, "1", f"{share:.2f}", 1 / share


def _is_planned(entry: dict[str, Any]) -> bool:
    return entry["nodes"] == 1 and (entry["backend"], entry["ranks"]) in PUBLISHED


def _run(entry: dict[str, Any]) -> list[Check]:
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
        *((f"{what}, {where}", time_words(one), time_words(other), one / other) for what, one, other in times),
        _size(f"memory of a rank in a step, {where}", found.memory.total, 1e6 * held),
    ]
