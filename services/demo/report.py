"""The report of a run: one HTML file with its pictures inside, and the pictures beside it."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment

from services.common.types import StepReport
from services.demo.config import Regime

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>heterorl demo</title>
<style>
body { font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #1c2733 }
h1 { margin-bottom: 0 } .lead { color: #51606e; margin-top: .2rem }
.numbers { display: grid; grid-template-columns: repeat(auto-fit, minmax(13rem, 1fr)); gap: .8rem; margin: 1.5rem 0 }
.number { border: 1px solid #d8dee4; border-radius: .5rem; padding: .7rem 1rem }
.number b { display: block; font-size: 1.5rem } .number span { color: #51606e; font-size: .9rem }
img { width: 100%; border: 1px solid #d8dee4; border-radius: .5rem; margin: .5rem 0 }
</style></head><body>
<h1>{{ algorithm }} with samplers {{ regime.lag_versions }} versions behind</h1>
<p class="lead">{{ regime.max_steps }} steps of {{ regime.groups_per_step }} prompts x {{ regime.group_size }} answers,
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
    algorithm: str,
    summary: dict[str, Any],
    reports: Sequence[StepReport],
    versions: Sequence[dict[str, Any]],
) -> Path:
    """Write report.html and its PNG files; returns the path of the page."""
    pictures = [
        (title, _picture(out / f"{name}.png", draw))
        for name, title, draw in _figures(reports, versions, float(summary["warm_start_accuracy"]))
    ]
    ratio = summary["weight_bytes_full"] / max(1, summary["weight_bytes_sent_median"])
    numbers = [
        ("held-out accuracy at the start", f"{summary['warm_start_accuracy']:.3f}"),
        ("held-out accuracy at the end", f"{summary['final_accuracy']:.3f}"),
        ("best held-out accuracy", f"{summary['best_accuracy']:.3f}"),
        (
            "staleness, mean (max), versions",
            f"{summary['staleness_versions_mean']:.1f} ({summary['staleness_versions_max']})",
        ),
        ("policy age, median, seconds", f"{summary['policy_age_s_p50']:.1f}"),
        ("groups trained", f"{summary['groups_trained']:,}"),
        ("bytes of a version, median", f"{summary['weight_bytes_sent_median']:,} ({ratio:.2f}x smaller)"),
        ("sampler states unlike the learner's", str(summary["digest_mismatches"])),
        ("every group accounted for", "yes" if summary["ledger_balanced"] else "NO"),
    ]
    page = (
        Environment(autoescape=True)
        .from_string(_PAGE)
        .render(regime=regime, algorithm=algorithm.upper(), numbers=numbers, pictures=pictures)
    )
    path = out / "report.html"
    path.write_text(page, encoding="utf-8")
    return path


def _figures(
    reports: Sequence[StepReport], versions: Sequence[dict[str, Any]], warm_start: float
) -> list[tuple[str, str, Any]]:
    steps = [report.step for report in reports]
    evaluated = [(r.step, r.evaluation_accuracy) for r in reports if r.evaluation_accuracy is not None]

    def accuracy(axes: Any) -> None:
        axes.plot([0, *(step for step, _ in evaluated)], [warm_start, *(value for _, value in evaluated)], marker="o")
        axes.plot(steps, [report.reward_mean for report in reports], alpha=0.35, label="reward of the stale samplers")
        axes.lines[0].set_label("held-out accuracy of the learner")
        axes.set_ylim(0, 1)
        axes.legend()

    def staleness(axes: Any) -> None:
        axes.plot(steps, [report.staleness_mean for report in reports], label="mean")
        axes.plot(steps, [report.staleness_max for report in reports], label="max", alpha=0.5)
        axes.set_ylabel("versions")
        axes.legend()

    def series(name: str, label: str) -> Any:
        def draw(axes: Any) -> None:
            axes.plot(steps, [getattr(report, name) for report in reports])
            axes.set_ylabel(label)

        return draw

    def size(axes: Any) -> None:
        numbers = [entry["version"] for entry in versions]
        axes.plot(numbers, [entry["bytes"] / 1024 for entry in versions], label="sent")
        axes.plot(numbers, [entry["full_bytes"] / 1024 for entry in versions], label="uncompressed", linestyle="--")
        axes.set_ylim(bottom=0)
        axes.set_ylabel("KiB")
        axes.set_xlabel("version")
        axes.legend()

    return [
        ("accuracy", "Accuracy", accuracy),
        ("staleness", "Staleness of the trained groups", staleness),
        ("kl", "KL divergence of sampler from learner policy", series("kl", "nats per answer")),
        ("iw_variance", "Variance of the importance weights", series("iw_variance", "variance")),
        ("ess", "Effective sample size", series("ess_fraction", "share of the batch")),
        ("bytes", "Bytes per version", size),
    ]


def _picture(path: Path, draw: Any) -> str:
    # The object interface: no global state, no display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.2), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_xlabel("step")
    draw(axes)
    axes.grid(alpha=0.25)
    figure.savefig(path)
    return base64.b64encode(path.read_bytes()).decode("ascii")
