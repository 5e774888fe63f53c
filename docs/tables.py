"""Committed results -> the tables that documents show. Pure but for reading the files that `SOURCES` lie in.

A document has a table between `<!-- table: NAME -->` and `<!-- end of table -->`; `python -m docs.generate` writes what
stands between them, and a test compares.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from docs import plans
from heterorl.common.evaluation.intervals import interval
from heterorl.lab.report.data import Results, Run
from heterorl.lab.report.reading import load_table

ROOT = Path(__file__).parents[1]
SOURCES = ROOT / "benchmarks" / "results"
DOCUMENTS = ("README.md", "docs/results.md", "docs/delays.md", "docs/plan.md", "docs/machines.md")
_BLOCK = re.compile(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end of table -->)", re.DOTALL)
_LEADING = ("gepo", "gspo", "topr", "gmpo", "dapo", "grpo", "dr_grpo", "cispo")
_STALE = ("gepo", "gepo-topr", "topr", "seq_tis_ess", "tis", "m2po", "decoupled_ppo")
_SHORT = ("gepo", "gepo-1s", "topr", "gspo", "grpo")
_HORIZON = (0.0, 64.0)
_CLIPS = {"-none": "none", "-lower": "lower half", "-upper": "upper half", "": "both"}
_FAULTS = {
    "machine": "agent and process killed",
    "rank": "process killed",
    "agent": "agent killed",
    "stopped": "process stopped",
    "cut off": "cable pulled",
    "parted": "parted",
}
_COLUMNS = {0.0: "no delay", 8.0: "8 versions", 64.0: "64 versions", 128.0: "128 versions", 256.0: "256 versions"}


def filled(text: str) -> str:
    """A document with each of its tables made anew.

    Raises:
        KeyError: a marker names no table.
        ValueError: a marker has no end, or an end no marker.
    """
    blocks = _BLOCK.findall(text)
    if not len(blocks) == text.count("<!-- table:") == text.count("<!-- end of table -->"):
        raise ValueError("a table of the document has no end, or an end has no table")
    return _BLOCK.sub(lambda match: f"{match[1]}\n{TABLES[match[2]]()}\n\n{match[3]}", text)


def cell(runs: Sequence[Run]) -> str:
    """Last accuracy over seeds: mean, half of the 95 % t-interval, worst seed; and how many runs failed."""
    failed = sum(bool(run.failed) for run in runs)
    found = interval([run.last for run in runs if not run.failed and run.last is not None])
    if found is None:
        text = "-"
    else:
        half = "" if found.half is None else f" +- {found.half:.3f}"
        text = f"{found.mean:.3f}{half}, worst {found.lowest:.3f}"
    return f"{text}, {failed} failed" if failed else text


def accuracies(results: Results, delays: Sequence[float], algorithms: Sequence[str] = ()) -> str:
    """A row for each algorithm, a column for each delay; without `algorithms` all: gepo first, then by name."""
    names = algorithms or sorted({run.algorithm for run in results.runs}, key=lambda name: (name != "gepo", name))
    return _table(
        ["algorithm", *(_COLUMNS[delay] for delay in delays)],
        [
            [name, *(cell([r for r in results.runs if (r.algorithm, r.delay) == (name, delay)]) for delay in delays)]
            for name in names
        ],
    )


def paired(algorithm: str, baseline: str, runs: Iterable[Run], delay: float) -> str:
    """Last accuracy minus the baseline's on equal seeds: mean, half interval, worst seed, seeds above the baseline."""
    last = {
        (run.algorithm, run.seed): run.last
        for run in runs
        if run.delay == delay and not run.failed and run.last is not None
    }
    seeds = sorted(seed for name, seed in last if name == algorithm and (baseline, seed) in last)
    differences = [last[algorithm, seed] - last[baseline, seed] for seed in seeds]
    found = interval(differences)
    if found is None or found.half is None:
        return "-"
    above = sum(difference > 0 for difference in differences)
    return f"{found.mean:+.3f} +- {found.half:.3f}, worst {found.lowest:+.3f}, {above} of {found.num}"


def _lab(name: str) -> Results:
    return load_table(SOURCES / "lab" / f"{name}.json")


