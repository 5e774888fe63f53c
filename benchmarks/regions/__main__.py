"""Share of one site's throughput that is left when generation is spread over four far regions.

Coordinator, learner and four samplers are processes with mutual TLS. At one site there is no line. At four regions each
sampler is in a network namespace behind a line with delay, rate and loss (a TUN device, packets carried in Python).
Arms: how a version reaches a sampler, an outage, a slow region. Engines end completions by the clock and the learner's
step is drawn (`engine.py`, `learner.py`), so that neither needs this machine's cores; all else is heterorl.

    python -m benchmarks.regions --out benchmarks/results/regions.json --minutes 30 [--picture docs/regions.png]

All processes are in a PID namespace, which ends with this program in every case. The file is written after each run; a
file that lacks runs of the same settings is continued. It needs `unshare -rnpf` and /dev/net/tun.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.regions import arms
from benchmarks.regions.arms import ARMS, ONE, Arm, lengths_of, order_of
from benchmarks.regions.summary import goals_of, summaries
from tests.support.wan_link import MTU, QUEUE_S, unavailable

HIDDEN, LAYERS = 512, 8
"""Of the model: 33.6 million parameters."""
INSIDE = "--inside"
_PR_SET_PDEATHSIG = 1


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    """What the numbers depend on; equal settings may share a file."""
    chosen = chosen_arms(options)
    lengths = lengths_of(options.minutes, options.repeats, num_arms=len(chosen), outage_s=options.outage)
    congestion = Path("/proc/sys/net/ipv4/tcp_congestion_control")
    return {
        "arms": [arm.name for arm in chosen],
        "repeats": options.repeats,
        "span_s": lengths.span_s,
        "outage_s": lengths.outage_s,
        "max_staleness_versions": options.staleness,
        "hidden_size": options.hidden,
        "layers": options.layers,
        "regions": {
            name: {"rtt_ms": 1e3 * one.rtt_s, "mbit_per_s": one.bits_per_s / 1e6, "loss": one.loss}
            for name, one in arms.REGIONS.items()
        },
        "congestion_control": congestion.read_text(encoding="ascii").strip() if congestion.exists() else "",
    }


def how() -> dict[str, Any]:
    """How the numbers were made, for readers of the file."""
    return {
        "line": "one TUN device and one process in Python for each region (tests/support/wan_link.py): packets of"
        f" {MTU} bytes, a queue of {QUEUE_S:g} s; tc netem is not used",
        "engine": f"{arms.ROWS} rows, {arms.SECONDS_PER_TOKEN:g} s a token, lengths log-normal with median"
        f" {arms.MEDIAN_TOKENS} and bound {arms.MAX_TOKENS}, drawn tokens; weights are loaded and scored for real",
        "time_factor": f"1/{arms.LONG_TOKENS / arms.mean_tokens():.0f}: a completion has {arms.mean_tokens():.0f}"
        f" tokens instead of {arms.LONG_TOKENS}, so it and a version need so much less time; lines are not scaled",
        "version_s": round(arms.version_s(), 2),
        "learner": f"a step takes {arms.STEP_SHARE:g} of version_s and adds a drawn normal number to each fp32 master;"
        " rounding, encoding, upload and commit are heterorl's; no checkpoints in the span",
        "full": "before a version is adopted the sampler fetches the bytes of all bf16 weights over its line",
        "sparse": "the same with the bytes of positions and XOR of values of each version in between, zstd-1",
        "share": "tokens a second of all engines over the same number of the one-site run of the same repeat",
        "trained_share": "the same for the tokens that the learner trained on",
    }


def chosen_arms(options: argparse.Namespace) -> list[Arm]:
    """The arms to run; one site is always among them, where ratios are wanted."""
    return [arm for arm in ARMS if not options.arms or arm.name in options.arms]


def document_of(settings: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The file's content."""
    found = summaries(rows)
    return {
        "processor": platform.machine(),
        "cores": os.cpu_count(),
        "settings": settings,
        "how": how(),
        "is_complete": len(rows) == settings["repeats"] * len(settings["arms"]),
        "summaries": found,
        "goals": goals_of(found),
        "rows": rows,
    }


