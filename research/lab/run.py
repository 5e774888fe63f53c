"""Runs an experiment: cells over worker processes, resumable, with a progress bar; ends with results.json and report.

loop      waits for                      unblocked by
pool      the next order of its kind     a worker that is free
worker    a line of its process          the process's answer, or its end: then the run failed and it is replaced
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
from collections.abc import AsyncIterator, Collection, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from heterorl.common.errors import ConfigError
from heterorl.common.process.config_file import load
from heterorl.common.process.threads import own_command
from heterorl.common.wire.common_messages import bytes_digest
from heterorl_research.lab.cell import Cell, list_cells
from heterorl_research.lab.config import ExperimentConfig
from heterorl_research.lab.fast.orders import FAST, MOST_RUNS, MOST_RUNS_ON_GPU, SERVICES, Means, Order, split
from heterorl_research.lab.protocol.rates import statement, with_chosen
from heterorl_research.lab.protocol.rules import check
from heterorl_research.lab.results import (
    cell_digest,
    failure,
    kept,
    mixed_warm_starts,
    one_run_a_line,
    restored,
    rows_of,
)
from heterorl_research.lab.warm_starts import key

CACHE = Path(".cache/heterorl")
INTERRUPTED = 130
KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(1 << 30)}
"""Freed tensors stay with the process: pages that the kernel clears anew for each one cost more than the products."""


def find_experiment(name: str) -> Path:
    """The file of a shipped experiment, or the path itself.

    Raises:
        ConfigError: neither exists; lists what is shipped.
    """
    shipped = Path(str(files("heterorl_research.lab") / "experiments"))
    for path in (Path(name), shipped / f"{name}.toml"):
        if path.is_file():
            return path
    names = sorted(path.stem for path in shipped.glob("*.toml"))
    raise ConfigError("EXPERIMENT", f"{name} is neither a file nor one of {', '.join(names)}")


def run_experiment(name: str, *, out: Path | None = None, overrides: Sequence[str] = (), means: Means) -> int:
    """Run what is missing of an experiment and write its report; returns the exit code.

    Runs of the other engine count as missing: their numbers differ by rounding, and so does what follows from it.

    Raises:
        ConfigError: the experiment is unknown or wrong, or keeps not what its protocol says.
    """
    experiment = load(ExperimentConfig, find_experiment(name), overrides)
    directory = out or Path("runs/lab") / experiment.name
    experiment = with_chosen(experiment, directory)
    confirms = experiment.protocol.confirms if experiment.protocol is not None else ()
    suggested_on = {one: load(ExperimentConfig, find_experiment(one)).seeds for one in confirms}
    check(experiment, list_cells(experiment), suggested_on=suggested_on)
    return carry_out(experiment, directory=directory, means=means)


def carry_out(
    experiment: ExperimentConfig,
    *,
    directory: Path,
    means: Means,
    only: Collection[str] | None = None,
    is_reported: bool = True,
) -> int:
    """Run what is missing of an experiment, or of `only` these run ids, into a directory; returns the exit code."""
    from heterorl_research.lab.report.report import write_report

    console = Console(stderr=True, markup=False, emoji=False, highlight=False)
    cells = list_cells(experiment)
    engine, jobs = means.engine, means.jobs or os.cpu_count() or 1
    if engine == FAST:
        from heterorl_research.lab.fast.scope import check_scope

        # One run that it does not compute would fail those beside it, after their warm starts.
        for cell in cells:
            check_scope(cell)
    (directory / "runs").mkdir(parents=True, exist_ok=True)
    (directory / "experiment.json").write_text(experiment.model_dump_json(indent=2) + "\n", encoding="utf-8")
    for other in means.reuse:
        _take_over(cells, other, directory, engine)
    asked = [number for number, cell in enumerate(cells) if only is None or cell.run_id in only]
    missing = [number for number in asked if not _is_done(directory, cells[number], engine)]
    console.print(f"{experiment.name}: {len(cells)} runs, {len(missing)} to do; in {directory}")
    orders = [Order(kind="run", numbers=(number,)) for number in missing]
    if engine == FAST:
        # Many runs fill a GPU; several processes share it by time slices.
        jobs, most = (jobs, MOST_RUNS) if means.device == "cpu" else (means.jobs or 1, MOST_RUNS_ON_GPU)
        parts = split(cells, missing, jobs=jobs, most=most)
        orders = [Order(kind="batch", numbers=tuple(numbers), device=means.device) for numbers in parts]
    is_whole = asyncio.run(_run_all(cells, missing, orders=orders, directory=directory, jobs=jobs))
    results = _collect(experiment, cells, directory, engine)
    problems = [f"failed: {row['run_id']}: {row['failed']}" for row in results["runs"] if row["failed"]]
    problems += mixed_warm_starts(results["runs"])
    if results["runs"] and is_reported:
        console.print(f"report: {write_report(directory)}")
    for problem in problems:
        console.print(problem, style="red", soft_wrap=True)
    if not is_whole:
        console.print("interrupted; the same command goes on from here")
        return INTERRUPTED
    return 1 if problems else 0


def _is_done(directory: Path, cell: Cell, engine: str) -> bool:
    row = _read(directory, cell)
    return row is not None and not row["failed"] and _is_of(row, cell, engine)


def _is_of(row: dict[str, Any], cell: Cell, engine: str) -> bool:
    """Whether a row is of this very run, computed by this engine."""
    return bool(row["cell_digest"] == cell_digest(cell) and row.get("engine", SERVICES) == engine)


def _take_over(cells: Sequence[Cell], other: Path, directory: Path, engine: str) -> None:
    """Copy the rows of the same runs that another experiment has already, as a directory or as its results.json."""
    of_file = rows_of(other) if other.is_file() else {}
    for cell in (cell for cell in cells if not _is_done(directory, cell, engine)):
        place, row = directory / "runs" / f"{cell.run_id}.json", of_file.get(cell.run_id)
        if row and not row["failed"] and _is_of(row, cell, engine):
            place.write_text(json.dumps(restored(row)), encoding="ascii")
        elif _is_done(other, cell, engine):
            shutil.copyfile(other / "runs" / place.name, place)


def _read(directory: Path, cell: Cell) -> dict[str, Any] | None:
    try:
        row: dict[str, Any] = json.loads((directory / "runs" / f"{cell.run_id}.json").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
    return row


def _collect(experiment: ExperimentConfig, cells: Sequence[Cell], directory: Path, engine: str) -> dict[str, Any]:
    from importlib.metadata import version

    rows = [row for cell in cells if (row := _read(directory, cell)) and _is_of(row, cell, engine)]
    results = {
        "experiment": experiment.name,
        "title": experiment.title,
        "heterorl_version": version("heterorl"),
        "config_digest": bytes_digest(experiment.model_dump_json().encode()),
        "protocol": None if experiment.protocol is None else experiment.protocol.model_dump(exclude={"chosen"}),
        "tuning": statement(experiment, directory),
        "runs": [kept(row) for row in rows],
    }
    (directory / "results.json").write_text(one_run_a_line(results), encoding="ascii")
    return results


async def _run_all(
    cells: Sequence[Cell], missing: Sequence[int], *, orders: Sequence[Order], directory: Path, jobs: int
) -> bool:
    """Warm starts first, then runs; False when interrupted."""
    firsts: dict[tuple[str, int], int] = {}
    for number in missing:
        firsts.setdefault(key(cells[number]), number)
    device = orders[0].device if orders else "cpu"
    warm_starts = [Order(kind="warm_start", numbers=(number,), device=device) for number in firsts.values()]
    work = asyncio.ensure_future(_phases(cells, warm_starts, orders, directory=directory, jobs=jobs))
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, work.cancel)
    try:
        await work
    except asyncio.CancelledError:
        return False
    return True


async def _phases(
    cells: Sequence[Cell], warm_starts: Sequence[Order], runs: Sequence[Order], *, directory: Path, jobs: int
) -> None:
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True, markup=False),
        transient=False,
    ) as progress:
        pool = [_Worker(cells, directory) for _ in range(min(jobs, max(1, len(warm_starts), len(runs))))]
        try:
            for label, orders in (("warm starts", warm_starts), ("runs", runs)):
                bar = progress.add_task(label, total=sum(len(order.numbers) for order in orders))
                queue = list(reversed(orders))

                async def drain(worker: _Worker, queue: list[Order] = queue, bar: Any = bar) -> None:
                    while queue:
                        order = queue.pop()
                        async for share in worker.do(order):
                            progress.advance(bar, share * len(order.numbers))
                        # Its process has died: with one of the runs, or because they were too many.
                        queue += worker.again

                async with asyncio.TaskGroup() as tasks:
                    for worker in pool:
                        tasks.create_task(drain(worker))
        finally:
            for worker in pool:
                await worker.stop()


class _Worker:
    """One worker process, started when it is needed."""

    def __init__(self, cells: Sequence[Cell], directory: Path) -> None:
        self._cells = cells
        self._directory = directory
        self._process: asyncio.subprocess.Process | None = None
        self.again: tuple[Order, ...] = ()
        """Halves of the last order that are to be tried; none where it was carried out, or failed for good."""

    async def do(self, order: Order) -> AsyncIterator[float]:
        """Have an order carried out; shares of it as they are done, 1 in all.

        A process that dies fails the run it was given; of several, which come `again` by halves, none.
        """
        self.again = ()
        process = await self._started()
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(ConnectionError):
            process.stdin.write(order.line().encode() + b"\n")
            await process.stdin.drain()
        done = 0.0
        while line := await process.stdout.readline():
            answer = json.loads(line)
            if "share" not in answer:
                yield 1.0 - done
                return
            yield answer["share"] - done
            done = answer["share"]
        code = await process.wait()
        self._process = None
        if len(order.numbers) > 1:
            self.again = order.halves()
            yield -done
            return
        if order.kind != "warm_start":
            from heterorl_research.lab.worker import write_json

            for cell in (self._cells[number] for number in order.numbers):
                row = failure(cell, problem=f"its process ended with code {code}; see worker.log", wall_s=0.0)
                row |= {"engine": FAST} if order.kind == "batch" else {}
                write_json(self._directory / "runs" / f"{cell.run_id}.json", row)
        yield 1.0 - done

    async def stop(self) -> None:
        """Kill the process; what it was doing is done again next time."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()

    async def _started(self) -> asyncio.subprocess.Process:
        if self._process is None:
            with (self._directory / "worker.log").open("ab") as log:
                self._process = await asyncio.create_subprocess_exec(
                    *own_command(
                        "heterorl_research.lab.worker",
                        str(self._directory / "experiment.json"),
                        str(self._directory),
                        str(CACHE),
                    ),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=log,
                    # One core each; torch's own threads would fight over them.
                    env={**os.environ, "OMP_NUM_THREADS": "1", **KEEP_MEMORY},
                    start_new_session=True,
                )
        return self._process