def _beside_gepo() -> str:
    short, long = _lab("recommend").runs, [*_lab("stale256").runs, *_lab("gspo64").runs]
    return _table(
        ["algorithm", "220 steps, 10 seeds", "400 steps, 5 seeds"],
        [
            [name, *(paired(name, "gepo", runs, 64.0) for runs in (short, long))]
            for name in ("gspo", "topr", "gepo-topr")
        ],
    )


def _horizon_beside_gepo() -> str:
    runs = _lab("horizon").runs
    names = sorted({run.algorithm for run in runs} - {"gepo"})
    return _table(
        ["algorithm", *(_COLUMNS[delay] for delay in _HORIZON)],
        [[name, *(paired(name, "gepo", runs, delay) for delay in _HORIZON)] for name in names],
    )


def _horizon_rates() -> str:
    rates = {(run.algorithm, run.delay): run.lr for run in _lab("horizon").runs}
    names = sorted({name for name, _ in rates}, key=lambda name: (name != "gepo", name))
    return _table(
        ["algorithm", *(_COLUMNS[delay] for delay in _HORIZON)],
        [[name, *(f"{rates[name, delay]:g}" for delay in _HORIZON)] for name in names],
    )


def _clips() -> str:
    runs = _lab("clips").runs
    return _table(
        ["weights", *(f"clip: {text}" for text in _CLIPS.values())],
        [
            [name, *(cell([run for run in runs if run.algorithm == name + half]) for half in _CLIPS)]
            for name in ("gepo", "gepo-one", "gspo", "gspo-one")
        ],
    )


