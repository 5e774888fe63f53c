"""The supervised warm start of a cell: shared by all algorithms, delays and variants of a task and seed."""

from __future__ import annotations

from pathlib import Path

from heterorl.common.generation.tiny_model import WarmStart, warm_start
from heterorl_research.lab.cell import Cell


def key(cell: Cell) -> tuple[str, int]:
    """Cells with the same key start from the same weights."""
    return cell.task.model_dump_json(), _seed(cell)


def _seed(cell: Cell) -> int:
    return cell.seed if cell.task.warm_start_seed is None else cell.task.warm_start_seed


class MissedTarget(RuntimeError):
    """A warm start that ended below its target: no rule learns from such weights, and they widen every interval."""


def start_of(cell: Cell, *, cache: Path) -> Path:
    """The directory of the model that a run begins from.

    Raises:
        MissedTarget: its accuracy is below `warm_start_target`.
    """
    directory, accuracy = prepare(cell, cache=cache)
    if accuracy < cell.task.warm_start_target:
        raise MissedTarget(
            f"the warm start of seed {_seed(cell)} ended at {accuracy:.2f}, and warm_start_target is"
            f" {cell.task.warm_start_target:g}: take another seed"
        )
    return directory


def prepare(cell: Cell, *, cache: Path, device: str = "cpu") -> tuple[Path, float]:
    """Return the model's directory and its sampled accuracy; trains only when the cache has no verified copy."""
    return warm_start(
        WarmStart(
            task=cell.task.task.name,
            digits=cell.task.task.digits,
            terms=cell.task.task.terms,
            learning_rate=cell.task.warm_start_lr,
            batch_size=cell.task.warm_start_batch,
            seed=_seed(cell),
            target=cell.task.warm_start_target,
            hidden_size=cell.task.hidden_size,
            num_layers=cell.task.num_layers,
        ),
        cache=cache,
        device=device,
    )
