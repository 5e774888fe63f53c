"""Whether trajectories of several turns learn through the real services, with work many versions old.

Each run has a coordinator, a learner and two samplers as processes, with certificates. A tiny model first imitates
demonstrations, so its reward begins at .2 to .5. Then it trains on trajectories that are `--lags` versions old.

    calculator   one call of a tool, whose answer is given tokens, then the product; reward 1 for the product
    guess        a number from 1 to 15, four turns of "higher" and "lower"; reward 1 for the number
    mastermind   two of four colours, four turns; reward 1 for the code
    textarena-guess      GuessTheNumber-v0 of textarena, four turns; reward 1, or the nearness of the last guess
    textarena-secretary  Secretary-v0 of textarena; reward 1 for accepting the largest of five values

The last two need the extra games. With `--trainer trl` TRL's GRPOTrainer plays them online, in one process and with
its own defaults, from the same first weights and seeds.

    python -m benchmarks.environment_curves --minutes 7.5 --seeds 0 1 2 --json benchmarks/results/environments.json

All runs go on side by side (`--jobs`); one takes two to three cores and 2.5 GB. At the end of the time training stops,
`heterorl evaluate` measures some versions on held-out episodes, and the JSON, renewed each 30 s, has all curves so far.
Runs of other environments, lags and seeds stay in the JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.curves.records import GOAL, Arm, Limits, arm_of, limits, summary_of, verdicts
from benchmarks.curves.textarena_games import ALL_GAMES

SAVE_S = 30.0
GRACE_S = 12.0
"""Time that a run gets to stop its processes after its end."""
SETTINGS = ("loss", "lr", "steps", "groups_per_step", "group_size", "warm_steps", "warm_s")


class Runs:
    """Processes of all runs, one for each arm."""

    def __init__(self, arms: Sequence[Arm], *, out: Path, jobs: int, limits: Limits, settings: dict[str, Any]) -> None:
        self._out, self._jobs, self._limits, self._settings = out, jobs, limits, settings
        self._waiting, self._arms = list(arms), list(arms)
        self._running: dict[Arm, tuple[subprocess.Popen[bytes], float]] = {}

    @property
    def is_over(self) -> bool:
        """Whether all runs have ended."""
        return not (self._waiting or self._running)

    def advance(self) -> None:
        """Start runs that have a place, and end those whose time is over."""
        while self._waiting and len(self._running) < self._jobs:
            self._start(self._waiting.pop(0))
        late = []
        for arm, (process, end) in list(self._running.items()):
            if process.poll() is not None:
                del self._running[arm]
            elif time.time() > end:
                late.append(arm)
        self._end(late)

    def end(self) -> None:
        """End all runs."""
        self._waiting.clear()
        self._end(list(self._running))

    def _start(self, arm: Arm) -> None:
        directory, now = self._out / arm.name, time.time()
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        until = {"train_until": now + self._limits.train_s, "end": now + self._limits.end_s}
        spec = {**dataclasses.asdict(arm), **self._settings, **until}
        (directory / "spec.json").write_text(json.dumps(spec), encoding="utf-8")
        with (directory / "run.log").open("wb") as log:
            command = [sys.executable, "-m", "benchmarks.curves.one_run", str(directory)]
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        self._running[arm] = process, until["end"]

    def _end(self, arms: Sequence[Arm]) -> None:
        processes = [self._running.pop(arm)[0] for arm in arms]
        for process in processes:
            process.terminate()
        deadline = time.time() + GRACE_S
        for arm, process in zip(arms, processes, strict=True):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, deadline - time.time()))
                continue
            process.kill()
            process.wait()
            for pid in _pids(self._out / arm.name / "pids"):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def results(self) -> list[dict[str, Any]]:
        """Results so far, of runs that have any."""
        found = []
        for arm in self._arms:
            with contextlib.suppress(OSError, ValueError):
                found.append(json.loads((self._out / arm.name / "result.json").read_bytes()))
        return found


def _pids(path: Path) -> list[int]:
    return [int(word) for word in path.read_text(encoding="ascii").split()] if path.exists() else []


def write(path: Path, runs: Sequence[dict[str, Any]], *, settings: dict[str, Any], seconds: float) -> None:
    """Replace the JSON by what is known now."""
    summaries = [summary_of(run) for run in runs]
    found = {
        "machine": {
            "cores": os.cpu_count(),
            "platform": platform.platform(),
            "python": platform.python_version(),
            **{name: version(name) for name in ("torch", "transformers", "trl")},
        },
        "settings": settings,
        "seconds": round(seconds, 1),
        "goal": GOAL,
        "environments": verdicts(summaries),
        "summaries": summaries,
        "runs": list(runs),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}.new")
    # Without indents: a step of a curve would take twenty lines.
    new.write_text(json.dumps(found) + "\n", encoding="utf-8")
    new.replace(path)


def other_runs(path: Path, arms: Sequence[Arm]) -> list[dict[str, Any]]:
    """Runs of the JSON that are not of these arms."""
    known = json.loads(path.read_bytes())["runs"] if path.exists() else []
    return [run for run in known if arm_of(run) not in arms]


def line(run: dict[str, Any]) -> str:
    """One run in one line."""
    one = summary_of(run)
    words = [f"{one['trainer']:8} {one['environment']:10} lag {one['lag']:3} seed {one['seed']}"]
    words.append(f"{run['status']:22} step {one['steps']:4}")
    words.append(f"reward {one['training_first']} to {one['training_last']}, turns {one['turns_last']}")
    words.append(f"held out {one['held_out_first']} to {one['held_out_last']}, gain {one['gain']}")
    return "  ".join([*words, *([f"FAILURE {run['failure'][:200]}"] if run["failure"] else [])])


def main() -> None:
    """Run all arms until the time is over; the exit code is 0 whether or not they learned."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=7.5)
    parser.add_argument("--environments", nargs="+", choices=list(ALL_GAMES), default=list(ALL_GAMES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--lags", nargs="+", type=int, default=[64])
    parser.add_argument("--trainer", choices=("heterorl", "trl"), default="heterorl", help="trl: online, lag 0")
    parser.add_argument("--jobs", type=int, default=1000, help="runs at once; default: all")
    parser.add_argument("--loss", default="gepo_1s")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--groups-per-step", type=int, default=24)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--warm-steps", type=int, default=2000)
    parser.add_argument("--warm-s", type=float, default=75.0, help="longest warm start, seconds")
    parser.add_argument("--out", type=Path, default=Path("runs/environments"))
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/environments.json"))
    options = parser.parse_args()
    settings = {name: getattr(options, name) for name in SETTINGS}
    arms = [
        Arm(environment=environment, seed=seed, lag=lag, trainer=options.trainer)
        for lag in (options.lags if options.trainer == "heterorl" else [0])
        for environment in options.environments
        for seed in options.seeds
    ]
    jobs = max(1, min(options.jobs, len(arms)))
    _prepare()
    runs = Runs(
        arms, out=options.out.resolve(), jobs=jobs, settings=settings,
        limits=limits(options.minutes, num_runs=len(arms), jobs=jobs),
    )  # fmt: skip
    asked: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: asked.append(number))
    begun, saved, earlier = time.time(), 0.0, other_runs(options.json, arms)
    try:
        while not (runs.is_over or asked):
            runs.advance()
            if time.time() > saved + SAVE_S:
                saved = time.time()
                write(options.json, [*earlier, *runs.results()], settings=settings, seconds=saved - begun)
                print(f"{saved - begun:.0f} s", *map(line, runs.results()), sep="\n", flush=True)
            time.sleep(0.5)
    finally:
        runs.end()
        write(options.json, [*earlier, *runs.results()], settings=settings, seconds=time.time() - begun)
    print(f"{time.time() - begun:.0f} s", *map(line, runs.results()), sep="\n")
    print(json.dumps(verdicts([summary_of(run) for run in runs.results()]), indent=1), flush=True)


def _prepare() -> None:
    """One thread a process, no hub, and a PYTHONPATH that holds in every directory."""
    os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    words = [word for word in os.environ.get("PYTHONPATH", "").split(os.pathsep) if word]
    root = Path(__file__).resolve().parents[1]
    own = [str(root / "src"), str(root)]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([*own, *(str(Path(word).resolve()) for word in words)]))


if __name__ == "__main__":
    main()
