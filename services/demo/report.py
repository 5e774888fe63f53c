"""The report of a run: one HTML file with its pictures inside, and the pictures beside it."""

from __future__ import annotations

import base64
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment

from services.common.types import StepReport
from services.demo.config import Regime

PICTURES = ("accuracy", "staleness", "kl", "iw_variance", "ess", "bytes")
_STRONG, _WEAK = "#1f5fa8", "#e08a2e"
_WIDE = 100.0
"""A series whose maximum is more than this times its median is drawn on a logarithmic axis."""

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
    titles = _titles()
    drawings = _drawings(reports, versions, summary["warm_start_accuracy"])
    pictures = [(titles[name], _picture(out / f"{name}.png", drawings[name])) for name in PICTURES]
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


def _titles() -> dict[str, str]:
    return {
        "accuracy": "Accuracy",
        "staleness": "Staleness of the trained groups",
        "kl": "KL divergence of the sampler policy from the learner policy",
        "iw_variance": "Variance of the importance weights",
        "ess": "Effective sample size",
        "bytes": "Bytes per version",
    }


def _drawings(
    reports: Sequence[StepReport], versions: Sequence[Mapping[str, Any]], start: float | None
) -> dict[str, Callable[[Any], None]]:
    steps = [report.step for report in reports]
    evaluated = [(r.step, r.evaluation_accuracy) for r in reports if r.evaluation_accuracy is not None]
    evaluated = evaluated if start is None else [(0, start), *evaluated]

    def accuracy(axes: Any) -> None:
        rewards = [report.reward_mean for report in reports]
        axes.plot(steps, rewards, color=_WEAK, alpha=0.6, linewidth=1, label="reward of the stale samplers")
        axes.plot(*zip(*evaluated, strict=True), color=_STRONG, marker="o", markersize=4, label="held-out, learner")
        axes.set_ylim(0, 1)
        axes.set_ylabel("share of right answers")
        axes.legend(loc="upper left")

    def staleness(axes: Any) -> None:
        oldest = [report.staleness_max for report in reports]
        # The two often coincide: the wide line stays visible under the narrow one.
        axes.plot(steps, oldest, color=_WEAK, linewidth=5, alpha=0.6, label="oldest of the step")
        axes.plot(steps, [report.staleness_mean for report in reports], color=_STRONG, label="mean of the step")
        _from_zero(axes, oldest)
        axes.set_ylabel("versions")
        axes.legend(loc="lower right")

    def series(name: str, label: str) -> Callable[[Any], None]:
        def draw(axes: Any) -> None:
            values = [getattr(report, name) for report in reports]
            axes.plot(steps, values, color=_STRONG)
            if min(values) > 0 and max(values) > _WIDE * statistics.median(values):
                axes.set_yscale("log")
            else:
                _from_zero(axes, values)
            axes.set_ylabel(label)

        return draw

    def ess(axes: Any) -> None:
        series("ess_fraction", "share of the batch")(axes)
        axes.set_ylim(0, 1.02)

    def size(axes: Any) -> None:
        from matplotlib.ticker import MaxNLocator

        numbers = [entry["version"] for entry in versions]
        axes.plot(numbers, [e["full_bytes"] / 1024 for e in versions], color=_WEAK, linestyle="--", label="all weights")
        axes.plot(numbers, [e["bytes"] / 1024 for e in versions], color=_STRONG, label="sent")
        _from_zero(axes, [e["full_bytes"] / 1024 for e in versions])
        axes.set_ylabel("KiB")
        axes.set_xlabel("version")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.legend(loc="center right")

    return {
        "accuracy": accuracy,
        "staleness": staleness,
        "kl": series("kl", "nats per answer"),
        "iw_variance": series("iw_variance", "variance"),
        "ess": ess,
        "bytes": size,
    }


def _from_zero(axes: Any, values: Sequence[float]) -> None:
    axes.set_ylim(0, 1.08 * max(values) or 1.0)


def _picture(path: Path, draw: Callable[[Any], None]) -> str:
    # The object interface: no global state, no display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(9, 3.2), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    draw(axes)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)
    return base64.b64encode(path.read_bytes()).decode("ascii")
