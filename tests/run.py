"""Run a tier of the tests: `python -m tests.run fast|near|landing|research|postgres|bucket|all`, or `steady FILE`.

The Makefile has a target for each. `all` takes names of stages, so that everything can run in parts; tests/all.json
keeps the commit, time and failures of each stage. `postgres` and `bucket` take paths of the coordinator's tests.

A tier is a list of stages, cheap ones first. What fails in a stage runs once more at the stage's end, alone, in a fresh
process, and is named: beside busy neighbours, or in a process that another test left damaged, it would fail again. More
than five failures are no flakes. Behind the instant HETERORL_TEST_DEADLINE (seconds since 1970) stages of the second tier
are skipped by name.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.support import examples, near, results

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "tests" / "all.json"
CORES = len(os.sched_getaffinity(0))
MAX_FLAKES = 5
MEMORY_BYTES = 2 << 30
"""Free space that temporary files of tests need in memory; where less is free they lie on the disk."""
NEEDS_VLLM = ("services/sampler/vllm", "services/learner/backends", "requirements")
"""Where one of these changed since the last run of everything, a landing runs vLLM's conformance suite."""
NEEDS_RESEARCH = ("services/learner/loss", "research")
"""The same for the tests of experiments."""
NOT_HERE = "not image and not compiler and not nodes"
SERVICES = ("--ignore=tests/gpu", "--ignore=tests/trackers", "--ignore=tests/verifiers", "tests")
COORDINATOR = "tests/unit/coordinator"
COVERED = ("--cov", "--cov-report=")


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One call of pytest, or of another program, after which the environment is as it was."""

    name: str
    arguments: Sequence[str] = ()
    """pytest's; empty where `command` is the whole call."""
    command: Sequence[str] = ()
    marks: str = ""
    workers: int = CORES
    python: str = ".venv/bin/python"
    environment: Mapping[str, str] = field(default_factory=dict)
    needs: str = ""
    """A target of the Makefile that comes first."""
    is_second: bool = False
    """Skipped behind the deadline."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a stage."""

    stage: Stage
    seconds: float = 0.0
    counts: Mapping[str, int] = field(default_factory=dict)
    failed: Sequence[str] = ()
    """Tests that failed twice, or once among too many."""
    healed: Sequence[str] = ()
    """Tests that passed when they ran again, alone."""
    seconds_by_file: Mapping[str, float] = field(default_factory=dict)
    is_skipped: bool = False


QUICK = Stage(name="tests without processes", marks=f"not process and not slow and {NOT_HERE}", arguments=SERVICES)
PROCESSES = Stage(
    name="tests with processes", marks=f"process and not slow and {NOT_HERE}", arguments=SERVICES, workers=CORES + 1
)
RESEARCH = Stage(name="research", marks="not slow", arguments=("--ignore=research/tests/gpu", "research/tests"))
STATEMENTS = Stage(
    name="statements on PostgreSQL",
    arguments=[f"{COORDINATOR}/{name}" for name in ("test_core.py", "store", "test_evaluations.py")],
    environment={"HETERORL_TEST_STORE": "postgres"},
    is_second=True,
)
PAYLOADS = Stage(
    name="payloads in a bucket",
    arguments=[f"{COORDINATOR}/{name}" for name in ("payloads", "test_garbage_collector.py")],
    environment={"HETERORL_TEST_PAYLOADS": "bucket"},
    is_second=True,
)
CONFORMANCE = Stage(
    name="conformance of vLLM",
    python=".venv-engines/bin/python",
    needs=".venv-engines/.installed",
    workers=0,
    arguments=("tests/engines/test_engine_conformance.py",),
    environment={"HETERORL_TEST_REQUIRES": ""},
    is_second=True,
)


def landing(record: Mapping[str, Any]) -> list[Stage]:
    """What a change must pass."""

    def is_due(stage: str, paths: Sequence[str]) -> bool:
        return changed_since(record.get("stages", {}).get(stage, {}).get("commit", ""), paths)

    return [
        QUICK,
        PROCESSES,
        *([RESEARCH] if is_due(RESEARCH.name, NEEDS_RESEARCH) else []),
        STATEMENTS,
        PAYLOADS,
        *([CONFORMANCE] if is_due("engines", NEEDS_VLLM) else []),
    ]


