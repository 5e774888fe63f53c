"""The page about a past run: numbers, pictures and tables.

The template escapes every value.
"""

from __future__ import annotations

import base64
import datetime
import json
import math
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from rich.filesize import decimal

import heterorl
from heterorl.common.evaluation.summary import HEADS, evaluation_rows
from heterorl.common.types.common import StepReport, amount
from heterorl.common.types.run import changed_steps
from heterorl.report import figures
from heterorl.report.figures import HEIGHT, PICTURES, STRONG, WEAK, drawings, legend, picture, whole_numbers
from heterorl.report.past_run import PastRun, SiteTotals

_TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).parent / "templates"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
NOTES = {
    "accuracy": "It should rise and stay up. If the training reward rises while the held-out reward falls, the policy "
    "overfits; a late fall of both is a collapse.",
    "staleness": "It should stay level below max_staleness_versions: the coordinator drops older groups. A rising line "
    "means that sites fall behind.",
    "kl": "Distance of the sampling policies from the trained one. It should stay small and level; a steady climb "
    "precedes a collapse.",
    "iw_variance": "Variance of the weights that correct for staleness; their mean is about 1. At 0 no correction was "
    "needed. Well above 1, a few answers decide each step.",
    "ess": "At 1 every answer counts equally. At 0.5 half of the batch is wasted. Near 0 single answers decide, and "
    "steps become noise.",
    "bytes": "The gap between the lines is what deltas save on the link. Single peaks are snapshots.",
    "progress": "A straight line is steady progress. A flat part is a pause: an outage, a restart, or no groups.",
    "sites": "Dropped groups were too old, too many, or failed a check: the ledger below gives the counts.",
}
"""Under each picture: what to look for."""
MOST_BARS = 40
"""Bars of the picture of sites, which costs 20 ms a bar and would be 70,000 pixels high with 800; a table has all."""
_Draw = Callable[[Any], None]


def columns_of(count: int) -> int:
    """Columns, 3 to 5, that leave no single card last."""
    return min((3, 4, 5), key=lambda columns: (count % columns == 1, (-count) % columns, abs(columns - 4)))


def render(run: PastRun, *, remarks: Sequence[str] = ()) -> tuple[str, dict[str, bytes]]:
    """The page of a run with an applied step, and PNG pictures.

    `remarks` stand before those about the files.
    """
    applied = [report for report in run.reports if report.is_applied]
    start = next((row["accuracy"] for row in run.evaluations if row["version"] == 0), None)
    drawn: list[tuple[str, str, _Draw, str, float]] = [
        (name, _title(name, applied, start), draw, "step", HEIGHT)
        for name, draw in (drawings(applied, run.versions, start) | figures.curves(applied)).items()
        if name != "bytes" or run.versions
    ]
    if len(run.published) > 1:
        unit, unit_s = _time_unit(run.published[-1][1] - run.published[0][1])
        axis = f"{unit} since version 0"
        drawn.append(("progress", "Versions over time", partial(_progress, run.published, unit_s), axis, HEIGHT))
    if run.sites:
        bars = largest(run.sites)
        title = "Groups by site" if len(bars) == len(run.sites) else f"Groups of the {len(bars)} largest sites"
        drawn.append(("sites", title, partial(_sites, bars), "groups", max(1.8, 1.1 + 0.4 * len(bars))))
    marks = changed_steps(run.facts)
    pngs = {name: picture(draw, horizontal=axis, height=height, marks=marks) for name, _, draw, axis, height in drawn}
    numbers, notes = _numbers(run, applied), NOTES | figures.NOTES
    page = _TEMPLATES.get_template("page.html.j2").render(
        numbers=numbers,
        columns=columns_of(len(numbers)),
        pictures=[(title, notes[name], base64.b64encode(pngs[name]).decode("ascii")) for name, title, *_ in drawn],
        remarks=[*remarks, *_remarks(run)],
        run=run,
        config=json.dumps(run.config, indent=2),
        tables=_tables(run),
        version=heterorl.__version__,
    )
    return page, pngs


def _title(name: str, applied: Sequence[StepReport], start: float | None) -> str:
    is_scored = start is not None or any(report.evaluation_accuracy is not None for report in applied)
    return "Reward" if name == "accuracy" and not is_scored else (PICTURES | figures.TITLES)[name]


def _remarks(run: PastRun) -> list[str]:
    remarks = []
    if run.is_live:
        remarks.append("The run was still going when this page was written.")
    if not run.facts:
        remarks.append("The learner's run.json is missing, so model, task and settings are unknown.")
    if run.ledger is None:
        remarks.append("The coordinator's store is missing, so queue, sites and times are unknown.")
    elif not run.ledger.is_balanced:
        remarks.append("The ledger does not balance: groups were lost or counted twice.")
    unapplied = [report for report in run.reports if not report.is_applied]
    empty = sum(report.num_tokens == 0 for report in unapplied)
    if empty < len(unapplied):
        rejected = len(unapplied) - empty
        remarks.append(f"{amount(rejected, 'step')} changed nothing, because the loss or gradient was not finite.")
    if empty:
        remarks.append(f"{amount(empty, 'step')} changed nothing, because the rewards of each group were equal.")
    if changed_steps(run.facts):
        remarks.append(
            "A restart changed the configuration: dotted lines mark the step, the facts below say what changed."
        )
    if run.num_abandoned:
        remarks.append(
            f"A learner that continued from an earlier version abandoned {amount(run.num_abandoned, 'version')}."
        )
    return remarks


