"""Committed results -> the tables that documents show. Pure but for reading the files that `SOURCES` lie in.

A document has a table between `<!-- table: NAME -->` and `<!-- end of table -->`; `python -m docs.generate` writes what
stands between them, and a test compares.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from docs import plans
from docs.markdown import SOURCES, table

DOCUMENTS = ("benchmarks/README.md", "docs/gpu.md", "docs/plan.md", "docs/machines.md", "docs/untrusted.md")
_OF_A_CARD = (
    "products in bf16",
    "copy from the host, pinned",
    "tests passed",
    "513 M, heterorl: speed",
    "513 M, heterorl: peak memory",
    "513 M, heterorl, checkpointing: speed",
    "513 M, heterorl, checkpointing: peak memory",
    "513 M, heterorl, compile: speed",
    "513 M, fsdp2: speed",
    "513 M, trl: speed",
    "hf, 513 M: pause of a swap",
    "arrays of 8 B weights: pause of a swap",
    "hf, 513 M: speed, 256 rows",
    "code a delta of 8 B, digests included",
    "apply and verify it on 8 B",
    "held-out accuracy at the end",
    "states that differ between learner and sampler",
)
"""Rows of a card that the page shows; the card's file has all."""
_FAULTS = {
    "machine": "agent and process killed",
    "rank": "process killed",
    "agent": "agent killed",
    "stopped": "process stopped",
    "cut off": "cable pulled",
    "parted": "parted",
}


