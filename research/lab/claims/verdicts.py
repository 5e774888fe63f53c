"""Results on disk -> the claims table: as JSON for programs, and as markdown for the page about claims."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from heterorl.common.errors import ConfigError
from heterorl.common.process.files import replacing
from heterorl_research.lab.claims.claim import ONLINE, Claim, Evidence, Finding, Observed, Side, judge
from heterorl_research.lab.claims.declared import CLAIMS
from heterorl_research.lab.claims.relaxed import relaxed
from heterorl_research.lab.protocol.flat import is_flat, rise
from heterorl_research.lab.protocol.rules import CONFIRMATION
from heterorl_research.lab.report.data import Results, Run
from heterorl_research.lab.report.reading import load_table

_LOG = logging.getLogger(__name__)
FEW = 5
"""Fewer seeds than these are exploratory, even where a protocol asks for as few."""
_DIGITS = 4
_HEAD = "| claim | experiment | seeds | difference | p, Holm | evidence | verdict |\n|---|---|---:|---:|---:|---|---|"
_MARKED = {"shown", "contradicted"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """What the results have for a claim: the tables of its experiments, and the seeds that suggested it."""

    claim: Claim
    tables: tuple[Results, ...]
    suggested_on: frozenset[int] = frozenset()
    problem: str = ""
    """Why it cannot be tested: a file of results that it rests on is not there, or cannot be read."""

    @property
    def runs(self) -> list[Run]:
        """All runs, failed ones too."""
        return [run for table in self.tables for run in table.runs]

    @property
    def own(self) -> list[Run]:
        """The runs of both sides."""
        return [run for run in self.runs if any(_is_of(run, self.claim, side) for side in _sides(self.claim))]

    @property
    def evidence(self) -> Evidence:
        """Exploratory without a protocol, on few seeds, or on a seed that suggested the claim."""
        seeds = {run.seed for run in self.own}
        if seeds & self.suggested_on or any(table.protocol is None for table in self.tables):
            return "exploratory"
        if any(len(seeds) < max((table.protocol or {}).get("least_seeds", 0), FEW) for table in self.tables):
            return "exploratory"
        return "confirmation" if seeds and seeds <= set(CONFIRMATION) else "protocol"

    @property
    def relaxed(self) -> list[str]:
        """Rules of the house that the runs of both sides keep in a weaker form; empty without a protocol."""
        protocols = [table.protocol for table in self.tables]
        kept = [one for one in protocols if one is not None]
        if len(kept) < len(protocols) or not self.own:
            return []
        return list(dict.fromkeys(text for one in kept for text in relaxed(one, self.own)))

    @property
    def num_failed(self) -> int:
        """Runs of both sides that failed: their seeds are in no difference. One that diverged has not failed."""
        return sum(bool(run.failed) for run in self.own)

    @property
    def is_at_edge(self) -> bool:
        """Whether a side's learning rate lies at an end of the grid that it was chosen from."""
        edges = {arm for table in self.tables if table.tuning is not None for arm in table.tuning.at_edge}
        return any(run.arm_id in edges for run in self.own)

    @property
    def is_flat_online(self) -> bool | None:
        """Whether both algorithms have come to the end of their training without delay; None where that was not run."""
        found = []
        for name in {side.algorithm for side in _sides(self.claim)}:
            arm = Side(algorithm=name, delay=ONLINE, variant=self.claim.a.variant)
            curves = [run.curve for run in self.runs if not run.failed and _is_of(run, self.claim, arm)]
            found.append(rise(curves))
        return None if any(one is None for one in found) else all(is_flat(one) for one in found)


def write_claims(directory: Path, path: Path) -> int:
    """Test every declared claim on `directory`/EXPERIMENT.json and write the table; returns how many claims it has."""
    found = gather(CLAIMS, directory)
    tested = [
        Observed(
            claim=one.claim, differences=[] if one.problem else differences(one.claim, one.runs), evidence=one.evidence
        )
        for one in found
    ]
    rows = [as_row(finding, source) for finding, source in zip(judge(tested), found, strict=True)]
    text = "[\n" + ",\n".join(json.dumps(row, allow_nan=False) for row in rows) + "\n]\n"
    with replacing(path, is_durable=False) as file:
        file.write(text.encode("ascii"))
    return len(rows)


def gather(claims: Sequence[Claim], directory: Path) -> list[Source]:
    """Each claim with the results of its experiments, and what is wrong with them.

    Without the results that suggested a claim nobody can say whether it is tested on other seeds.
    """
    tables: dict[str, Results] = {}
    problems: dict[str, str] = {}
    for name in sorted({name for claim in claims for name in _files(claim)}):
        try:
            tables[name] = load_table(directory / f"{name}.json")
        except (ConfigError, OSError) as error:
            problems[name] = f"no {name}.json"
            if (directory / f"{name}.json").exists():
                problems[name] = f"{name}.json cannot be read"
                _LOG.warning("%s", error)
    return [
        Source(
            claim=claim,
            tables=tuple(tables[name] for name in _experiments(claim) if name in tables),
            suggested_on=frozenset(
                run.seed for name in claim.suggested_by if name in tables for run in tables[name].runs
            ),
            problem="; ".join(problems[name] for name in _files(claim) if name in problems),
        )
        for claim in claims
    ]


