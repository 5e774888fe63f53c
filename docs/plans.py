"""The tables of docs/plan.md: plans of three models, what they assume, and predictions beside what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from heterorl.cli.plan.amounts import size_words, time_words
from heterorl.plan.assumptions import Assumptions, facts
from heterorl.plan.memory import rank_memory
from heterorl.plan.plan import Question, plan
from heterorl.plan.shape import SHAPES
from heterorl.plan.traffic import delta_bytes

Rows = tuple[Sequence[str], list[Sequence[str]]]
MODELS = ("Qwen3-1.7B", "Qwen3-8B", "Qwen3-32B")
GPUS = (8, 64)


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


def assumptions() -> Rows:
    """Name, value, meaning and source of each."""
    rows = [
        [f"`{fact['name']}`", f"{fact['value']:g} {fact['unit']}".strip(), fact["meaning"], _cited(fact["source"])]
        for fact in facts(Assumptions())
    ]
    return ["assumption", "default", "what", "source"], rows


def checks(weights: dict[str, Any], load: dict[str, Any]) -> Rows:
    """Predicted, measured and their ratio.

    Args:
        weights: benchmarks/results/weights.json.
        load: benchmarks/results/load.json.
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
    return ["what", "predicted", "measured", "ratio"], rows


def _cited(source: str) -> str:
    path, _, rest = source.partition(",")
    if not path.startswith("benchmarks/"):
        return source
    return f"[{path.rpartition('/')[2]}](../{path}),{rest}"
