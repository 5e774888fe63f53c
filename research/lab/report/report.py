"""The report of an experiment: one HTML file with its pictures inside; beside it pictures, tables and curves as data.

The same results give the same bytes. Foreign text is escaped.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from heterorl.common.errors import DependencyMissing
from heterorl_research.lab.protocol.flat import TOLERANCE
from heterorl_research.lab.report import curves, differences, figures, ladders, plane, sweeps
from heterorl_research.lab.report.data import COLLAPSE_MARGIN, Results
from heterorl_research.lab.report.drawing.canvas import Picture, save
from heterorl_research.lab.report.drawing.palette import looks
from heterorl_research.lab.report.look_for import look_for
from heterorl_research.lab.report.page import PAGE
from heterorl_research.lab.report.paired import BASELINE, MEASURES, Comparison, comparisons
from heterorl_research.lab.report.reading import load
from heterorl_research.lab.report.tables import Row, p_text, plus_minus, rows, write_comparisons, write_runs


def write_report(directory: Path) -> Path:
    """Write report.html, runs.csv, comparisons.csv, differences.json and the PNG files into `directory`.

    Args:
        directory: holds results.json and runs/RUN_ID.json of an experiment.

    Returns:
        The path of the page.

    Raises:
        ConfigError: the results are absent or malformed.
        DependencyMissing: jinja2 or matplotlib is not installed.
    """
    results = load(directory)
    found = comparisons(results)
    write_runs(results, directory / "runs.csv")
    write_comparisons(found, directory / "comparisons.csv")
    differing = differences.as_json(differences.difference_curves(results))
    lines = ",\n".join(json.dumps(curve, separators=(",", ":"), allow_nan=False) for curve in differing)
    (directory / "differences.json").write_text(f"[\n{lines}\n]\n", encoding="ascii")
    pictures = [(picture, save(picture, directory)) for picture in pictures_of(results)]
    path = directory / "report.html"
    path.write_text(render(results, found, pictures), encoding="utf-8")
    return path


def render(results: Results, found: Sequence[Comparison], pictures: Sequence[tuple[Picture, str]]) -> str:
    """The page as text.

    Args:
        results: the experiment.
        found: its comparisons with the baseline.
        pictures: each with its PNG as base64.

    Raises:
        DependencyMissing: jinja2 is not installed.
    """
    try:
        from jinja2 import Environment
    except ModuleNotFoundError:
        raise DependencyMissing("jinja2", "demo") from None

    environment = Environment(autoescape=True)
    environment.filters.update(pm=plus_minus, p=p_text)
    return environment.from_string(PAGE).render(
        results=results,
        numbers=_numbers(results),
        tables=_by_place(rows(results)),
        unfinished=[f"{row.task} {row.arm.label}".strip() for row in rows(results) if row.is_unfinished],
        comparisons=_by_place(found),
        baseline=BASELINE,
        collapse_margin=COLLAPSE_MARGIN,
        flat_tolerance=TOLERANCE,
        measures=MEASURES,
        pictures=[(picture, look_for(picture.name), data) for picture, data in pictures],
        unbalanced=[run for run in results.runs if run.ledger_balanced is False],
    )


def pictures_of(results: Results) -> list[Picture]:
    """All figures, in the order of the page, not yet drawn; none if every run failed."""
    if not results.finished:
        return []
    look = looks(results.arms)
    return [
        *curves.accuracy(results, look),
        *differences.pictures(results, look),
        *ladders.ladders(results, look),
        *figures.against_delay(results, look),
        *figures.correlations(results, look),
        *curves.training(results, look),
        *plane.pictures(results),
        *sweeps.sweeps(results),
        *sweeps.differences(results),
    ]


def _numbers(results: Results) -> list[tuple[str, str]]:
    seeds = {run.seed for run in results.runs}
    return [
        ("runs", f"{len(results.runs)}"),
        ("failed", f"{len(results.failed)}"),
        ("collapsed", f"{sum(run.has_collapsed for run in results.finished)}"),
        ("algorithms", f"{len(results.algorithms)}"),
        ("delays", f"{len(results.delays)}"),
        ("seeds", f"{len(seeds)}"),
    ]


def _by_place(found: Sequence[Any]) -> list[tuple[str, list[Any]]]:
    tables: dict[str, list[Row | Comparison]] = {}
    for entry in found:
        parts = [entry.task, entry.delay.label, MEASURES[entry.measure] if isinstance(entry, Comparison) else ""]
        tables.setdefault("; ".join(part for part in parts if part), []).append(entry)
    return list(tables.items())