def differences(claim: Claim, runs: Sequence[Run]) -> list[float]:
    """A - ratio B of every seed that has both, by seed, of runs that ended; A alone where there is no B.

    Over several variants: the mean of the variants' differences, of seeds that have them all.
    """
    first = _by_place(runs, claim, claim.a)
    if claim.b is None:
        return _by_seed(first, first.keys())
    second = _by_place(runs, claim, claim.b)
    found = {key: first[key] - claim.ratio * second[key] for key in first.keys() & second.keys()}
    return _by_seed(found, first.keys() | second.keys())


def as_row(finding: Finding, source: Source) -> dict[str, Any]:
    """One row of claims.json; `steps` of the longest run of its experiment."""
    claim = finding.claim
    return {
        "question": claim.question,
        "claim": claim.claim,
        "source": claim.source,
        "experiment": claim.experiment,
        "steps": max((run.steps or 0 for run in source.runs), default=0),
        "test": claim.test,
        "seeds": finding.num,
        "failed": source.num_failed,
        "difference": _rounded(finding.mean),
        "low": _rounded(finding.low),
        "high": _rounded(finding.high),
        "p": _significant(finding.p),
        "p_sign_flip": _significant(finding.sign_flip_p),
        "p_holm": _significant(finding.adjusted_p),
        "power": None if finding.power is None else round(finding.power, 2),
        "is_flat_online": source.is_flat_online,
        "is_rate_at_edge": source.is_at_edge,
        "evidence": finding.evidence if finding.num else None,
        "relaxed": source.relaxed if finding.num else [],
        "verdict": finding.verdict,
        "reason": None if finding.verdict != "not tested" else source.problem or "fewer than two pairs of seeds",
    }


def markdown(rows: Iterable[Mapping[str, Any]]) -> str:
    """The rows of claims.json as markdown: a heading and a table for each question."""
    parts: dict[str, list[str]] = {}
    for row in rows:
        parts.setdefault(row["question"], []).append(_line(row))
    return "\n".join(f"## {question}\n\n{_HEAD}\n" + "\n".join(lines) + "\n" for question, lines in parts.items())


def _line(row: Mapping[str, Any]) -> str:
    difference = "-"
    if row["difference"] is not None:
        difference = f"{row['difference']:+.3f} ({row['low']:+.3f} to {row['high']:+.3f})"
    cells = (
        row["claim"], f"`{row['experiment']}`" + (f", {row['steps']} steps" if row["steps"] else ""),
        str(row["seeds"] or "-") + (f", {row['failed']} runs failed" if row["failed"] else ""), difference,
        _p_text(row["p_holm"]), _evidence(row),
        f"**{row['verdict']}**" if row["verdict"] in _MARKED else _with_reason(row),
    )  # fmt: skip
    return "| " + " | ".join(cells) + " |"


def _evidence(row: Mapping[str, Any]) -> str:
    """Its kind, and what weakens it: relaxed rules where there is a protocol to relax, and an edge of the grid."""
    if row["evidence"] is None:
        return "-"
    relaxation = ", relaxed: " + ", ".join(row["relaxed"])
    weaker = relaxation if row["relaxed"] and row["evidence"] != "exploratory" else ""
    return f"{row['evidence']}{weaker}{'; rate at an end of the grid' if row['is_rate_at_edge'] else ''}"


def _with_reason(row: Mapping[str, Any]) -> str:
    return f"{row['verdict']}: {row['reason']}" if row["reason"] else str(row["verdict"])


def _files(claim: Claim) -> tuple[str, ...]:
    """The experiments that a verdict rests on, each once."""
    return tuple(dict.fromkeys((*_experiments(claim), *claim.suggested_by)))


def _experiments(claim: Claim) -> list[str]:
    return claim.experiment.split("+")


def _sides(claim: Claim) -> tuple[Side, ...]:
    return (claim.a,) if claim.b is None else (claim.a, claim.b)


def _is_of(run: Run, claim: Claim, side: Side) -> bool:
    is_side = (run.task, run.algorithm, run.place.label) == (claim.task, side.algorithm, side.delay)
    return is_side and side.variant in {None, run.variant}


def _by_place(runs: Sequence[Run], claim: Claim, side: Side) -> dict[tuple[int, str], float]:
    """The side's number by seed and variant; where two experiments have the same run, they have it twice alike."""
    ended = [run for run in runs if not run.failed and _is_of(run, claim, side)]
    found = {(run.seed, "" if side.variant is not None else run.variant): run.number(side.metric) for run in ended}
    return {key: value for key, value in found.items() if value is not None}


def _by_seed(values: Mapping[tuple[int, str], float], all_keys: Iterable[tuple[int, str]]) -> list[float]:
    variants = {variant for _, variant in all_keys}
    seeds = sorted({seed for seed, _ in values})
    whole = [seed for seed in seeds if all((seed, variant) in values for variant in variants)]
    return [sum(values[seed, variant] for variant in variants) / len(variants) for seed in whole]


def _rounded(value: float | None) -> float | None:
    # Without the sign of a zero.
    return None if value is None else round(value, _DIGITS) + 0.0


def _significant(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.3g}")


def _p_text(p: float | None) -> str:
    return "-" if p is None else "< 0.001" if p < 0.001 else f"{p:.3f}"
