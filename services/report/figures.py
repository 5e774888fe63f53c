"""The pictures of a run: what the demonstration and the report of a past run both draw."""

from __future__ import annotations

import io
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from heterorl.common.errors import DependencyMissing
from heterorl.common.types.common import StepReport

PICTURES = ("accuracy", "staleness", "kl", "iw_variance", "ess", "bytes")
STRONG, WEAK, MARK = "#1f5fa8", "#e08a2e", "#51606e"
WIDTH, HEIGHT, DPI = 5.8, 3.2, 220
"""Inches and dots an inch: two pictures beside each other on a desk, one at the width of a phone."""
_WIDE = 100.0
"""A series whose maximum is more than this times its median is drawn on a logarithmic axis."""


def titles() -> dict[str, str]:
    """Heading of each picture."""
    return {
        "accuracy": "Reward, trained and held out",
        "staleness": "Staleness of the trained groups",
        "kl": "KL divergence of sampler and learner policy",
        "iw_variance": "Variance of the importance weights",
        "ess": "Effective sample size",
        "bytes": "Bytes per version",
    }


def drawings(
    reports: Sequence[StepReport],
    versions: Sequence[Mapping[str, Any]],
    start: float | None,
    *,
    promised: float | None = None,
) -> dict[str, Callable[[Any], None]]:
    """What draws each picture of `PICTURES` on given axes.

    Args:
        reports: applied steps in order, at least one.
        versions: rows with `version`, `bytes` and `full_bytes`; may be empty.
        start: mean held-out reward of version 0, where it was measured.
        promised: mean held-out reward that was promised for the end, where one was.
    """
    steps = [report.step for report in reports]
    evaluated = [(r.step, r.evaluation_accuracy) for r in reports if r.evaluation_accuracy is not None]
    evaluated = evaluated if start is None else [(0, start), *evaluated]

    def accuracy(axes: Any) -> None:
        rewards = [report.reward_mean for report in reports]
        axes.plot(steps, rewards, color=WEAK, alpha=0.6, linewidth=1, label="reward of the samplers")
        if evaluated:
            axes.plot(
                *zip(*evaluated, strict=True), color=STRONG, marker="o", markersize=4, label="held-out prompts, learner"
            )
        if promised is not None:
            axes.axhline(promised, color="#51606e", linewidth=1, linestyle=":", label="promised for the end")
        _unit_or_wider(axes, rewards)
        axes.set_ylabel("mean reward")
        # Above the axes: the first held-out points are as often at the top as at the bottom.
        axes.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=2, frameon=False)

    def staleness(axes: Any) -> None:
        oldest = [report.staleness_max for report in reports]
        # The two often coincide: the wide line stays visible under the narrow one.
        axes.plot(steps, oldest, color=WEAK, linewidth=5, alpha=0.6, label="oldest of the step")
        axes.plot(steps, [report.staleness_mean for report in reports], color=STRONG, label="mean of the step")
        _from_zero(axes, oldest)
        axes.set_ylabel("versions")
        axes.legend(loc="lower right")

    def series(name: str, label: str) -> Callable[[Any], None]:
        def draw(axes: Any) -> None:
            values = [getattr(report, name) for report in reports]
            axes.plot(steps, values, color=STRONG)
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
        axes.plot(numbers, [e["full_bytes"] / 1024 for e in versions], color=WEAK, linestyle="--", label="all weights")
        axes.plot(numbers, [e["bytes"] / 1024 for e in versions], color=STRONG, label="sent")
        _from_zero(axes, [e["full_bytes"] / 1024 for e in versions])
        axes.set_ylabel("KiB")
        axes.set_xlabel("version")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
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


def _unit_or_wider(axes: Any, values: Sequence[float]) -> None:
    """A share is drawn between 0 and 1; a reward of another scale as it comes."""
    if min(values) >= 0.0 and max(values) <= 1.0:
        axes.set_ylim(0, 1)


def picture(
    draw: Callable[[Any], None], *, horizontal: str = "step", height: float = HEIGHT, marks: Sequence[int] = ()
) -> bytes:
    """Draw one picture; returns a PNG, dense enough for any screen and legible at the width of a phone.

    Args:
        draw: puts the curves on the axes.
        horizontal: name of the horizontal axis.
        height: inches.
        marks: steps that a dotted line marks, where the horizontal axis has steps.

    Raises:
        DependencyMissing: matplotlib is not installed.
    """
    # The object interface: no global state, no display.
    try:
        import matplotlib as mpl
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ModuleNotFoundError:
        raise DependencyMissing("matplotlib", "report") from None

    # Foreign text is never read as a formula.
    with mpl.rc_context({"text.parse_math": False, "font.size": 11.5, "legend.fontsize": 10}):
        figure = Figure(figsize=(WIDTH, height), dpi=DPI, layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        axes.set_xlabel(horizontal)
        if horizontal == "step":
            axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
        draw(axes)
        # The picture of bytes has versions on its axis.
        for step in marks if axes.get_xlabel() == "step" else ():
            axes.axvline(step + 0.5, color=MARK, linestyle=":", linewidth=1.2)
        axes.set_axisbelow(True)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()
