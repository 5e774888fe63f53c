"""`heterorl demo`: warm start, four processes on loopback, a live view, and a verdict.

Guarantees: a promise that the run broke (ledger, digests, a process that failed, accuracy that did not rise) is an exit
code other than 0; Ctrl-C stops every process in order and still writes what is known.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live

from services.common.errors import HeterorlError, RemoteError
from services.common.rpc.client import CoordinatorClient
from services.common.rpc.retry import RetryPolicy
from services.common.types import RunStatus, StepReport
from services.demo.config import (
    FULL,
    SITES,
    TINY,
    DemoOptions,
    Regime,
    coordinator_tables,
    learner_tables,
    sampler_tables,
)
from services.demo.processes import Child, start, stop
from services.demo.report import write_report
from services.demo.table import line, newest_accuracy, render

CACHE = Path(".cache/heterorl")
REFRESH_S = 1.0
START_LIMIT_S = 60.0
INTERRUPTED = 130


def run_demo(options: DemoOptions) -> int:
    """Run the demonstration; returns the exit code."""
    console = Console()
    regime = TINY if options.tiny else FULL
    if options.out.exists():
        shutil.rmtree(options.out)
    options.out.mkdir(parents=True)
    model_dir, warm = _warm(regime, options, console)
    started = time.monotonic()
    demo = _Demo(options=options, regime=regime, model_dir=model_dir, warm_start=warm, console=console)
    was_interrupted = False
    try:
        asyncio.run(demo.run())
    except (KeyboardInterrupt, asyncio.CancelledError):
        was_interrupted = True
        console.print("stopping")
    finally:
        demo.stop()
    summary = demo.summary(wall_s=time.monotonic() - started)
    problems = demo.problems(summary)
    (options.out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    console.print(
        f"held-out accuracy {summary['warm_start_accuracy']:.3f} -> {summary['final_accuracy']:.3f} "
        f"(best {summary['best_accuracy']:.3f}) with staleness {summary['staleness_versions_mean']:.1f} versions"
    )
    console.print(f"report: {summary['report']}\nmodel:  {summary['model_dir']}", soft_wrap=True)
    if was_interrupted:
        return INTERRUPTED
    for problem in problems:
        console.print(f"[bold red]broken promise:[/] {problem}")
    return 1 if problems else 0


def _warm(regime: Regime, options: DemoOptions, console: Console) -> tuple[Path, float]:
    import torch
    from transformers.utils import logging as transformers_logging

    from services.demo.warm_start import WarmStart, warm_start

    transformers_logging.disable_progress_bar()
    torch.set_num_threads(1)
    console.print("warm start: a small Qwen3-architecture model learns a quarter of the task by imitation")
    model_dir, accuracy = warm_start(
        WarmStart(digits=regime.digits, seed=options.seed, target=regime.warm_start_target), cache=CACHE
    )
    console.print(f"warm start: accuracy {accuracy:.3f}, {model_dir}")
    return model_dir, accuracy


class _Demo:
    """The state of one demonstration."""

    def __init__(
        self, *, options: DemoOptions, regime: Regime, model_dir: Path, warm_start: float, console: Console
    ) -> None:
        self._options = options
        self._regime = regime
        self._model_dir = model_dir
        self._warm_start = warm_start
        self._console = console
        self._children: list[Child] = []
        self._reports: list[StepReport] = []
        self._status: RunStatus | None = None
        self._failure = ""

    async def run(self) -> None:
        """Start everything, watch it, and return when the learner is done."""
        main = asyncio.current_task()
        assert main is not None, "inside asyncio.run"
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, main.cancel)
        try:
            address = await self._start()
            # Short patience: the view is drawn again a second later.
            async with CoordinatorClient(address, policy=RetryPolicy(budget_s=3.0)) as client:
                await self._watch(client)
                await self._look(client)
        except HeterorlError as error:
            self._failure = str(error)

    async def _start(self) -> str:
        options, regime, out = self._options, self._regime, self._options.out
        coordinator = start(
            "coordinator", name="coordinator", tables=coordinator_tables(regime, options), directory=out
        )
        self._children.append(coordinator)
        address = await self._address(coordinator)
        tables = learner_tables(regime, options, address=address, model_dir=self._model_dir)
        self._children.insert(0, start("learner", name="learner", tables=tables, directory=out))
        for site in SITES:
            tables = sampler_tables(regime, options, site=site, address=address, model_dir=self._model_dir)
            self._children.insert(0, start("sampler", name=site, tables=tables, directory=out))
        return address

    async def _address(self, coordinator: Child) -> str:
        path = self._options.out / "coordinator" / "address"
        for _ in range(int(START_LIMIT_S / 0.1)):
            coordinator.check()
            if path.exists():
                return path.read_text(encoding="ascii").strip()
            await asyncio.sleep(0.1)
        raise HeterorlError("the coordinator did not start in time", action=f"see {coordinator.log}")

    async def _watch(self, client: CoordinatorClient) -> None:
        deadline = time.monotonic() + self._regime.time_limit_s
        is_terminal = self._console.is_terminal
        next_line = 0.0
        with Live(console=self._console, auto_refresh=False, transient=False) as live:
            while True:
                await self._look(client)
                for child in self._children:
                    child.check()
                if self._status is not None and is_terminal:
                    live.update(self._view(self._status), refresh=True)
                elif self._status is not None and time.monotonic() >= next_line:
                    next_line = time.monotonic() + 5 * REFRESH_S
                    self._console.print(line(self._status, self._reports, max_steps=self._regime.max_steps))
                if all(child.exit_code == 0 for child in self._children if child.name != "coordinator"):
                    return
                if time.monotonic() > deadline:
                    raise HeterorlError(f"the run did not end within {self._regime.time_limit_s:.0f} s")
                await asyncio.sleep(REFRESH_S)

    def _view(self, status: RunStatus) -> Any:
        return render(
            status,
            self._reports,
            max_steps=self._regime.max_steps,
            warm_start=self._warm_start,
            algorithm=self._options.algorithm.upper(),
        )

    async def _look(self, client: CoordinatorClient) -> None:
        try:
            self._status = await client.get_status()
            while True:
                last = self._reports[-1].step if self._reports else 0
                new = await client.list_steps(after_step=last, limit=500)
                self._reports += new
                if len(new) < 500:
                    return
        except RemoteError as error:
            self._console.log(f"the coordinator does not answer: {error}")

    def stop(self) -> None:
        """Stop samplers, learner and coordinator, in this order."""
        stop(self._children)

    def summary(self, *, wall_s: float) -> dict[str, Any]:
        """Numbers of the run; writes report and model on the way."""
        out, reports = self._options.out, self._reports
        versions = _records(out / "learner" / "versions.jsonl")
        summary: dict[str, Any] = {
            "algorithm": self._options.algorithm,
            "seed": self._options.seed,
            "lag_versions": self._regime.lag_versions,
            "warm_start_accuracy": self._warm_start,
            "final_accuracy": newest_accuracy(reports) or 0.0,
            "best_accuracy": max((r.evaluation_accuracy or 0.0 for r in reports), default=0.0),
            "staleness_versions_mean": _mean([report.staleness_mean for report in reports]),
            "staleness_versions_steady": _mean(
                [report.staleness_mean for report in reports if report.step > self._regime.lag_versions]
            ),
            "staleness_versions_max": max((report.staleness_max for report in reports), default=0),
            "policy_age_s_p50": statistics.median([report.policy_age_p50_s for report in reports] or [0.0]),
            "versions": len(versions),
            "groups_trained": sum(report.num_groups for report in reports),
            "digest_mismatches": digest_mismatches(
                versions, [_records(out / site / "versions.jsonl") for site in SITES]
            ),
            "ledger_balanced": self._status is not None and self._status.ledger.is_balanced,
            "weight_bytes_full": versions[-1]["full_bytes"] if versions else 0,
            "weight_bytes_sent_median": int(statistics.median([entry["bytes"] for entry in versions[1:]] or [0])),
            "wall_s": round(wall_s, 1),
            "report": str(out / "report.html"),
            "model_dir": str(out / "model"),
        }
        write_report(
            out,
            regime=self._regime,
            algorithm=self._options.algorithm,
            summary=summary,
            reports=reports,
            versions=versions,
        )
        if versions:
            from services.learner.export import export_model

            export_model(model_dir=self._model_dir, source=out / "learner", out_dir=out / "model")
        return summary

    def problems(self, summary: dict[str, Any]) -> list[str]:
        """Promises that the run broke."""
        gain = summary["final_accuracy"] - summary["warm_start_accuracy"]
        found = {
            self._failure: bool(self._failure),
            "the ledger does not balance": not summary["ledger_balanced"],
            f"{summary['digest_mismatches']} sampler states differ from the learner's": summary["digest_mismatches"]
            > 0,
            f"accuracy rose by {gain:.3f}, promised is {self._regime.required_gain:.2f}": gain
            < self._regime.required_gain,
            f"{len(self._reports)} of {self._regime.max_steps} steps": len(self._reports) < self._regime.max_steps,
        }
        found.update(
            {f"{child.name} ended with code {child.exit_code}": child.exit_code != 0 for child in self._children}
        )
        return [problem for problem, is_broken in found.items() if is_broken]


def digest_mismatches(versions: Sequence[dict[str, Any]], samplers: Sequence[Sequence[dict[str, Any]]]) -> int:
    """Number of states on samplers that are not the learner's state of that version."""
    roots = {entry["version"]: entry["state_root"] for entry in versions}
    return sum(roots.get(entry["version"]) != entry["state_root"] for records in samplers for entry in records)


def _records(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines() if text.endswith("}")]


def _mean(values: Sequence[float]) -> float:
    return round(statistics.fmean(values), 2) if values else 0.0