def _benchmark(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((SOURCES / f"{name}.json").read_bytes())
    return found


def _overlap() -> str:
    return _table(
        ["a publication, as a share of a step", "waits for each commit: idle", "publishes beside the step: idle"],
        [
            [f"{r['publication_share']:.1f}", _percent(r["sequential_idle_share"]), _percent(r["idle_share"])]
            for r in _benchmark("overlap")["rows"]
        ],
    )


def _publish() -> str:
    return _table(
        ["backend", "ranks", "parameters", "step", "to the ack", "checkpoint", "digests equal", "loss beside torch"],
        [
            [
                r["backend"],
                str(r["ranks"]),
                f"{r['parameters'] / 1e6:.0f} M",
                f"{r['step_s']:.1f} s",
                f"{r['publish_s']:.2f} s",
                f"{r['checkpoint_s']:.2f} s",
                "yes" if r["digests_equal"] else "NO",
                _loss_difference(r),
            ]
            for r in _benchmark("publish")["rows"]
        ],
    )


def _loss_difference(row: dict[str, Any]) -> str:
    alike = [r for r in _benchmark("publish")["rows"] if r["parameters"] == row["parameters"]]
    torch = next((r["losses"] for r in alike if r["backend"] == "torch"), None)
    if torch is None or len(torch) != len(row["losses"]):
        return "-"
    difference = max(abs(one - other) for one, other in zip(row["losses"], torch, strict=True))
    return f"{difference:.0e}" if difference else "0"


def _publish_memory() -> str:
    phases = ("load", "step", "publish", "checkpoint")
    return _table(
        ["backend", "ranks", *phases],
        [
            [
                r["backend"],
                str(r["ranks"]),
                *(
                    ", ".join(
                        f"{peak - base:,.0f}"
                        for peak, base in zip(r["phases_rss_mb"][phase], r["base_rss_mb"], strict=True)
                    )
                    for phase in phases
                ),
            ]
            for r in _benchmark("publish")["rows"]
        ],
    )


def _loop() -> str:
    return _table(
        ["engine, model", "completion, tokens", "outage", "alone, tokens/s", "in the loop", "share", "lost"],
        [
            [
                f"{r['engine']}, {r['model']}",
                f"p50 {r['length_p50']}, max {r['length_max']}",
                f"{r['outage_s']:g} s",
                f"{r['engine_alone_tokens_per_s']:.0f}",
                f"{r['sampler_tokens_per_s']:.0f}",
                f"{r['utilisation']:.2f}",
                str(r["groups_lost"]),
            ]
            for r in _benchmark("loop")["rows"]
            if r["release"] == "now"
        ],
    )  # fmt: skip


def _sites() -> str:
    found = _benchmark("sites")
    return _table(
        ["sites", "groups stored", "groups/s", "CPU without groups", "lease p50", "p99", "heartbeat p99", "memory"],
        [
            [
                f"{r['sites']:,}",
                f"{r.get('groups', 0):,}",
                f"{r['groups_per_s']:.1f}",
                _percent(r["idle_cpu_share"]),
                f"{r['lease_p50_ms']:.0f} ms",
                f"{r['lease_p99_ms']:.0f} ms",
                f"{r['heartbeat_p99_ms']:,.0f} ms",
                f"{r['rss_mb']:.0f} MB",
            ]
            for r in [*found["rows"], *found["history"][1:]]
        ],
    )  # fmt: skip


def _ingest() -> str:
    rows = {(r["group_bytes"], r["system"]): r for r in _benchmark("ingest")["rows"]}
    systems = ("heterorl", "postgres", "jetstream", "disk")
    return _table(
        ["bytes of a group", *(f"{system}, groups/s" for system in systems)],
        [
            [f"{size:,}", *(f"{rows[size, system]['groups_per_s']:,.0f}" for system in systems)]
            for size in sorted({size for size, _ in rows})
        ],
    )


def _pull() -> str:
    return _table(
        ["1 GB model", "sent", "plan to verified state", "fetch", "bare gRPC", "gRPC to a file", "share", "to a file"],
        [
            [
                name,
                f"{r['bytes'] / 1e6:.1f} MB",
                f"{r['pull_s']:.1f} s",
                f"{r['fetch_gb_s']:.2f} GB/s",
                f"{r['bare_grpc_gb_s']:.2f} GB/s",
                f"{r['bare_grpc_to_file_gb_s']:.2f} GB/s",
                f"{r['fetch_to_bare_grpc']:.2f}",
                f"{r['fetch_to_bare_grpc_to_file']:.2f}",
            ]
            for name, r in _benchmark("pull")["rows"].items()
        ],
    )  # fmt: skip


def _nodes() -> str:
    where = {(0, 2): "machine 0", (1, 2): "machine 1", (0, 1): "the only one"}
    rows: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for r in _benchmark("nodes")["faults"]:
        on = "between them" if r["fault"] == "parted" else where[r["machine"], r["machines"]]
        rows.setdefault((r["fault"], on), []).append(r)
    return _table(
        ["fault", "of", "times", "longest until all ended", "longest from there to a new version"],
        [
            [
                _FAULTS[fault],
                on,
                str(len(found)),
                f"{max(r['ended_s'] for r in found):.1f} s",
                f"{max(r['next_version_s'] for r in found):.0f} s",
            ]
            for (fault, on), found in sorted(rows.items(), key=lambda row: (list(_FAULTS).index(row[0][0]), row[0][1]))
        ],
    )  # fmt: skip


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(header)} |", f"|---|{'---:|' * (len(header) - 1)}"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


TABLES: dict[str, Callable[[], str]] = {
    "horizon-short": lambda: accuracies(_lab("horizon"), _HORIZON, _SHORT),
    "horizon": lambda: accuracies(_lab("horizon"), _HORIZON),
    "horizon-beside-gepo": _horizon_beside_gepo,
    "horizon-rates": _horizon_rates,
    "clips": _clips,
    "stale64-short": lambda: accuracies(_lab("stale64"), (0.0, 8.0, 64.0), _LEADING),
    "stale64": lambda: accuracies(_lab("stale64"), (0.0, 8.0, 64.0)),
    "stale256": lambda: accuracies(_lab("stale256"), (64.0, 128.0, 256.0), _STALE),
    "beside-gepo": _beside_gepo,
    "recommend": lambda: accuracies(_lab("recommend"), (64.0,)),
    "overlap": _overlap,
    "loop": _loop,
    "publish": _publish,
    "publish-memory": _publish_memory,
    "sites": _sites,
    "ingest": _ingest,
    "pull": _pull,
    "plan": lambda: _table(*plans.plans()),
    "plan-assumptions": lambda: _table(*plans.assumptions()),
    "plan-checks": lambda: _table(*plans.checks(_benchmark("weights"), _benchmark("load"))),
    "nodes": _nodes,
}
"""What a marker may name, and what is written there."""
