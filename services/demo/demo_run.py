"""`heterorl demo`: warm start, four processes, progress, verdict.

The processes use loopback and certificates.

Invariants: a broken promise (ledger, digests, a failed process, accuracy) gives an exit code other than 0. Ctrl-C at
any time stops all processes in order. After the first step every ending writes report and model.
"""

from __future__ import annotations

import asyncio
import datetime
import json
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from heterorl.common.errors import HeterorlError, RemoteError
from heterorl.common.identity.tls import TlsConfig
from heterorl.common.process.files import journal_rows
from heterorl.common.rpc.calls import RetryPolicy
from heterorl.common.rpc.client import CoordinatorClient
from heterorl.common.types.common import StepReport, value_of_row
from heterorl.common.types.run import RunStatus, step_words
from heterorl.demo.demo_config import (
    FULL,
    SITES,
    TINY,
    DemoOptions,
    Regime,
    certificates_dir,
    claim,
    coordinator_tables,
    learner_tables,
    make_certificates,
    sampler_tables,
    tls_table,
)
from heterorl.demo.demo_results import Ending, broken_promises, measure, verdict, write_report
from heterorl.demo.processes import Child, start, stop_together, undisturbed
from heterorl.report.figures import newest_evaluated
from heterorl.sampler.trust_record import record_name

REFRESH_S = 0.5
LINE_S = 5.0
START_LIMIT_S = 60.0
INTERRUPTED = 130


def run_demo(options: DemoOptions) -> int:
    """Run the demo with checked options; returns the exit code.

    The code is 0 if all promises were kept, 1 if not, INTERRUPTED after Ctrl-C. Raises ConfigError for a foreign
    directory.
    """
    # A shell may have it ignored; asyncio cancels its task only in place of this handler.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Output of processes and paths is printed without markup.
    console = Console(markup=False, emoji=False, highlight=False, soft_wrap=True)
    regime = TINY if options.tiny else FULL
    with claim(options.out):
        try:
            model_dir = _warm(regime, options, console)
        except KeyboardInterrupt:
            console.print("stopped before a process was started; no results")
            return INTERRUPTED
        demo = _Demo(options=options, regime=regime, model_dir=model_dir, console=console)
        summary = demo.run()
        for text in verdict(summary, is_smoke=regime.required_gain <= 0):
            console.print(text)
        if demo.was_interrupted:
            return INTERRUPTED
        return 0 if summary["status"] == Ending.COMPLETE.value else 1


def _warm(regime: Regime, options: DemoOptions, console: Console) -> Path:
    console.print("warm start: a small Qwen3-architecture model learns a part of the task by imitation")
    import torch
    from transformers.utils import logging as transformers_logging

    from heterorl.common.generation.tiny_model import WarmStart, warm_start

    transformers_logging.disable_progress_bar()
    torch.set_num_threads(1)
    wanted = WarmStart(
        digits=regime.digits, seed=options.seed, target=regime.warm_start_target, batch_size=regime.warm_start_batch
    )
    model_dir, _ = warm_start(wanted, cache=options.cache)
    console.print(f"warm start: done, {model_dir}")
    return model_dir


