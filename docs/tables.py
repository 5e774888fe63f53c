"""Committed results -> the tables that documents show. Pure but for reading the files that `SOURCES` lie in.

A document has a table between `<!-- table: NAME -->` and `<!-- end of table -->`; `python -m docs.generate` writes what
stands between them, and a test compares.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from docs import plans
from docs.markdown import SOURCES, table

DOCUMENTS = (
    "benchmarks/README.md",
    "docs/gpu.md",
    "docs/plan.md",
    "docs/machines.md",
    "docs/launch.md",
    "docs/operate.md",
)
_DETAILS = re.compile(r"at version [1-9]|share of products|a step on the card|failed: |their cause|^skipped|code 1 B")
"""Rows of a card that only its file has."""
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
    return table(
        [
            "backend",
            "ranks, nodes",
            "parameters",
            "step",
            "to the ack",
            "checkpoint",
            "stall, of it state",
            "digests equal",
            "loss minus torch's",
        ],
        [
            [
                r["backend"],
                f"{r['ranks']}, {r['nodes']}",
                f"{r['parameters'] / 1e6:.0f} M",
                f"{r['step_s']:.1f} s",
                f"{r['publish_s']:.2f} s",
                f"{r['checkpoint_s']:.2f} s",
                f"{r['stall_s']:.2f} s, {r['state_s']:.2f} s" if "stall_s" in r else "-",
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
    return table(
        ["backend", "ranks, nodes", "parameters", *phases],
        [
            [
                r["backend"],
                f"{r['ranks']}, {r['nodes']}",
                f"{r['parameters'] / 1e6:.0f} M",
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


def _kills_stores() -> str:
    found = _benchmark("kills_stores")
    names = {
        "postgres": "PostgreSQL", "bucket": "the bucket's server",
        "active": "the active coordinator", "standby": "the standby",
        "outage": "the active coordinator, and the bucket away: since that is back",
        "race": "both coordinators, in turn",
    }  # fmt: skip
    kills = table(
        ["killed", "times", "until a coordinator answers, median", "longest"],
        [
            [names[kind], str(count), *(f"{found['takeover_s'][kind][which]:.1f} s" for which in ("median", "max"))]
            for kind, count in found["kills"].items()
        ],
    )
    account = table(
        ["account", ""],
        [
            [
                "groups acknowledged, lost, taken twice",
                f"{found['acknowledged']}, {found['lost']}, {found['duplicated']}",
            ],
            ["payloads of the learner, of them put into the bucket", f"{found['uploads']}, {found['put']}"],
            ["coordinators that ended for good", str(len(found["stay_down"]))],
            ["ledger", "balanced" if found["ledger_balanced"] else "NOT balanced"],
            ["transactions, epochs of the store", f"{found['transactions']:,}, {found['epochs']}"],
            ["epochs that committed at once, at most", str(found["epochs_committing_at_once"])],
        ],
    )
    return f"{kills}\n\n{account}"


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


def _group_rows() -> str:
    rows = {(r["group_bytes"], r["store"], r["layout"]): r for r in _benchmark("group_rows")["rows"]}
    stores = {"sqlite": "SQLite", "postgres": "PostgreSQL"}
    return table(
        ["bytes of a group", "store", *(f"{what}: {at}" for what in ("in", "out") for at in ("row", "apart", "file"))],
        [
            [
                f"{size:,}",
                name,
                *(
                    f"{rows[size, store, at][f'{what}_mb_s']:,.0f}"
                    for what in ("in", "out")
                    for at in ("row", "apart", "file")
                ),
            ]
            for size in sorted({size for size, *_ in rows})
            for store, name in stores.items()
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
        "stream_gb_s": "the coordinator's stream",
        "s3_gb_s": "a bucket's addresses",
        "relay_cold_gb_s": "a relay, first",
        "relay_gb_s": "a relay, again",
    }
    rows = _benchmark("pull")["rows"]
    return table(
        ["payload", *ways.values()], [[name, *(f"{r[way]:.2f} GB/s" for way in ways)] for name, r in rows.items()]
    )


def _nodes() -> str:
    where = {(0, 2): "machine 0", (1, 2): "machine 1", (0, 1): "the only one"}
    rows: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for r in _benchmark("nodes")["faults"]:
        on = "between them" if r["fault"] == "parted" else where[r["machine"], r["machines"]]
        rows.setdefault((r["fault"], on), []).append(r)
    return table(
        ["fault", "of", "times", "longest until no rank ran", "no agent either", "from there to a new version"],
        [
            [
                _FAULTS[fault],
                on,
                str(len(found)),
                f"{max(r['ranks_ended_s'] for r in found):.1f} s",
                f"{max(r['ended_s'] for r in found):.1f} s",
                f"{max(r['next_version_s'] for r in found):.0f} s",
            ]
            for (fault, on), found in sorted(rows.items(), key=lambda row: (list(_FAULTS).index(row[0][0]), row[0][1]))
        ],
    )  # fmt: skip


def _nodes_account() -> str:
    r = _benchmark("nodes")
    held_out, bounds = r["held_out"], r["bounds"]
    interval = f"{held_out['rise']:+.3f} ({held_out['rise_low']:+.3f} to {held_out['rise_high']:+.3f})"
    return table(
        ["what", "found"],
        [
            ["faults", str(r["kills"])],
            ["groups, lost or in effect twice", f"{r['groups']}, {r['lost']} and {r['duplicated']}"],
            ["versions, all numbers there once", f"{r['versions']}, {_yes(r['dense'])}"],
            ["ledger balances", _yes(r["ledger_balanced"])],
            ["learner, checkpoint, both samplers, payloads replayed: one state a version", _yes(r["digests_equal"])],
            ["ends that no fault had caused", str(r["unasked_ends"])],
            ["faults over a bound: " + ", ".join(f"{value:g} s" for value in bounds.values()), str(len(r["late"]))],
            [
                f"right of {held_out['prompts']} held-out prompts, version 0 and {held_out['version']}",
                f"{held_out['before']:.3f} and {held_out['after']:.3f}",
            ],
            ["difference, 95 % interval over prompts", interval],
        ],
    )  # fmt: skip


def _parity() -> str:
    return table(
        ["backend", "ranks", "nodes", "loss", "weights", "published bits", "comes back"],
        [
            [
                r["backend"] if r["stage"] is None else f"ZeRO {r['stage']}",
                str(r["ranks"]),
                str(r["nodes"]),
                *(f"{r[name]:.0e}" if r[name] else "0" for name in ("loss", "weights")),
                f"{round(r['bf16_differing'] * r['elements'])} of {r['elements']:,}",
                _yes(r["comes_back"]),
            ]
            for r in _benchmark("parity")["rows"]
            if (r["ranks"], r["nodes"]) in {(1, 1), (4, 2)}
        ],
    )


def _steps(name: str) -> str:
    rows = _benchmark(name)["rows"]
    total = sum(row["seconds"] for row in rows)
    return table(["step", "seconds"], [*([r["step"], f"{r['seconds']:.1f}"] for r in rows), ["all", f"{total:.0f}"]])


def _yes(holds: bool) -> str:
    return "yes" if holds else "no"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _gpu() -> str:
    """Every part of every card beside the plan."""
    texts = []
    for path in sorted((SOURCES / "gpu").glob("*.json")):
        found = json.loads(path.read_bytes())
        rows = [
            row
            for part in found["parts"]
            for row in ([f"**{part['title']}**", "", "", ""], *map(_gpu_row, filter(_is_shown, part["rows"])))
        ]
        title = f"{found['card']}, {found['memory_gib']:g} GiB, {found['cores']} cores, torch {found['torch']}"
        texts.append(f"**{title}**\n\n{table(['what', 'measured', 'plan', 'plan / measured'], rows)}")
    return "\n\n".join(texts) or "No card was at hand."


def _is_shown(row: dict[str, Any]) -> bool:
    return _DETAILS.search(row["what"]) is None


def _gpu_row(row: dict[str, Any]) -> list[str]:
    if "note" in row:
        return [f"{row['what']}: {row['note']}", "", "", ""]
    value, forecast = row["value"], row.get("forecast")
    ratio = f"{forecast / value:.2f}" if forecast and value else ""
    return [row["what"], f"{value:,g} {row['unit']}".strip(), "" if forecast is None else f"{forecast:,g}", ratio]


TABLES: dict[str, Callable[[], str]] = {
    "overlap": _overlap,
    "parity": _parity,
    "loop": _loop,
    "publish": _publish,
    "publish-memory": _publish_memory,
    "sites": _sites,
    "sites-stores": _sites_stores,
    "kills-stores": _kills_stores,
    "ingest": _ingest,
    "group-rows": _group_rows,
    "pull": _pull,
    "pull-ways": _pull_ways,
    "plan": lambda: table(*plans.plans()),
    "plan-assumptions": lambda: table(*plans.assumptions()),
    "plan-checks": lambda: table(*plans.checks(_benchmark("weights"), _benchmark("load"), _benchmark("publish"))),
    "machine": lambda: _steps("machine"),
    "compose": lambda: _steps("compose"),
    "gpu": _gpu,
    "nodes": _nodes,
    "nodes-account": _nodes_account,
}
"""What a marker may name, and what is written there."""
