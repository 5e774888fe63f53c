"""Results on disk -> the claims table: as JSON, which programs read, and as markdown, which docs/claims.md shows."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from heterorl.common.process.files import replacing
from heterorl.lab.claims.claim import Claim, Finding, Side, judge
from heterorl.lab.claims.declared import CLAIMS
from heterorl.lab.report.data import Run, load_table, mean

_DIGITS = 4


def write_claims(directory: Path, path: Path) -> int:
    """Test every declared claim on `directory`/EXPERIMENT.json and write the table; returns how many claims it has.

    Raises:
        ConfigError: a file of results is damaged.
    """
    found = gather(CLAIMS, directory)
    findings = judge([(claim, differences(claim, runs)) for claim, runs in found])
    rows = [as_row(finding, runs) for finding, (_, runs) in zip(findings, found, strict=True)]
    text = "[\n" + ",\n".join(json.dumps(row, allow_nan=False) for row in rows) + "\n]\n"
    with replacing(path, is_durable=False) as file:
        file.write(text.encode("ascii"))
    return len(rows)


def gather(claims: Sequence[Claim], directory: Path) -> list[tuple[Claim, list[Run]]]:
    """Each claim with the runs of its experiment that ended; none where it has no results."""
    files = {name: directory / f"{name}.json" for claim in claims for name in claim.experiment.split("+")}
    finished = {name: load_table(path).finished for name, path in files.items() if path.is_file()}
    return [
        (claim, [run for name in claim.experiment.split("+") for run in finished.get(name, [])]) for claim in claims
    ]


def differences(claim: Claim, runs: Sequence[Run]) -> list[float]:
    """A - ratio B of every seed that has both, by seed, of runs that ended."""
    first = _by_seed(runs, claim.task, claim.a)
    second = _by_seed(runs, claim.task, claim.b)
    return [first[seed] - claim.ratio * second[seed] for seed in sorted(first.keys() & second.keys())]


def as_row(finding: Finding, runs: Iterable[Run]) -> dict[str, Any]:
    """One row of claims.json; `steps` of the longest run of its experiment."""
    claim, found = finding.claim, finding.difference
    return {
        "claim": claim.claim,
        "source": claim.source,
        "experiment": claim.experiment,
        "steps": max((run.steps or 0 for run in runs), default=0),
        "test": claim.test,
        "seeds": found.num if found is not None else 0,
        "difference": _rounded(found.mean if found is not None else None),
        "low": _rounded(found.low if found is not None else None),
        "high": _rounded(found.high if found is not None else None),
        "p": _significant(finding.p),
        "p_sign_flip": _significant(finding.sign_flip_p),
        "p_holm": _significant(finding.adjusted_p),
        "verdict": finding.verdict,
    }


def markdown(rows: Iterable[Mapping[str, Any]]) -> str:
    """The rows of claims.json as a markdown table."""
    lines = [
        "| claim | source | experiment | steps | test | seeds | difference | p | p, Holm | verdict |",
        "|---|---|---|---:|---|---:|---:|---:|---:|---|",
    ]
    for row in rows:
        difference = "-"
        if row["difference"] is not None:
            difference = f"{row['difference']:+.3f} ({row['low']:+.3f} to {row['high']:+.3f})"
        cells = (
            row["claim"], row["source"], f"`{row['experiment']}`", str(row["steps"] or "-"), row["test"],
            str(row["seeds"] or "-"), difference, _p_text(row["p"]), _p_text(row["p_holm"]),
            f"**{row['verdict']}**" if row["verdict"] in {"shown", "contradicted"} else row["verdict"],
        )  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _by_seed(runs: Sequence[Run], task: str, side: Side) -> dict[int, float]:
    values: dict[int, list[float | None]] = {}
    for run in runs:
        is_side = (run.algorithm, run.variant, run.place.label) == (side.algorithm, side.variant, side.delay)
        if is_side and run.task == task:
            values.setdefault(run.seed, []).append(run.number(side.metric))
    return {seed: value for seed, found in values.items() if (value := mean(found)) is not None}


def _rounded(value: float | None) -> float | None:
    # Without the sign of a zero.
    return None if value is None else round(value, _DIGITS) + 0.0


def _significant(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.3g}")


def _p_text(p: float | None) -> str:
    return "-" if p is None else "< 0.001" if p < 0.001 else f"{p:.3f}"