def everything() -> list[Stage]:
    """All tests and, at small numbers, all campaigns."""
    engines = {"python": ".venv-engines/bin/python", "needs": ".venv-engines/.installed"}
    bare = {"HETERORL_TEST_REQUIRES": ""}
    return [
        replace(QUICK, arguments=[*COVERED, *SERVICES], environment={examples.MORE: "4"}),
        Stage(
            name=PROCESSES.name,
            marks=f"(process or slow) and {NOT_HERE}",
            arguments=(*COVERED, "--cov-append", *SERVICES),
            workers=CORES + 1,
        ),
        replace(RESEARCH, marks="", arguments=[*COVERED, "--cov-append", *RESEARCH.arguments]),
        Stage(name="coverage", command=(".venv/bin/coverage", "report", "--skip-covered", "--fail-under=90")),
        of_coordinator(STATEMENTS),
        of_coordinator(PAYLOADS),
        Stage(name="engines", arguments=("tests/engines",), environment=bare, is_second=True, **engines),
        *(
            Stage(
                name=name,
                python=f".venv-{name}/bin/python",
                needs=f".venv-{name}/.installed",
                arguments=(f"tests/{name}",),
                environment=bare,
                workers=0,
                is_second=True,
            )
            for name in ("trackers", "verifiers")
        ),
        Stage(name="compilers", marks="compiler", arguments=SERVICES, workers=0, is_second=True),
        Stage(name="other numbers of ranks", marks="nodes", arguments=SERVICES, workers=0, is_second=True),
        *(
            Stage(name=words[0], command=("make", *words), is_second=True)
            for words in (("fuzz", "N=200"), ("kills", "N=20"), ("kills-stores", "N=8"), ("rotations", "N=1"))
        ),
    ]


def of_coordinator(stage: Stage, paths: Sequence[str] = ()) -> Stage:
    """The stage with all tests of the coordinator, or some of them."""
    return replace(stage, arguments=paths or [COORDINATOR], workers=CORES + 1)


def changed_since(commit: str, paths: Sequence[str]) -> bool:
    """Whether files under the paths differ from a commit's; True where the commit is unknown."""
    command = ["git", "diff", "--quiet", commit or "no-commit", "--", *paths]
    return subprocess.run(command, cwd=ROOT, capture_output=True, check=False).returncode != 0


def run_stages(
    stages: Sequence[Stage], *, stops: bool, keep: Callable[[Outcome], None] = lambda _: None
) -> list[Outcome]:
    """Run the stages in their order; a stage that failed is the last one where `stops`. `keep` is given each outcome."""
    deadline = float(os.environ.get("HETERORL_TEST_DEADLINE", "inf"))
    outcomes: list[Outcome] = []
    for stage in stages:
        if stage.is_second and time.time() > deadline:
            print(f"== {stage.name}: skipped, the deadline is past", flush=True)
            outcomes.append(Outcome(stage=stage, is_skipped=True))
            continue
        print(f"== {stage.name}", flush=True)
        outcomes.append(run_stage(stage, stops=stops))
        keep(outcomes[-1])
        if stops and outcomes[-1].failed:
            break
    return outcomes


def run_stage(stage: Stage, *, stops: bool) -> Outcome:
    """Run one stage, and what failed in it once more."""
    began = time.monotonic()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **stage.environment}
    # Images set it; each process that a test starts would compile all sources.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    if stage.needs and subprocess.run(["make", stage.needs], cwd=ROOT, check=False).returncode != 0:
        return Outcome(stage=stage, seconds=time.monotonic() - began, failed=[f"make {stage.needs}"])
    if stage.command:
        code = subprocess.run(stage.command, cwd=ROOT, env=environment, check=False).returncode
        return Outcome(stage=stage, seconds=time.monotonic() - began, failed=[" ".join(stage.command)] if code else [])
    # xdist calls a path that is not there a run without tests, which marks may ask for.
    paths = [argument for argument in stage.arguments if not argument.startswith("-")]
    if absent := [path for path in paths if not (ROOT / path).exists()]:
        return Outcome(stage=stage, failed=[f"no such path: {path}" for path in absent])
    options = ["-n", str(stage.workers), "--dist", "loadfile", "--no-loadscope-reorder"] if stage.workers else []
    options += ["--maxfail", str(MAX_FLAKES + 1)] if stops else []
    said = _pytest(stage, [*options, *(["-m", stage.marks] if stage.marks else []), *stage.arguments], environment)
    failed, healed = list(said.get("failed", ["pytest itself"])), []
    if 0 < len(failed) <= MAX_FLAKES and "failed" in said:
        # Under coverage too: its handler of SIGTERM may be the cause.
        covered = [*COVERED, "--cov-append"] if COVERED[0] in stage.arguments else []
        for test in failed:
            print(f"== once more, alone: {test}", flush=True)
            again = _pytest(stage, [*covered, test], environment)
            # What was skipped, or not found, did not pass.
            if not again.get("failed") and again.get("outcomes", {}).get("passed"):
                healed.append(test)
    return Outcome(
        stage=stage,
        seconds=time.monotonic() - began,
        counts=said.get("outcomes", {}),
        failed=[test for test in failed if test not in healed],
        healed=healed,
        seconds_by_file=said.get("seconds", {}),
    )


def _pytest(stage: Stage, arguments: Sequence[str], environment: Mapping[str, str]) -> dict:
    """Call pytest; what it writes of its results, nothing where it came to no end."""
    memory = Path("/dev/shm")
    in_memory = memory.is_dir() and shutil.disk_usage(memory).free > MEMORY_BYTES
    with tempfile.TemporaryDirectory(prefix="heterorl-tests-", dir=memory if in_memory else None) as directory:
        path = Path(directory) / "results.json"
        command = [ROOT / stage.python, "-m", "pytest", "-q", f"--basetemp={directory}/tmp", *arguments]
        code = subprocess.run(
            command, cwd=ROOT, env={**environment, results.VARIABLE: str(path)}, check=False
        ).returncode
        said = json.loads(path.read_text()) if path.exists() else {}
    # 0: passed, 1: tests failed, 2: stopped, as by --maxfail, 5: nothing has these marks.
    if code not in (0, 1, 2, 5) or (code in (1, 2) and not said.get("failed")):
        said = {**said, "failed": [*said.get("failed", []), f"pytest, which exited with {code}"]}
    return said


