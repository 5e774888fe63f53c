"""Numbers of a part, written as they come: a part that is ended keeps what it has measured."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PEAK = "products in bf16"
"""The row of the card whose share a step's products are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a part computes, for how long, and whether at a tenth of its size."""

    device: str
    is_small: bool
    limit_s: float
    peak_tflops: float
    """Of the card's own products; 0 where they were not measured."""

    def pick(self, whole: int, small: int) -> int:
        """A size."""
        return small if self.is_small else whole


class Rows:
    """The rows of one part, in a file that is whole at any instant."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._rows: list[dict[str, Any]] = []

    def add(self, what: str, value: float, unit: str, *, forecast: float | None = None) -> None:
        """A number, and what the plan says it is."""
        row: dict[str, Any] = {"what": what, "value": _short(value), "unit": unit}
        if forecast is not None:
            row["forecast"] = _short(forecast)
        self._append(row)

    def note(self, what: str, text: str) -> None:
        """A sentence in place of a number, such as what is not installed."""
        self._append({"what": what, "note": text})

    def _append(self, row: dict[str, Any]) -> None:
        self._rows.append(row)
        unfinished = self._path.with_suffix(".new")
        unfinished.write_text(json.dumps(self._rows), encoding="utf-8")
        unfinished.replace(self._path)
        print(row, flush=True)


def seconds(work: Callable[[], object], *, device: str, repeats: int = 3) -> float:
    """The least seconds of several runs after one that warms up, the device's work included."""
    import torch

    taken = []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        work()
        if device != "cpu":
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - started)
    return min(taken[1:])


def _short(value: float) -> float:
    return float(f"{value:.4g}")