class _Demo:
    """State of one demo."""

    def __init__(self, *, options: DemoOptions, regime: Regime, model_dir: Path, console: Console) -> None:
        self._options = options
        self._regime = regime
        self._model_dir = model_dir
        self._console = console
        self._children: list[Child] = []
        self._reports: list[StepReport] = []
        self._status: RunStatus | None = None
        self.was_interrupted = False

    def run(self) -> dict[str, Any]:
        """Start, watch and stop everything; write results and return the summary."""
        started, failure = time.monotonic(), ""
        try:
            asyncio.run(self._work())
        except (HeterorlError, OSError) as error:
            failure = str(error)
        except KeyboardInterrupt:
            self.was_interrupted = True
        finally:
            with undisturbed():
                self._stop()
        with undisturbed():
            return self._conclude(wall_s=time.monotonic() - started, failure=failure)

    async def _work(self) -> None:
        address = await self._start()
        # A short retry budget: the next refresh is half a second away.
        tls = TlsConfig.model_validate(tls_table(self._options, role="operator", site="demo"))
        async with CoordinatorClient(address, tls=tls, policy=RetryPolicy(budget_s=3.0)) as client:
            await self._watch(client)
            await self._look(client)

    async def _start(self) -> str:
        options, regime, out = self._options, self._regime, self._options.out
        self._console.print(f"starting: coordinator, learner, {', '.join(SITES)}")
        make_certificates(options, now=datetime.datetime.now(datetime.UTC))
        coordinator = start(
            "coordinator", name="coordinator", tables=coordinator_tables(regime, options), directory=out
        )
        self._children.append(coordinator)
        address = await self._address(coordinator)
        tables = learner_tables(regime, options, address=address, model_dir=self._model_dir)
        self._children.append(start("learner", name="learner", tables=tables, directory=out))
        for site in SITES:
            tables = sampler_tables(regime, options, site=site, address=address, model_dir=self._model_dir)
            self._children.append(start("sampler", name=site, tables=tables, directory=out))
        operator = certificates_dir(options) / "operator-demo"
        self._console.print(f"watch it from a second terminal: heterorl top {address} --credentials {operator}")
        return address

    async def _address(self, coordinator: Child) -> str:
        path = self._options.out / "coordinator" / "address"
        for _ in range(int(START_LIMIT_S / 0.1)):
            coordinator.check()
            if path.exists():
                return path.read_text(encoding="ascii").strip()
            await asyncio.sleep(0.1)
        raise HeterorlError(f"the coordinator did not start within {START_LIMIT_S:.0f} s; log: {coordinator.log}")

    async def _watch(self, client: CoordinatorClient) -> None:
        last_step_s, num_steps = time.monotonic(), 0
        shown, next_line, num_shown = "", 0.0, 0
        while True:
            await self._look(client)
            for child in self._children:
                child.check()
            if self._status is not None:
                text = line(self._status, self._reports, max_steps=self._regime.max_steps)
                # Print the first step at once, and an unchanged state only once.
                is_first = bool(self._reports) and not num_shown
                if text != shown and (is_first or time.monotonic() >= next_line):
                    self._console.print(text)
                    shown, next_line, num_shown = text, time.monotonic() + LINE_S, len(self._reports)
            if all(child.exit_code == 0 for child in self._children if child.name != "coordinator"):
                return
            if len(self._reports) > num_steps:
                last_step_s, num_steps = time.monotonic(), len(self._reports)
            if time.monotonic() > last_step_s + self._regime.time_limit_s:
                raise HeterorlError(f"no step came for {self._regime.time_limit_s:.0f} s")
            await asyncio.sleep(REFRESH_S)

    async def _look(self, client: CoordinatorClient) -> None:
        try:
            self._status = await client.get_status()
            while new := await client.list_steps(after_step=self._reports[-1].step if self._reports else 0, limit=500):
                self._reports += new
        except RemoteError as error:
            self._console.print(f"the coordinator does not answer: {error}")

    def _stop(self) -> None:
        """Stop clients before servers: samplers, then the learner, then the coordinator."""
        if self.was_interrupted:
            self._console.print("stopping: samplers, learner, coordinator")
        for names in (SITES, ("learner",), ("coordinator",)):
            stopped = stop_together([child for child in self._children if child.name in names])
            if stopped:
                self._console.print(f"stopped {', '.join(child.name for child in stopped)}")

    def _conclude(self, *, wall_s: float, failure: str) -> dict[str, Any]:
        """Measure, judge, write the summary; with steps, report and model too."""
        out, regime = self._options.out, self._regime
        # The learner's journal also has the steps taken while the processes were stopping.
        self._reports = _applied(journal_rows(out / "learner" / "steps.jsonl"))
        numbers = measure(
            reports=self._reports,
            status=self._status,
            versions=journal_rows(out / "learner" / "versions.jsonl"),
            evaluations=journal_rows(out / "learner" / "evaluations.jsonl"),
            samplers=[journal_rows(out / site / record_name("")) for site in SITES],
            regime=regime,
        )
        summary: dict[str, Any] = {
            "status": (Ending.FAILED if failure else Ending.INTERRUPTED).value,
            "failure": failure or None,
            "problems": [],
            "algorithm": self._options.algorithm,
            "seed": self._options.seed,
            "lag_versions": regime.lag_versions,
            **numbers,
            "wall_s": round(wall_s, 1),
            "logs": str(out / "logs"),
            "summary": str(out / "summary.json"),
            "report": None,
            "model_dir": None,
        }
        if not failure and not self.was_interrupted:
            codes = {child.name: child.exit_code for child in self._children}
            summary["problems"] = broken_promises(
                summary, regime=regime, algorithm=self._options.algorithm, exit_codes=codes
            )
            summary["status"] = (Ending.BROKEN if summary["problems"] else Ending.COMPLETE).value
        writers: dict[str, Callable[[], Path]] = {
            "report": lambda: write_report(out, summary), "model_dir": self._model,
        }  # fmt: skip
        for key, write in writers.items() if self._reports else ():
            try:
                summary[key] = str(write())
            except (HeterorlError, OSError) as error:
                failures = [summary["failure"], f"{key} could not be written: {error}"]
                summary |= {"status": Ending.FAILED.value, "failure": "; ".join(filter(None, failures))}
        Path(summary["summary"]).write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
        return summary

    def _model(self) -> Path:
        from heterorl.learner.export import export_model

        out = self._options.out
        export_model(model_dir=self._model_dir, source=out / "learner", out_dir=out / "model")
        return out / "model"


def _applied(rows: list[dict[str, Any]]) -> list[StepReport]:
    """Steps that changed weights, in order; the last row of each counts."""
    reports = {row["step"]: value_of_row(StepReport, row) for row in rows if row["is_applied"]}
    return [reports[step] for step in sorted(reports)]


def line(status: RunStatus, reports: Sequence[StepReport], *, max_steps: int) -> str:
    """The state of the run in one line, for logs."""
    if status.head_version < 0:
        return "processes are loading the model"
    if not reports:
        return f"version {status.head_version} is out, waiting for the first step"
    report, evaluated = reports[-1], newest_evaluated(reports)
    accuracy = evaluated and evaluated.evaluation_accuracy
    return (
        f"step {step_words(report.step, max_steps)}  version {status.head_version}  reward {report.reward_mean:.3f}  "
        f"accuracy {'-' if accuracy is None else f'{accuracy:.3f}'}  staleness {report.staleness_mean:.0f}  "
        f"KL {report.kl:.3f}  effective {report.ess_fraction:.1%}  queue {status.ledger.pending}"
    )
