"""The report of a run: one HTML file with its pictures inside, and the pictures beside it."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment

from services.common.types import StepReport
from services.demo.config import Regime
from services.demo.figures import PICTURES, drawings, picture, titles

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>heterorl demo</title>
<style>
body { font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #1c2733 }
h1 { margin-bottom: 0 } .lead { color: #51606e; margin-top: .2rem }
.numbers { display: grid; grid-template-columns: repeat(auto-fit, minmax(13rem, 1fr)); gap: .8rem; margin: 1.5rem 0 }
.number { border: 1px solid #d8dee4; border-radius: .5rem; padding: .7rem 1rem }
.remark { background: #fff1dc; border-left: .3rem solid #e08a2e; padding: .5rem 1rem }
.number b { display: block; font-size: 1.5rem } .number span { color: #51606e; font-size: .9rem }
img { width: 100%; border: 1px solid #d8dee4; border-radius: .5rem; margin: .5rem 0 }
</style></head><body>
<h1>{{ algorithm }} with samplers {{ regime.lag_versions }} versions behind</h1>
{% for remark in remarks %}<p class="remark">{{ remark }}</p>
{% endfor %}<p class="lead">{{ summary.steps }} of {{ regime.max_steps }} steps
of {{ regime.groups_per_step }} prompts x {{ regime.group_size }} answers,
learning rate {{ regime.learning_rate }}; {{ regime.digits }}-digit addition, exact match on held-out prompts.</p>
<div class="numbers">{% for label, value in numbers %}
<div class="number"><b>{{ value }}</b><span>{{ label }}</span></div>{% endfor %}</div>
<h2>What this shows</h2>
<p>Every answer that the learner trained on was written by a policy about {{ regime.lag_versions }} versions older than
the one being trained. Staleness hurts only where the policy moves: the learning rate here is a thousand times that of
a large model, so that {{ regime.lag_versions }} versions are far away. With a small one, all algorithms look alike.
Repeat the run with <code>--algorithm grpo</code> or <code>gspo</code> to see the difference; one run is one seed.</p>
{% for title, picture in pictures %}<h2>{{ title }}</h2>
<img alt="{{ title }}" src="data:image/png;base64,{{ picture }}">
{% endfor %}</body></html>
"""


def write_report(
    out: Path,
    *,
    regime: Regime,
    summary: Mapping[str, Any],
    reports: Sequence[StepReport],
    versions: Sequence[Mapping[str, Any]],
) -> Path:
    """Write report.html and its PNG files for a run of at least one step; returns the path of the page."""
    drawn = drawings(reports, versions, summary["warm_start_accuracy"])
    pictures = []
    for name in PICTURES:
        png = picture(drawn[name])
        (out / f"{name}.png").write_bytes(png)
        pictures.append((titles()[name], base64.b64encode(png).decode("ascii")))
    remarks = [f"Not as promised: {problem}." for problem in summary["problems"]]
    if summary["steps"] < regime.max_steps:
        remarks.append(f"The run was interrupted after {summary['steps']} of {regime.max_steps} steps.")
    page = (
        Environment(autoescape=True)
        .from_string(_PAGE)
        .render(
            regime=regime,
            algorithm=str(summary["algorithm"]).upper(),
            summary=summary,
            remarks=remarks,
            numbers=_numbers(summary),
            pictures=pictures,
        )
    )
    path = out / "report.html"
    path.write_text(page, encoding="utf-8")
    return path


def _numbers(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    sent, full = summary["weight_bytes_sent_median"], summary["weight_bytes_full"]
    size = f"{sent / 1024:.0f} of {full / 1024:.0f} KiB ({full / sent:.1f}x smaller)" if sent else "-"
    prompts = summary["evaluation_prompts"]
    return [
        (f"held-out accuracy at the start, {prompts} prompts", _number(summary["warm_start_accuracy"], 3)),
        (f"at version {summary['final_accuracy_version']}, the same prompts", _number(summary["final_accuracy"], 3)),
        ("best held-out accuracy", _number(summary["best_accuracy"], 3)),
        (
            "mean (max) staleness of trained groups, versions",
            f"{_number(summary['staleness_versions_mean'], 1)} ({summary['staleness_versions_max']})",
        ),
        ("median age of the policy that wrote them, seconds", _number(summary["policy_age_s_p50"], 1)),
        ("groups trained", f"{summary['groups_trained']:,}"),
        ("sent per version, median", size),
        ("sampler states unlike the learner's", str(summary["digest_mismatches"])),
        ("every group accounted for", {True: "yes", False: "NO", None: "-"}[summary["ledger_balanced"]]),
    ]


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
