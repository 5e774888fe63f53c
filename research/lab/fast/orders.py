"""What a worker of the lab is asked for, and which runs the vectorised lab computes together. Imports no torch."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from heterorl_research.lab.cell import Cell

SERVICES, FAST = "services", "fast"
MOST_RUNS = 4
"""Runs of a batch on a CPU: more of them cost no less each, and an interruption loses more."""
MOST_RUNS_ON_GPU = 256
"""Runs of a batch on a GPU, which many runs fill."""
OWN = frozenset({"lr", "warmup_steps", "sampler_noise"})
"""Keys of the regime in which the runs of a batch may differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Means:
    """How an experiment is carried out."""

    jobs: int = 0
    """Processes; 0 takes all cores."""
    reuse: Sequence[Path] = ()
    """Results of other experiments, directories or files, whose equal runs are taken over."""
    engine: str = SERVICES
    device: str = "cpu"
    """Where the engine `fast` computes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Cells by number: one for `warm_start` and `run`, any number for `batch`."""

    kind: str
    numbers: tuple[int, ...]
    device: str = "cpu"

    def line(self) -> str:
        """As a worker reads it."""
        numbers = self.numbers if self.kind == "batch" else self.numbers[0]
        return json.dumps({self.kind: numbers, "device": self.device})

    def halves(self) -> tuple[Order, Order]:
        """Its cells in two orders."""
        middle = len(self.numbers) // 2
        return replace(self, numbers=self.numbers[:middle]), replace(self, numbers=self.numbers[middle:])


def batch_key(cell: Cell) -> str:
    """Cells with the same key may run together."""
    return json.dumps([cell.task.model_dump(mode="json"), cell.regime.model_dump(mode="json", exclude=set(OWN))])


def split(cells: Sequence[Cell], missing: Sequence[int], *, jobs: int, most: int) -> list[list[int]]:
    """Batches of at most `most` runs of one key, in order and of about the same size; at least one for each job.

    Args:
        cells: all of them.
        missing: numbers of those to run.
        jobs: processes that take batches.
        most: runs of a batch.
    """
    of_key: dict[str, list[int]] = {}
    for number in missing:
        of_key.setdefault(batch_key(cells[number]), []).append(number)
    batches: list[list[int]] = []
    for numbers in of_key.values():
        count = max(math.ceil(len(numbers) / most), min(jobs, len(numbers)) if len(of_key) < jobs else 1)
        size = math.ceil(len(numbers) / count)
        batches += [numbers[start : start + size] for start in range(0, len(numbers), size)]
    return batches