def rows_to_keep(path: Path, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows of an unfinished file with equal settings; else none."""
    try:
        before = json.loads(path.read_text(encoding="utf-8"))
        is_same = before["settings"] == settings and not before["is_complete"]
        return list(before["rows"]) if is_same else []
    except (OSError, ValueError, KeyError):
        return []


def measure(options: argparse.Namespace, work: Path, console: Console) -> dict[str, Any]:
    """Run what is missing, with files in `work`; writes the results after each run."""
    # Both load torch, which the outer process does not need.
    from benchmarks.regions.one_run import OneRun
    from heterorl.common.generation.tiny_model import write_tiny_model

    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    settings = settings_of(options)
    rows = rows_to_keep(options.out, settings)
    document = document_of(settings, rows)
    had = {(row["repeat"], row["arm"]) for row in rows}
    began, longest_s = time.monotonic(), 0.0
    model_dir = write_tiny_model(work / "model", seed=0, hidden_size=options.hidden, num_layers=options.layers)
    for repeat in range(options.repeats):
        for arm in order_of(repeat, chosen_arms(options)):
            if (repeat, arm.name) in had:
                continue
            run_began = time.monotonic()
            if run_began + longest_s > began + 60 * options.minutes:
                console.print("the minutes are over; the same command goes on with what is missing")
                return document
            directory = work / f"{repeat}-{arm.name}"
            run = OneRun(
                directory, arm, model_dir=model_dir, staleness=options.staleness, outage_s=settings["outage_s"]
            )
            try:
                row = {"repeat": repeat, **asyncio.run(run.run(settings["span_s"]))}
            finally:
                if options.logs is not None and (directory / "logs").exists():
                    shutil.copytree(directory / "logs", options.logs / directory.name, dirs_exist_ok=True)
            longest_s = max(longest_s, time.monotonic() - run_began)
            row["run_s"] = round(time.monotonic() - run_began, 1)
            rows.append(row)
            console.print(row)
            shutil.rmtree(directory)
            document = document_of(settings, rows)
            options.out.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    return document


def show(document: dict[str, Any], console: Console) -> None:
    """Print the table and the goals."""
    table = Table("arm", "share", "trained", "learner waits", "bytes", "stale p50", "p95", "swap s", "dropped")
    for one in document["summaries"]:
        share, trained = ((one[name] or {}).get("mean", 0.0) for name in ("share", "trained_share"))
        table.add_row(
            one["arm"], f"{share:.3f}", f"{trained:.3f}", f"{one['learner_waits']:.2f}",
            f"{one['bytes_per_version_and_site'] / 1e6:.2f} MB", f"{one['staleness_p50']:g}",
            f"{one['staleness_p95']:.1f}", f"{one['swap_s']:.3f}", str(one["dropped"] or 0),
        )  # fmt: skip
    console.print(table)
    for goal in document["goals"]:
        console.print(f"{goal['what']}: {goal['number']}, goal {goal['goal']}")


def die_with_parent() -> None:
    """Let the kernel kill this process when its parent has ended."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def run_inside(place: Path | None) -> int:
    """Run this program as the first process of new namespaces, which end with this process; files lie in `place`."""
    words = ["unshare", "-rnpf", "--kill-child", "--mount-proc", sys.executable, "-m", "benchmarks.regions"]
    with tempfile.TemporaryDirectory(prefix="regions-", dir=place) as work:
        # unshare itself ignores SIGTERM; its child dies with it.
        child = subprocess.Popen([*words, *sys.argv[1:], INSIDE, work], preexec_fn=die_with_parent)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda *_: child.kill())
        return child.wait()


def main() -> int:
    """Measure, print, write; the picture is drawn from the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=30.0, help="for all runs together")
    parser.add_argument("--repeats", type=int, help="3 from 20 minutes on, else 1")
    parser.add_argument("--arms", nargs="*", default=[], choices=[arm.name for arm in ARMS], metavar="ARM")
    parser.add_argument("--outage", type=float, help="seconds; left out: 0.4 of a span, 200 at most")
    parser.add_argument("--staleness", type=int, default=16, help="max_staleness_versions of all arms but the outage")
    parser.add_argument("--hidden", type=int, default=HIDDEN)
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--logs", type=Path, help="directory for the processes' logs")
    parser.add_argument("--work", type=Path, help="directory for the runs' files")
    parser.add_argument(INSIDE, type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.repeats = options.repeats or (3 if options.minutes >= 20 else 1)
    if options.inside is None:
        if reason := unavailable():
            print(f"skipped: {reason}")
            return 0
        return run_inside(options.work)
    console = Console(width=140)
    document = measure(options, options.inside, console)
    show(document, console)
    if options.picture is not None and any(row["arm"] == ONE for row in document["rows"]):
        from benchmarks.regions.picture import draw

        draw(document, options.picture)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
