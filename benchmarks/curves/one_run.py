"""One run of `benchmarks.environment_curves`: warm start, the processes of a demo, a curve, held-out rewards.

`python -m benchmarks.curves.one_run DIRECTORY` reads `spec.json` there and keeps `result.json` up to date. Every ending
leaves the curve so far; processes that may still live are in `pids`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.curves.records import curve_of, held_out_of, versions_to_evaluate
from benchmarks.curves.textarena_games import ALL_GAMES
from heterorl.common.errors import HeterorlError
from heterorl.common.process.files import journal_rows
from heterorl.common.process.threads import own_command
from heterorl.common.tasks.environments.episodes import EPISODES_A_PROCESS
from heterorl.common.types.run import STEPS_FILE, VERSIONS_FILE
from heterorl.demo.demo_config import (
    FULL,
    SITES,
    DemoOptions,
    coordinator_tables,
    learner_tables,
    make_certificates,
    sampler_tables,
)
from heterorl.demo.processes import Child, start, stop_together, tail

NUM_HELD_OUT = 256
"""Held-out prompts of an evaluation, one episode each."""
MAX_TRAJECTORY_TOKENS = 160
STALENESS_ROOM = 16
"""Versions that a group may be older than the lag."""
LEASE_S = 60.0
"""Learner's lease, seconds: long enough for cores that other processes use."""
STOP_S = 8.0
"""Time that the coordinator gets to stop."""
SAVE_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """What a run does, and until when; times are seconds since the epoch."""

    environment: str
    seed: int
    lag: int
    trainer: str
    loss: str
    lr: float
    steps: int
    groups_per_step: int
    group_size: int
    warm_steps: int
    warm_s: float
    train_until: float
    end: float