def _numbers(run: PastRun, applied: Sequence[StepReport]) -> list[tuple[str, str]]:
    last = applied[-1]
    tail = applied[-max(1, len(applied) // 10) :]
    scored = [row["accuracy"] for row in run.evaluations if row["accuracy"] is not None]
    # Versions are dense from 0; a running coordinator or a later learner's journal lists not all of them.
    newest = max([*(row["version"] for row in run.versions), *(report.version for report in applied)])
    numbers = [
        ("optimizer steps", f"{last.step:,}"),
        ("versions published", f"{newest + 1:,}"),
        ("groups trained", f"{sum(report.num_groups for report in applied):,}"),
        ("tokens trained", f"{sum(report.num_tokens for report in applied):,}"),
        ("mean reward, first and last tenth of the steps", f"{_mean(applied[: len(tail)])} and {_mean(tail)}"),
        (
            f"versions old, trained groups on average; the oldest {max(report.staleness_max for report in applied)}",
            f"{statistics.fmean(report.staleness_mean for report in applied):.1f}",
        ),
        (
            "age of the policy that wrote them, median",
            f"{statistics.median(report.policy_age_p50_s for report in applied):.1f} s",
        ),
    ]
    if scored:
        numbers.append(
            (f"held-out reward, first and last; best {max(scored):.3f}", f"{scored[0]:.3f} and {scored[-1]:.3f}")
        )
    sizes = [int(row["bytes"]) for row in run.versions[1:]]
    if sizes:
        sent, full = statistics.median(sizes), int(run.versions[-1]["full_bytes"])
        label = f"smaller than all weights: sent per version, median {decimal(int(sent))} of {decimal(full)}"
        numbers.append((label, f"{full / sent:.1f}x" if sent else "-"))
    if len(run.published) > 1:
        begin, end = (datetime.datetime.fromtimestamp(run.published[i][1], datetime.UTC) for i in (0, -1))
        numbers.append(("first publication, UTC", f"{begin:%Y-%m-%d %H:%M}"))
        numbers.append(("from the first version to the last", _duration((end - begin).total_seconds())))
    if run.ledger is not None:
        numbers.append(("every group accounted for", "yes" if run.ledger.is_balanced else "NO"))
    return numbers


def _tables(run: PastRun) -> list[tuple[str, tuple[str, ...], list[tuple[Any, ...]]]]:
    tables: list[tuple[str, tuple[str, ...], list[tuple[Any, ...]]]] = []
    if run.ledger is not None:
        accounts = [
            ("acknowledged", run.ledger.acked),
            ("trained", run.ledger.consumed),
            ("waiting", run.ledger.pending),
            ("with the learner", run.ledger.leased),
            *((f"dropped: {reason.value.replace('_', ' ')}", n) for reason, n in run.ledger.dropped.items()),
            *((f"assignments closed: {why.value.replace('_', ' ')}", n) for why, n in run.ledger.closed.items()),
        ]
        tables.append(("Ledger", ("account", "groups"), [(name, f"{count:,}") for name, count in accounts]))
    if run.sets:
        tables.append(("Evaluation", HEADS, [tuple(row) for row in evaluation_rows(run.sets)]))
    if run.sites:
        rows: list[tuple[Any, ...]] = [
            (site.site, ", ".join(site.engines), f"{site.accepted:,}", f"{site.dropped:,}", site.state_dirs)
            for site in run.sites
        ]
        tables.append(("Sites", ("site", "engine", "accepted", "dropped", "state dirs"), rows))
    return tables


def _time_unit(span_s: float) -> tuple[str, float]:
    for name, seconds in (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0)):
        if span_s >= 3 * seconds:
            return name, seconds
    return "seconds", 1.0


def _progress(published: Sequence[tuple[int, float]], unit_s: float, axes: Any) -> None:
    times = [(seconds - published[0][1]) / unit_s for _, seconds in published]
    axes.plot(times, [version for version, _ in published], color=STRONG)
    axes.set_ylabel("version")
    whole_numbers(axes.yaxis)
    axes.set_xlim(0, None)
    axes.set_ylim(0, None)


def largest(sites: Sequence[SiteTotals]) -> list[SiteTotals]:
    """The MOST_BARS sites with most groups, in their order."""
    by_size = sorted(sites, key=lambda site: -(site.accepted + site.dropped))
    names = {site.site for site in by_size[:MOST_BARS]}
    return [site for site in sites if site.site in names]


def _sites(sites: Sequence[SiteTotals], axes: Any) -> None:
    names = [site.site if len(site.site) <= 24 else f"{site.site[:21]}..." for site in sites]
    places = range(len(names))
    accepted = [site.accepted for site in sites]
    axes.barh(places, accepted, color=STRONG, height=0.6, label="accepted")
    axes.barh(places, [site.dropped for site in sites], left=accepted, color=WEAK, height=0.6, label="dropped")
    axes.set_yticks(places, names)
    axes.invert_yaxis()
    whole_numbers(axes.xaxis)
    axes.set_xlim(0, 1.25 * max(1, *(site.accepted + site.dropped for site in sites)))
    legend(axes)


def _mean(reports: Sequence[StepReport]) -> str:
    values = [report.reward_mean for report in reports if math.isfinite(report.reward_mean)]
    return f"{statistics.fmean(values):.3f}" if values else "-"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
