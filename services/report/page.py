"""The page about a past run: numbers, pictures and tables; every value goes through autoescape."""

from __future__ import annotations

import base64
import datetime
import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from jinja2 import Environment

from services.common.types import StepReport
from services.demo.figures import PICTURES, STRONG, WEAK, drawings, picture, titles
from services.report.files import PastRun

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>heterorl run {{ run.run_id }}</title>
<style>
body { font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #1c2733 }
h1 { margin-bottom: 0 } .lead { color: #51606e; margin-top: .2rem }
.numbers { display: grid; grid-template-columns: repeat(auto-fit, minmax(13rem, 1fr)); gap: .8rem; margin: 1.5rem 0 }
.number { border: 1px solid #d8dee4; border-radius: .5rem; padding: .7rem 1rem }
.remark { background: #fff1dc; border-left: .3rem solid #e08a2e; padding: .5rem 1rem }
.number b { display: block; font-size: 1.5rem } .number span { color: #51606e; font-size: .9rem }
img { width: 100%; border: 1px solid #d8dee4; border-radius: .5rem; margin: .5rem 0 }
table { border-collapse: collapse; margin: .5rem 0 1.5rem } th, td { padding: .25rem .9rem; text-align: right }
th:first-child, td:first-child { text-align: left } td { border-top: 1px solid #d8dee4 }
</style></head><body>
<h1>Run {{ run.run_id or "without a name" }}</h1>
<p class="lead">Read from {{ run.sources | join(" and ") }}.</p>
{% for remark in remarks %}<p class="remark">{{ remark }}</p>
{% endfor %}<div class="numbers">{% for label, value in numbers %}
<div class="number"><b>{{ value }}</b><span>{{ label }}</span></div>{% endfor %}</div>
{% for title, data in pictures %}<h2>{{ title }}</h2>
<img alt="{{ title }}" src="data:image/png;base64,{{ data }}">
{% endfor %}{% for title, header, rows in tables %}<h2>{{ title }}</h2>
<table><tr>{% for name in header %}<th>{{ name }}</th>{% endfor %}</tr>
{% for row in rows %}<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}</table>
{% endfor %}</body></html>
"""
_Draw = Callable[[Any], None]
_HEIGHT = 3.2


def render(run: PastRun) -> tuple[str, dict[str, bytes]]:
    """The page of a run with at least one applied step, and its pictures by name, PNG.

    Raises:
        DependencyMissing: matplotlib is not installed.
    """
    applied = [report for report in run.reports if report.is_applied]
    start = next((row["accuracy"] for row in run.evaluations if row["version"] == 0), None)
    drawn: list[tuple[str, str, _Draw, str, float]] = [
        (name, _title(name, applied, start), draw, "step", _HEIGHT)
        for name, draw in drawings(applied, run.versions, start).items()
        if name in PICTURES and (name != "bytes" or run.versions)
    ]
    if len(run.published) > 1:
        unit, unit_s = _time_unit(run.published[-1][1] - run.published[0][1])
        axis = f"{unit} since version 0"
        drawn.append(("progress", "Versions over time", _progress(run.published, unit_s), axis, _HEIGHT))
    if run.sites:
        drawn.append(("sites", "Groups by site", _sites(run), "groups", max(1.6, 0.9 + 0.35 * len(run.sites))))
    pngs = {name: picture(draw, horizontal=axis, height=height) for name, _, draw, axis, height in drawn}
    page = (
        Environment(autoescape=True)
        .from_string(_PAGE)
        .render(
            run=run,
            remarks=_remarks(run),
            numbers=_numbers(run, applied),
            pictures=[(title, base64.b64encode(pngs[name]).decode("ascii")) for name, title, *_ in drawn],
            tables=_tables(run),
        )
    )
    return page, pngs


def _title(name: str, applied: Sequence[StepReport], start: float | None) -> str:
    is_scored = start is not None or any(report.evaluation_accuracy is not None for report in applied)
    return "Reward" if name == "accuracy" and not is_scored else titles()[name]


def _remarks(run: PastRun) -> list[str]:
    remarks = []
    if run.ledger is None:
        remarks.append("Without the coordinator's store: nothing is known of queue, sites and times.")
    elif not run.ledger.is_balanced:
        remarks.append("The ledger does not balance: groups were lost or counted twice.")
    rejected = sum(not report.is_applied for report in run.reports)
    if rejected:
        remarks.append(f"{rejected} steps had a loss or gradient that was not finite and changed nothing.")
    if run.num_abandoned:
        remarks.append(f"{run.num_abandoned} versions were abandoned by a learner that continued from an earlier one.")
    return remarks


def _numbers(run: PastRun, applied: Sequence[StepReport]) -> list[tuple[str, str]]:
    last = applied[-1]
    tail = applied[-max(1, len(applied) // 10) :]
    scored = [row["accuracy"] for row in run.evaluations if row["accuracy"] is not None]
    numbers = [
        ("optimizer steps", f"{last.step:,}"),
        ("versions published", f"{len(run.versions):,}"),
        ("groups trained", f"{sum(report.num_groups for report in applied):,}"),
        ("tokens trained", f"{sum(report.num_tokens for report in applied):,}"),
        ("mean reward, first and last tenth", f"{_mean(applied[: len(tail)])} and {_mean(tail)}"),
        (
            "staleness of trained groups, mean and maximum, versions",
            f"{statistics.fmean(report.staleness_mean for report in applied):.1f} "
            f"({max(report.staleness_max for report in applied)})",
        ),
        (
            "median age of the policy that wrote them, seconds",
            f"{statistics.median(report.policy_age_p50_s for report in applied):.1f}",
        ),
    ]
    if scored:
        numbers.append(
            ("held-out accuracy, first, last and best", f"{scored[0]:.3f}, {scored[-1]:.3f}, {max(scored):.3f}")
        )
    sizes = [int(row["bytes"]) for row in run.versions[1:]]
    if sizes:
        sent, full = statistics.median(sizes), int(run.versions[-1]["full_bytes"])
        ratio = f" ({full / sent:.1f}x smaller)" if sent else ""
        numbers.append(("sent per version, median", f"{_size(sent)} of {_size(full)}{ratio}"))
    if len(run.published) > 1:
        begin, end = (datetime.datetime.fromtimestamp(run.published[i][1], datetime.UTC) for i in (0, -1))
        numbers.append(("first publication, UTC", f"{begin:%Y-%m-%d %H:%M}"))
        numbers.append(("from the first to the last", _duration((end - begin).total_seconds())))
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
        ]
        tables.append(("Ledger", ("account", "groups"), [(name, f"{count:,}") for name, count in accounts]))
    if run.sites:
        rows: list[tuple[Any, ...]] = [
            (site.site, ", ".join(site.engines), f"{site.accepted:,}", f"{site.dropped:,}", site.incarnations)
            for site in run.sites
        ]
        tables.append(("Sites", ("site", "engine", "accepted", "dropped", "incarnations"), rows))
    return tables


def _time_unit(span_s: float) -> tuple[str, float]:
    for name, seconds in (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0)):
        if span_s >= 3 * seconds:
            return name, seconds
    return "seconds", 1.0


def _progress(published: Sequence[tuple[int, float]], unit_s: float) -> _Draw:
    def draw(axes: Any) -> None:
        from matplotlib.ticker import MaxNLocator

        times = [(seconds - published[0][1]) / unit_s for _, seconds in published]
        axes.plot(times, [version for version, _ in published], color=STRONG)
        axes.set_ylabel("version")
        axes.yaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
        axes.set_xlim(0, None)
        axes.set_ylim(0, None)

    return draw


def _sites(run: PastRun) -> _Draw:
    def draw(axes: Any) -> None:
        from matplotlib.ticker import MaxNLocator

        names = [site.site if len(site.site) <= 24 else f"{site.site[:21]}..." for site in run.sites]
        places = range(len(names))
        accepted = [site.accepted for site in run.sites]
        axes.barh(places, accepted, color=STRONG, height=0.6, label="accepted")
        axes.barh(places, [site.dropped for site in run.sites], left=accepted, color=WEAK, height=0.6, label="dropped")
        axes.set_yticks(places, names)
        axes.invert_yaxis()
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
        axes.set_xlim(0, 1.25 * max(1, *(site.accepted + site.dropped for site in run.sites)))
        axes.legend(loc="center right")

    return draw


def _mean(reports: Sequence[StepReport]) -> str:
    values = [report.reward_mean for report in reports if math.isfinite(report.reward_mean)]
    return f"{statistics.fmean(values):.3f}" if values else "-"


def _size(num_bytes: float) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes:.0f} bytes"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