def _benchmark(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((SOURCES / f"{name}.json").read_bytes())
    return found


def _overlap() -> str:
    return table(
        ["a publication, as a share of a step", "waits for each commit: idle", "publishes during the step: idle"],
        [
            [f"{r['publication_share']:.1f}", _percent(r["sequential_idle_share"]), _percent(r["idle_share"])]
            for r in _benchmark("overlap")["rows"]
        ],
    )


def _publish() -> str:
    """Rows of one machine as the code is now; the file has two machines and the code of before."""
    return table(
        ["backend", "ranks", "step", "to the ack", "checkpoint", "stall, of it state", "memory of a rank"],
        [
            [
                r["backend"],
                str(r["ranks"]),
                f"{r['step_s']:.1f} s",
                f"{r['publish_s']:.2f} s",
                f"{r['checkpoint_s']:.2f} s",
                f"{r['stall_s']:.2f} s, {r['state_s']:.2f} s",
                f"{max(_peaks(r)):,.0f} MB",
            ]
            for r in _benchmark("publish")["rows"]
            if r["nodes"] == 1 and " " not in r["backend"]
        ],
    )


def _peaks(row: dict[str, Any]) -> list[float]:
    """Peak of each rank and phase, MB above an idle process."""
    return [
        peak - base
        for peaks in row["phases_rss_mb"].values()
        for peak, base in zip(peaks, row["base_rss_mb"], strict=True)
    ]


def _loop() -> str:
    return table(
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


def _loop_tools() -> str:
    return table(
        ["a turn", "a tool", "outage", "alone, tokens/s", "in the loop", "share", "lost"],
        [
            [
                f"{r['turn_s']:.1f} s",
                f"{r['tool_s']:.1f} s",
                f"{r['outage_s']:.0f} s",
                f"{r['engine_alone_tokens_per_s']:.0f}",
                f"{r['sampler_tokens_per_s']:.0f}",
                f"{r['busy']:.2f}",
                str(r["groups_lost"]),
            ]
            for r in _benchmark("loop_tools")["rows"]
        ],
    )


def _regions() -> str:
    def dropped(found: dict[str, int]) -> str:
        return ", ".join(f"{count} {reason.replace('_', ' ')}" for reason, count in found.items()) or "0"

    return table(
        ["", "generated", "trained on", "learner waits", "a version", "staleness p50, p95", "swap", "groups dropped"],
        [
            [
                r["title"],
                f"{r['share']['mean']:.2f}",
                f"{r['trained_share']['mean']:.2f}",
                _percent(r["learner_waits"]),
                f"{r['bytes_per_version_and_site'] / 1e6:.3g} MB",
                f"{r['staleness_p50']:.0f}, {r['staleness_p95']:.0f}",
                f"{1e3 * r['swap_s']:.0f} ms",
                dropped(r["dropped"]),
            ]
            for r in _benchmark("regions")["summaries"]
        ],
    )


def _sites() -> str:
    found = _benchmark("sites")
    return table(
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


def _kills() -> str:
    found = _benchmark("kills")
    kills = ", ".join(f"{name} {count}" for name, count in found["killed"].items())
    ledger = "balanced" if found["ledger_balanced"] else "NOT balanced"
    return (
        f"Kills: {kills}. Of {found['groups']:,} groups and {found['versions']:,} versions {found['lost']} were lost"
        f" and {found['duplicated']} trained twice; the ledger is {ledger}. A coordinator answered again within"
        f" {found['coordinator_restart_s_max']:.1f} s."
    )


def _kills_stores() -> str:
    found = _benchmark("kills_stores")
    names = {
        "postgres": "PostgreSQL",
        "bucket": "the bucket's server",
        "active": "the active coordinator",
        "standby": "the standby",
        "outage": "the active coordinator while the bucket was away",
        "race": "both coordinators",
    }
    kills = ", ".join(f"{names[kind]} {count}" for kind, count in found["kills"].items())
    longest = max(times["max"] for times in found["takeover_s"].values())
    ledger = "balanced" if found["ledger_balanced"] else "NOT balanced"
    return (
        f"Kills: {kills}. Of {found['acknowledged']} acknowledged groups {found['lost']} were lost and"
        f" {found['duplicated']} taken twice; the ledger is {ledger}. A coordinator answered again within"
        f" {longest:.1f} s; in an outage of the bucket, after its end."
    )


def _sites_stores() -> str:
    return table(
        ["store", "sites", "groups/s", "lease p99", "push p99", "heartbeat p99", "bare call p99", "CPU without groups"],
        [
            [
                {"sqlite": "SQLite", "postgres": "PostgreSQL"}[r["store"]],
                f"{r['sites']:,}",
                f"{r['groups_per_s']:.1f}",
                *(f"{r[f'{call}_p99_ms']:,.0f} ms" for call in ("lease", "push", "heartbeat", "reference")),
                _percent(r["idle_cpu_share"]),
            ]
            for r in _benchmark("sites")["stores"]
        ],
    )


def _sites_simulated() -> str:
    kinds = ("heartbeat", "watch", "plan", "lease and push")
    return table(
        ["sites", *(f"{kind}, a second" for kind in kinds[:3]), *(f"{kind}, cores" for kind in kinds), "all, cores"],
        [
            [
                f"{r['sites']:,}",
                *(f"{r['kinds'][kind]['calls_per_s']:,.0f}" for kind in kinds[:3]),
                *(f"{r['kinds'][kind]['core_share']:.2f}" for kind in kinds),
                f"{r['core_share']:.2f}",
            ]
            for r in _benchmark("sites")["simulated"]["rows"]
        ],
    )


def _starts() -> str:
    found = _benchmark("starts")
    restarts = {r["service"]: r for r in found["restarts"]}
    return table(
        ["process", "imports, CPU", "of it libraries", "SIGKILL to the next trained group", "longest"],
        [
            [
                r["service"],
                f"{r['cpu_s']:.2f} s",
                f"{r['libraries_cpu_s']:.2f} s",
                *(
                    f"{restarts[r['service']][key]:.1f} s" if r["service"] in restarts else "-"
                    for key in ("median_s", "max_s")
                ),
            ]
            for r in found["imports"]
        ],
    )


def _swaps() -> str:
    return table(
        ["weights", "engine", "pause", "longest", "a bare copy"],
        [
            [
                f"{r['weights'] / 1e9:.2g} B",
                {"engine hf": "hf", "arrays": "none, arrays"}[r["what"]],
                *(f"{r[key]:.2f} s" for key in ("pause_s", "pause_max_s", "copy_s")),
            ]
            for r in _benchmark("swaps")["rows"]
        ],
    )


def _ingest() -> str:
    rows = {(r["group_bytes"], r["system"]): r for r in _benchmark("ingest")["rows"]}
    systems = ("heterorl", "postgres", "jetstream", "disk")
    return table(
        ["bytes of a group", *(f"{system}, groups/s" for system in systems)],
        [
            [f"{size:,}", *(f"{rows[size, system]['groups_per_s']:,.0f}" for system in systems)]
            for size in sorted({size for size, _ in rows})
        ],
    )


def _pull() -> str:
    return table(
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


def _pull_ways() -> str:
    ways = {
        "stream": "the coordinator's stream",
        "s3": "a bucket's addresses",
        "relay_cold": "a relay, first",
        "relay": "a relay, again",
    }
    snapshot = _benchmark("pull")["rows"]["snapshot"]
    rates = [f"{snapshot[f'{way}_gb_s']:.2f} GB/s" for way in ways]
    return table(["", *ways.values()], [
        ["speed", *rates],
        ["CPU of all processes, s/GB", *(f"{snapshot[f'{way}_cpu_s_per_gb']:.1f}" for way in ways)],
    ])  # fmt: skip


def _nodes() -> str:
    rows: dict[str, list[dict[str, Any]]] = {fault: [] for fault in _FAULTS}
    for r in _benchmark("nodes")["faults"]:
        rows[r["fault"]].append(r)
    return table(
        ["fault", "times", "longest until all ranks ended", "until all agents ended", "from then to the next version"],
        [
            [
                _FAULTS[fault],
                str(len(found)),
                f"{max(r['ranks_ended_s'] for r in found):.1f} s",
                f"{max(r['ended_s'] for r in found):.1f} s",
                f"{max(r['next_version_s'] for r in found):.0f} s",
            ]
            for fault, found in rows.items()
            if found
        ],
    )


def _nodes_account() -> str:
    r = _benchmark("nodes")
    state = "one state" if r["dense"] and r["ledger_balanced"] and r["digests_equal"] else "NOT one state"
    bounds = ", ".join(f"{value:g} s" for value in r["bounds"].values())
    return (
        f"{r['kills']} faults, {r['groups']} groups: {r['lost']} lost, {r['duplicated']} in effect twice."
        f" {r['versions']} versions, each with {state} at learner, checkpoint and samplers."
        f" {r['unasked_ends']} ends without a fault; {len(r['late'])} faults over a bound ({bounds})."
    )


def _parity() -> str:
    return table(
        ["backend", "ranks on machines", "loss", "weights", "published bits"],
        [
            [
                r["backend"] if r["stage"] is None else f"ZeRO {r['stage']}",
                f"{r['ranks']} on {r['nodes']}",
                *(f"{r[name]:.0e}" if r[name] else "0" for name in ("loss", "weights")),
                f"{round(r['bf16_differing'] * r['elements'])} of {r['elements']:,}",
            ]
            for r in _benchmark("parity")["rows"]
            if (r["ranks"], r["nodes"]) == (4, 2)
        ],
    )


def _steps(name: str) -> str:
    """All seconds of a run's steps, the three longest steps, and those after a kill."""
    rows = sorted(_benchmark(name)["rows"], key=lambda row: -float(row["seconds"]))
    shown = rows[:3] + [row for row in rows[3:] if row["step"].startswith("SIGKILL")]
    steps = "".join(f"\n- {row['step']}: {row['seconds']:.1f} s" for row in shown)
    return f"{sum(row['seconds'] for row in rows):.0f} s in all, of them:\n{steps}"


def _verify_turns() -> str:
    rows = []
    for name, row in _benchmark("verify_turns")["cases"].items():
        shares = [_share(row[outcome], row["groups"]) for outcome in ("rejected", "dropped")]
        seen = ", ".join(check for check, count in row["by"].items() if count)
        rows.append([name, seen or "-", f"{row['groups']:,}", *shares])
    return table(["a site sends", "seen by", "groups", "rejected", "dropped without blame"], rows)


def _share(count: int, of: int) -> str:
    return f"{100 * count / of:.3g} %" if count else "0"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _gpu() -> str:
    """Rows of `_OF_A_CARD`, a column for each card, and the plan."""
    cards = [json.loads(path.read_bytes()) for path in sorted((SOURCES / "gpu").glob("*.json"))]
    found = [{row["what"]: row for part in card["parts"] for row in part["rows"] if "value" in row} for card in cards]
    return table(
        ["what", *(card["card"] for card in cards), "plan"],
        [
            [
                f"{what}, {unit}" if (unit := _first(found, what, "unit")) else what,
                *(_cell(rows.get(what, {}).get("value")) for rows in found),
                _cell(_first(found, what, "forecast")),
            ]
            for what in _OF_A_CARD
        ],
    )


def _first(cards: list[dict[str, Any]], what: str, field: str) -> Any:
    return next((rows[what][field] for rows in cards if rows.get(what, {}).get(field) is not None), None)


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:,g}"


TABLES: dict[str, Callable[[], str]] = {
    "overlap": _overlap,
    "parity": _parity,
    "loop": _loop,
    "loop-tools": _loop_tools,
    "publish": _publish,
    "regions": _regions,
    "sites": _sites,
    "sites-stores": _sites_stores,
    "sites-simulated": _sites_simulated,
    "starts": _starts,
    "swaps": _swaps,
    "kills": _kills,
    "kills-stores": _kills_stores,
    "ingest": _ingest,
    "pull": _pull,
    "pull-ways": _pull_ways,
    "verify-turns": _verify_turns,
    "plan": lambda: table(*plans.plans()),
    "plan-checks": lambda: table(
        *plans.checks({name: _benchmark(name) for name in ("weights", "load", "publish", "regions", "loop")})
    ),
    "machine": lambda: _steps("machine"),
    "compose": lambda: _steps("compose"),
    "gpu": _gpu,
    "nodes": _nodes,
    "nodes-account": _nodes_account,
}
"""What a marker may name, and what is written there."""
