"""The report of a run: one HTML file with its pictures inside, and the pictures beside it."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment

import heterorl
from heterorl.common.types.common import StepReport
from heterorl.demo.config import Regime
from heterorl.demo.outcome import PROMISED_BY
from heterorl.report.figures import PICTURES, drawings, picture, titles
from heterorl.report.look import CARDS, HEAD, NOTES, STYLE, columns_of
from heterorl.report.look import PICTURES as PAGE_PICTURES

_PAGE = (
    f"""<!doctype html>
<html lang="en"><head>{HEAD}<title>heterorl demo</title>
<style>{STYLE}</style></head><body>
"""
    + """<h1>{{ algorithm }} with samplers {{ regime.lag_versions }} versions behind</h1>
{% for remark in remarks %}<p class="remark">{{ remark }}</p>
{% endfor %}<p class="lead">{{ summary.steps }} of {{ regime.max_steps }} steps
of {{ regime.groups_per_step }} prompts x {{ regime.group_size }} answers,
learning rate {{ regime.learning_rate }}; {{ regime.digits }}-digit addition, exact match on held-out prompts;
seed {{ summary.seed }}, heterorl {{ version }}.</p>
"""
    + CARDS
    + """<h2>What this shows</h2>
<p>Every answer that the learner trained on was written by a policy about {{ regime.lag_versions }} versions older than
the one being trained. {% if regime.required_gain > 0 %}Staleness hurts only where the policy moves: the learning rate
here is a thousand times that of a large model, so that {{ regime.lag_versions }} versions are far away. With a small
one, all algorithms look alike. Repeat the run with <code>--algorithm grpo</code> or <code>gspo</code> to see the
difference; one run is one seed.{% else %}This was a smoke run: {{ regime.max_steps }} steps show that all parts work
together and that nothing is lost on the way. They are too few to judge learning: accuracy may go up or down by chance,
and nothing is promised of it. <code>heterorl demo</code> without <code>--tiny</code> shows learning, in two minutes.
{% endif %}</p>
"""
    + PAGE_PICTURES
    + "</body></html>\n"
)


def write_report(
    out: Path,
    *,
    regime: Regime,
    summary: Mapping[str, Any],
    reports: Sequence[StepReport],
    versions: Sequence[Mapping[str, Any]],
) -> Path:
    """Write report.html and its PNG files for a run of at least one step; returns the path of the page."""
    start = summary["warm_start_accuracy"]
    promised = None
    if start is not None and regime.required_gain > 0 and summary["algorithm"] == PROMISED_BY:
        promised = start + regime.required_gain
    drawn = drawings(reports, versions, start, promised=promised)
    pictures = []
    for name in PICTURES if versions else [name for name in PICTURES if name != "bytes"]:
        png = picture(drawn[name])
        (out / f"{name}.png").write_bytes(png)
        pictures.append((titles()[name], NOTES[name], base64.b64encode(png).decode("ascii")))
    remarks = [f"Not as promised: {problem}." for problem in summary["problems"]]
    if summary["failure"]:
        remarks.append(f"The run failed after {summary['steps']} of {regime.max_steps} steps: {summary['failure']}")
    elif summary["steps"] < regime.max_steps:
        remarks.append(f"The run was interrupted after {summary['steps']} of {regime.max_steps} steps.")
    numbers = _numbers(summary)
    page = (
        Environment(autoescape=True)
        .from_string(_PAGE)
        .render(
            regime=regime,
            algorithm=str(summary["algorithm"]).upper(),
            summary=summary,
            remarks=remarks,
            version=heterorl.__version__,
            numbers=numbers,
            columns=columns_of(len(numbers)),
            pictures=pictures,
        )
    )
    path = out / "report.html"
    path.write_text(page, encoding="utf-8")
    return path


def _numbers(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    sent, full = summary["weight_bytes_sent_median"], summary["weight_bytes_full"]
    size = f"{sent / 1024:.0f} of {full / 1024:.0f} KiB" if sent else "nothing was sent"
    prompts = summary["evaluation_prompts"]
    return [
        (f"held-out accuracy at the start, {prompts} prompts", _number(summary["warm_start_accuracy"], 3)),
        (f"at version {summary['final_accuracy_version']}, the same prompts", _number(summary["final_accuracy"], 3)),
        ("best held-out accuracy", _number(summary["best_accuracy"], 3)),
        (
            f"versions old, trained groups on average; the oldest {summary['staleness_versions_max']}",
            _number(summary["staleness_versions_mean"], 1),
        ),
        ("age of the policy that wrote them, median", f"{_number(summary['policy_age_s_p50'], 1)} s"),
        ("groups trained", f"{summary['groups_trained']:,}"),
        (f"smaller than all weights: sent per version, median {size}", f"{full / sent:.1f}x" if sent else "-"),
        ("sampler states unlike the learner's", str(summary["digest_mismatches"])),
        ("every group accounted for", {True: "yes", False: "NO", None: "-"}[summary["ledger_balanced"]]),
    ]


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