def summary(outcomes: Sequence[Outcome]) -> str:
    """The table of a run, and its last line as programs read it."""
    counts: Counter[str] = Counter()
    lines = []
    for outcome in outcomes:
        counts.update(outcome.counts)
        state = "skipped" if outcome.is_skipped else "FAILED" if outcome.failed else "ok"
        lines.append(f"{outcome.stage.name:32} {state:8} {outcome.seconds:7.0f} s  {dict(outcome.counts) or ''}")
        lines += [f"  RERUN passed alone: {test}" for test in outcome.healed]
        lines += [f"  FAILED: {test}" for test in outcome.failed]
    failed = sum(len(outcome.failed) for outcome in outcomes)
    lines.append(f"{counts['passed']} passed, {failed} failed, {counts['skipped']} skipped")
    return "\n".join(lines)


def record(known: Mapping[str, Any], outcome: Outcome) -> dict[str, Any]:
    """What tests/all.json keeps, with the newest run of a stage."""
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
    row = {
        "commit": head.stdout.strip(),
        "seconds": round(outcome.seconds),
        "failed": outcome.failed,
        "passed_again": outcome.healed,
    }
    times = {name: value for name, value in known.get("seconds_by_file", {}).items() if (ROOT / name).exists()}
    times |= {name: round(value, 1) for name, value in outcome.seconds_by_file.items() if value >= 0.1}
    return {
        "stages": {**known.get("stages", {}), outcome.stage.name: row},
        "seconds_by_file": dict(sorted(times.items())),
    }


def steady(path: str, *, times: int, loops: int = 2) -> int:
    """Run a file so often beside busy loops; the number of runs that failed."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(loops)]
    failed = 0
    try:
        for number in range(1, times + 1):
            said = _pytest(QUICK, [path], dict(os.environ))
            failed += bool(said.get("failed", ["pytest itself"]))
            print(f"run {number} of {times}: {failed} failed so far", flush=True)
    finally:
        for process in busy:
            process.kill()
            process.wait()
    return failed


def main() -> int:
    """Run what the arguments name; 0 where all of it passed."""
    parser = argparse.ArgumentParser(prog="python -m tests.run", description=__doc__)
    parser.add_argument("tier", choices=["fast", "near", "landing", "research", "postgres", "bucket", "all", "steady"])
    parser.add_argument(
        "names", nargs="*", help="steady: the file; all: stages; postgres, bucket: paths; none for all of them"
    )
    parser.add_argument(
        "--base",
        default="",
        help="near: what the change is compared with; default: what is not committed, else the last commit",
    )
    parser.add_argument("--times", type=int, default=30, help="steady: runs of the file")
    chosen = parser.parse_args()
    if chosen.tier == "steady":
        return 1 if steady(chosen.names[0], times=chosen.times) else 0
    known = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    tiers: dict[str, Callable[[], Sequence[Stage]]] = {
        "fast": lambda: [QUICK],
        "near": lambda: near_stages(near.changed(chosen.base)),
        "landing": lambda: landing(known),
        "research": lambda: [replace(RESEARCH, marks="")],
        "postgres": lambda: [of_coordinator(STATEMENTS, chosen.names)],
        "bucket": lambda: [of_coordinator(PAYLOADS, chosen.names)],
        "all": lambda: chosen_stages(chosen.names),
    }

    def keep(outcome: Outcome) -> None:
        rows = json.loads(RECORD.read_text()) if RECORD.exists() else {}
        RECORD.write_text(json.dumps(record(rows, outcome), indent=1) + "\n")

    is_all = chosen.tier == "all"
    outcomes = run_stages(tiers[chosen.tier](), stops=not is_all, **({"keep": keep} if is_all else {}))
    print(summary(outcomes))
    return 1 if any(outcome.failed for outcome in outcomes) else 0


def chosen_stages(names: Sequence[str]) -> list[Stage]:
    """Stages of everything by their names; all of them where there is no name.

    Raises:
        SystemExit: a name is unknown.
    """
    stages = everything()
    if unknown := set(names) - {stage.name for stage in stages}:
        sys.exit(f"no stage {', '.join(sorted(unknown))}; there are: {', '.join(stage.name for stage in stages)}")
    return [stage for stage in stages if not names or stage.name in names]


def near_stages(changed: Sequence[str]) -> list[Stage]:
    """The tests without processes that reach what changed, in one stage."""
    files = near.files_near(changed)
    print(f"{len(changed)} changed files, {len(files)} test files: {' '.join(files)}", flush=True)
    return [Stage(name="tests near the change", marks=QUICK.marks, arguments=files)] if files else []


if __name__ == "__main__":
    sys.exit(main())
