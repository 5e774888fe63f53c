"""A process that runs cells: one JSON line in per order, one JSON line out per answer.

{"warm_start": N, "device": D}   make sure that the warm start of cell N exists
{"run": N}          run cell N and write runs/RUN_ID.json
{"batch": [N, ...], "device": D}   run these cells together with the engine fast; meanwhile lines {"share": S}

A batch that fails is tried again by halves, down to the run that fails alone.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import torch

from heterorl.common.errors import ConfigError, HeterorlError
from heterorl.common.process.files import replacing
from heterorl_research.lab.cell import Cell, list_cells
from heterorl_research.lab.config import ExperimentConfig
from heterorl_research.lab.fast.batch import run_batch
from heterorl_research.lab.fast.orders import FAST
from heterorl_research.lab.results import failure, summarise
from heterorl_research.lab.warm_starts import prepare, start_of
from heterorl_research.lab.world import run_cell


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a file that is there whole or not at all."""
    with replacing(path, is_durable=False) as file:
        file.write((json.dumps(content, allow_nan=False) + "\n").encode("ascii"))


def _run(cell: Cell, *, out: Path, cache: Path) -> dict[str, Any]:
    started = time.perf_counter()
    # Its databases and payloads are as durable as ever, on memory where there is such a directory.
    base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    try:
        model_dir = start_of(cell, cache=cache)
        with tempfile.TemporaryDirectory(prefix="heterorl-lab-", dir=base) as directory:
            outcome = run_cell(cell, model_dir=model_dir, directory=Path(directory))
        row = summarise(cell, outcome, wall_s=time.perf_counter() - started)
    except (HeterorlError, ExceptionGroup, RuntimeError) as error:
        row = failure(cell, problem=f"{type(error).__name__}: {error}", wall_s=time.perf_counter() - started)
    write_json(out / "runs" / f"{cell.run_id}.json", row)
    return {"run_id": cell.run_id, "last": row.get("last"), "failed": row["failed"]}


def run_together(
    cells: list[Cell], *, out: Path, cache: Path, device: str, tell: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """Run cells of one shape with the engine fast and write their rows; returns the answer to the order."""
    started = time.perf_counter()
    steps = cells[0].regime.max_steps

    def note_step(done: int) -> None:
        if done % max(1, steps // 50) == 0:
            tell({"share": done / steps})

    try:
        model_dirs = [start_of(cell, cache=cache) for cell in cells]
        outcomes = run_batch(cells, model_dirs=model_dirs, device=device, note_step=note_step)
    except (HeterorlError, RuntimeError) as error:
        if len(cells) > 1 and not isinstance(error, ConfigError):
            # One run, or their number, is the cause: the others do not fail with it.
            middle = len(cells) // 2
            for part in (cells[:middle], cells[middle:]):
                run_together(part, out=out, cache=cache, device=device, tell=lambda _: None)
            return {"runs": len(cells)}
        for cell in cells:
            row = failure(cell, problem=f"{type(error).__name__}: {error}", wall_s=time.perf_counter() - started)
            write_json(out / "runs" / f"{cell.run_id}.json", {**row, "engine": FAST})
        return {"runs": len(cells)}
    # The time of the batch, in equal parts: what a cell costs.
    wall_s = (time.perf_counter() - started) / len(cells)
    for cell, outcome in zip(cells, outcomes, strict=True):
        row = summarise(cell, outcome, wall_s=wall_s)
        write_json(out / "runs" / f"{cell.run_id}.json", {**row, "engine": FAST})
    return {"runs": len(cells)}


def main() -> None:
    """Answer orders until the input ends."""
    torch.set_num_threads(1)
    experiment_path, out, cache = (Path(argument) for argument in sys.argv[1:4])
    cells = list_cells(ExperimentConfig.model_validate_json(experiment_path.read_text(encoding="utf-8")))
    # What libraries print must not look like an answer.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for line in sys.stdin:
        order = json.loads(line)
        answer: dict[str, Any]
        if "warm_start" in order:
            _, accuracy = prepare(cells[order["warm_start"]], cache=cache, device=order["device"])
            answer = {"accuracy": accuracy}
        elif "batch" in order:
            chosen = [cells[number] for number in order["batch"]]
            tell = functools.partial(_tell, answers)
            answer = run_together(chosen, out=out, cache=cache, device=order["device"], tell=tell)
        else:
            answer = _run(cells[order["run"]], out=out, cache=cache)
        _tell(answers, answer)


def _tell(answers: TextIO, answer: dict[str, Any]) -> None:
    print(json.dumps(answer), file=answers)


if __name__ == "__main__":
    main()