@dataclass
class Run:
    """Processes and results of one run."""

    spec: Spec
    directory: Path
    children: list[Child] = field(default_factory=list)
    result: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.begun = time.time()
        own = ("environment", "seed", "lag", "trainer", "loss", "lr", "groups_per_step", "group_size")
        self.result = {
            **{key: getattr(self.spec, key) for key in own},
            "status": "warm start",
            "failure": None,
            "warm_start": {},
            "curve": [],
            "held_out": [],
            "ledger": {},
        }
        self.options = DemoOptions(out=self.directory, algorithm=self.spec.loss, seed=self.spec.seed)
        self.model_dir = self.directory / "warm"

    def save(self) -> None:
        """Replace the file of results."""
        self.result["curve"] = self.curve()
        self.result["seconds"] = round(time.time() - self.begun, 1)
        path = self.directory / "result.json"
        path.with_suffix(".new").write_text(json.dumps(self.result), encoding="utf-8")
        path.with_suffix(".new").replace(path)

    def curve(self) -> list[dict[str, Any]]:
        """Rows of the training so far."""
        return curve_of(journal_rows(self.directory / "learner" / STEPS_FILE))

    def train(self) -> None:
        """Train and evaluate by the services."""
        address = self._start()
        self._watch()
        self._stop(*SITES)
        self._stop("learner")
        self._evaluate(address)

    def play(self) -> None:
        """The whole run; a failure is kept as a text."""
        try:
            self._warm()
            self.train()
            self.say("ended")
        except Exception as error:  # noqa: BLE001 - the curve is kept
            self._fail(error)
        finally:
            self._stop(*SITES)
            self._stop("learner")
            self._stop("coordinator")
            self._account()
            self.save()

    def say(self, status: str) -> None:
        """Save the state of the run."""
        self.result["status"] = status
        self.save()

    def _fail(self, error: Exception) -> None:
        words = f"{self.result['status']}: {type(error).__name__}: {error}"[:2000]
        self.result["failure"] = self.result["failure"] or words

    def _warm(self) -> None:
        self.save()
        # Only this step needs torch here.
        import torch

        from benchmarks.curves.warm_start import warm_start

        torch.set_num_threads(1)
        left_s = self.spec.train_until - time.time()
        self.result["warm_start"] = warm_start(
            ALL_GAMES[self.spec.environment], self.model_dir, seed=self.spec.seed, max_steps=self.spec.warm_steps,
            max_s=min(self.spec.warm_s, left_s / 3),
        )  # fmt: skip

    def _start(self) -> str:
        spec, options = self.spec, self.options
        self.say("start of the processes")
        make_certificates(options, now=datetime.datetime.now(datetime.UTC))
        regime = dataclasses.replace(
            FULL, max_steps=spec.steps, lag_versions=spec.lag, max_staleness_versions=spec.lag + STALENESS_ROOM,
            groups_per_step=spec.groups_per_step, group_size=spec.group_size, learning_rate=spec.lr,
        )  # fmt: skip
        # Evaluations at the end pull versions of the whole run.
        kept = spec.steps + spec.lag + STALENESS_ROOM
        coordinator = {**coordinator_tables(regime, options), "learner_lease_s": LEASE_S, "keep_versions": kept}
        self._open("coordinator", "coordinator", coordinator)
        address, common = self._address(), self._common()
        learner = learner_tables(regime, options, address=address, model_dir=self.model_dir)
        self._open("learner", "learner", {**learner, **common, "evaluation": {"every_versions": 0}})
        for site in SITES:
            sampler = sampler_tables(regime, options, site=site, address=address, model_dir=self.model_dir)
            self._open("sampler", site, {**sampler, **common, **({} if spec.lag else {"delay": {"kind": "none"}})})
        return address

    def _common(self) -> dict[str, Any]:
        """Keys that all nodes share."""
        game = ALL_GAMES[self.spec.environment]
        live = self.spec.groups_per_step // len(SITES) * self.spec.group_size
        task = {
            "name": "seeds",
            "size": 100_000,
            "evaluation_size": NUM_HELD_OUT,
            "seed": self.spec.seed,
            "environment": getattr(game, "environment", f"games:{game.__name__}"),
            "environment_path": str(Path(__file__).resolve().parent),
            "max_turns": game.max_turns,
            "environment_workers": max(1, -(-live // EPISODES_A_PROCESS)),
            "step_timeout_s": 30.0,
            "tool_parser": "json",
        }
        sampling = {
            "temperature": 1.0,
            "max_new_tokens": game.max_new_tokens,
            "max_trajectory_tokens": MAX_TRAJECTORY_TOKENS,
        }
        return {"task": task, "sampling": sampling, "use_chat_template": True}

    def _open(self, service: str, name: str, tables: dict[str, Any]) -> None:
        self.children.append(start(service, name=name, tables=tables, directory=self.directory))
        pids = "\n".join(str(child.process.pid) for child in self.children)
        (self.directory / "pids").write_text(pids, encoding="ascii")

    def _address(self) -> str:
        path = self.directory / "coordinator" / "address"
        while time.time() < self.spec.train_until:
            self.children[0].check()
            if path.exists() and (address := path.read_text(encoding="ascii").strip()):
                return address
            time.sleep(0.1)
        raise HeterorlError("the coordinator did not start before the end of the training time")

    def _watch(self) -> None:
        """Until all steps are taken, a process failed, or the time is over."""
        self.say("training")
        saved, learner = time.time(), self._child("learner")
        while time.time() < self.spec.train_until and learner.exit_code != 0:
            try:
                for child in self.children:
                    child.check()
            except HeterorlError as error:
                # The versions so far can still be evaluated.
                self._fail(error)
                return
            if time.time() > saved + SAVE_S:
                self.save()
                saved = time.time()
            time.sleep(0.5)

    def _child(self, name: str) -> Child:
        return next(child for child in self.children if child.name == name)

    def _stop(self, *names: str) -> None:
        stop_together([child for child in self.children if child.name in names and not child.file.closed])

    def _evaluate(self, address: str) -> None:
        """Held-out rewards of some versions, pulled from the coordinator."""
        self.say("evaluation")
        published = [row["version"] for row in journal_rows(self.directory / "learner" / VERSIONS_FILE)]
        if not published:
            return
        words = [f"--version={version}" for version in versions_to_evaluate(max(published))]
        config = self.directory / "config" / f"{SITES[0]}.toml"
        command = own_command("heterorl", "evaluate", address, *words, f"--prompts={NUM_HELD_OUT}")
        command += ["--config", str(config), "--json"]
        path = self.directory / "logs" / "evaluate.log"
        with path.open("wb") as log:
            left_s = max(1.0, self.spec.end - STOP_S - time.time())
            try:
                done = subprocess.run(command, stdout=subprocess.PIPE, stderr=log, timeout=left_s, check=False)
            except subprocess.TimeoutExpired:
                raise HeterorlError("heterorl evaluate had no time left") from None
        if done.returncode:
            raise HeterorlError(f"heterorl evaluate ended with code {done.returncode}:\n{tail(path)}")
        self.result["held_out"] = held_out_of(json.loads(done.stdout[done.stdout.index(b"{") :]))

    def _account(self) -> None:
        """The coordinator's account of groups, by where they ended."""
        path = self.directory / "coordinator" / "coordinator.sqlite"
        if not path.exists():
            return
        with contextlib.suppress(sqlite3.Error), contextlib.closing(sqlite3.connect(path)) as store:
            self.result["ledger"] = dict(store.execute("SELECT account, count FROM ledger").fetchall())


def main() -> None:
    """Run what the directory's `spec.json` says."""
    directory = Path(sys.argv[1])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    spec = Spec(**json.loads((directory / "spec.json").read_text(encoding="utf-8")))
    kind: type[Run] = Run
    if spec.trainer == "trl":
        from benchmarks.curves.trl_run import TrlRun

        kind = TrlRun
    kind(spec=spec, directory=directory).play()


if __name__ == "__main__":
    main()
