"""The results of benchmarks.weights as tables for people, and held against what they should be."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

LOWEST_LR = 1e-6
OURS = {"gapulp"}


def targets(rows: list[dict[str, Any]], merged: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What was aimed at on one core at the lowest rate, what was reached, and whether that is enough."""
    one = {row["scheme"]: row for row in rows if row.get("lr") == LOWEST_LR and row.get("lag_versions") == 1}
    gapulp = one["gapulp"]
    rival = max((row for name, row in one.items() if name not in OURS), key=lambda row: float(row["ratio"]))
    saved = {row["lag_versions"]: row["saved"] for row in merged if row["lr"] == LOWEST_LR}
    is_direct = all(row["is_direct_difference"] for row in merged)
    checks = [
        ("gapulp ratio", ">=", 115.0, gapulp["ratio"]),
        ("gapulp bytes over the entropy bound", "<=", 1.04, gapulp["entropy_bound_ratio"] / gapulp["ratio"]),
        ("gapulp encode, GB/s", ">=", 1.2, gapulp["encode_gb_s"]),
        ("gapulp decode and apply, GB/s", ">=", 3.5, gapulp["apply_gb_s"]),
        (f"gapulp against the best open scheme, {rival['scheme']}", ">=", 2.0, gapulp["ratio"] / rival["ratio"]),
        ("chain of 8 over merged", ">=", 1.9, saved[8]),
        ("chain of 24 over merged", ">=", 3.5, saved[24]),
        ("merged bytes that are the direct difference", ">=", 1.0, float(is_direct)),
    ]
    return [
        {
            "target": name,
            "goal": f"{sign} {goal:g}",
            "value": round(value, 3),
            "met": bool(value >= goal if sign == ">=" else value <= goal),
        }
        for name, sign, goal, value in checks
    ]


def show(results: dict[str, Any]) -> None:
    """Print the tables."""
    console = Console()
    table = Table(title=f"Deltas of {results['num_elements'] / 1e6:.1f} M bf16 weights, one thread")
    for column in ("lr", "lag", "changed", "scheme", "ratio", "bound", "encode GB/s", "apply GB/s"):
        table.add_column(column, justify="left" if column == "scheme" else "right")
    last = None
    for row in results["rows"]:
        if row["scheme"] == "limits":
            continue
        group = (row["lr"], row["lag_versions"])
        if last not in (None, group):
            table.add_section()
        is_first = last != group
        last = group
        table.add_row(
            f"{row['lr']:g}" if is_first else "",
            str(row["lag_versions"]) if is_first else "",
            f"{100 * row['changed_fraction']:.2f} %" if is_first else "",
            row["scheme"],
            f"{row['ratio']:.1f}",
            f"{row['entropy_bound_ratio']:.1f}" if is_first else "",
            f"{row['encode_gb_s']:.2f}",
            f"{row['apply_gb_s']:.2f}",
            style="bold" if row["scheme"] in OURS else None,
        )
    console.print(table)
    for scheme, text in {row["scheme"]: row["describe"] for row in results["rows"] if "describe" in row}.items():
        console.print(f"[dim]{scheme}: {text}[/dim]")
    limits = next(row for row in results["rows"] if row["scheme"] == "limits")
    speeds = (f"{name.removesuffix('_gb_s')} {value}" for name, value in limits.items() if name != "scheme")
    console.print(f"Limits, GB/s: {', '.join(speeds)}")
    merged = Table(title="Merged deltas beside the chain")
    for column in ("lr", "versions", "chain bytes", "merged bytes", "saved", "is the direct difference"):
        merged.add_column(column, justify="right")
    for row in results["merged"]:
        merged.add_row(
            f"{row['lr']:g}",
            str(row["lag_versions"]),
            f"{row['chain_bytes']:,}",
            f"{row['merged_bytes']:,}",
            f"{row['saved']:.2f}x",
            "yes" if row["is_direct_difference"] else "no",
        )
    console.print(merged)
    console.print(_variants(results["variants"]))
    for target in results["targets"]:
        mark = "[green]met[/green]" if target["met"] else "[red]missed[/red]"
        console.print(f"{mark}  {target['target']}: {target['value']:g} (goal {target['goal']})")


def _variants(rows: list[dict[str, Any]]) -> Table:
    table = Table(title="Variants with frozen scales; ratios against the bf16 weights")
    for column in ("lr", "versions", "variant", "changed", "delta bytes", "ratio", "snapshot", "quantise GB/s"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            f"{row['lr']:g}",
            str(row["lag_versions"]),
            row["variant"],
            f"{100 * row['changed_fraction']:.3f} %",
            f"{row['delta_bytes']:,}",
            f"{row['ratio']:.0f}",
            f"{row['snapshot_ratio']:.2f}",
            f"{row['quantise_gb_s']:.2f}",
        )
    return table
