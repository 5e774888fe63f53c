"""Drawing surfaces: figures without global state or display, the same bytes for the same numbers."""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from heterorl.common.errors import DependencyMissing
from heterorl.lab.report.data import Arm
from heterorl.lab.report.drawing.palette import Look

_DPI = 160


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """One figure of the report; `draw` gets one axes per title in `panels`."""

    name: str
    title: str
    caption: str
    panels: Sequence[str]
    draw: Callable[[Sequence[Any]], None]
    columns: int = 3
    panel_width: float = 5.0
    panel_height: float = 3.5
    legend: Mapping[Arm, Look] = field(default_factory=dict)


def save(picture: Picture, directory: Path) -> str:
    """Write `directory`/NAME.png and return it as base64.

    Raises:
        DependencyMissing: matplotlib is not installed.
    """
    try:
        import matplotlib as mpl
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.lines import Line2D
    except ModuleNotFoundError:
        raise DependencyMissing("matplotlib", "demo") from None

    columns = max(1, min(picture.columns, len(picture.panels)))
    rows = math.ceil(len(picture.panels) / columns)
    longest = max((len(shorten(arm.label, 30)) for arm in picture.legend), default=0)
    # A lone panel is wide: it has to hold every arm.
    width = max(9.0, picture.panel_width * columns)
    per_row = max(1, int(width // (0.9 + 0.075 * longest)))
    legend_height = 0.24 * math.ceil(len(picture.legend) / per_row) + 0.2 * bool(picture.legend)
    # Foreign text is never read as a formula.
    with mpl.rc_context({"text.parse_math": False, "font.size": 9.5, "axes.titlesize": 10.5}):
        figure = Figure(figsize=(width, picture.panel_height * rows + legend_height), dpi=_DPI, layout="constrained")
        FigureCanvasAgg(figure)
        grid = figure.subplots(rows, columns, squeeze=False).ravel()
        for axes, title in zip(grid, picture.panels, strict=False):
            axes.set_title(shorten(title, 70))
            axes.grid(alpha=0.25)
            axes.spines[["top", "right"]].set_visible(False)
        for axes in grid[len(picture.panels) :]:
            axes.set_visible(False)
        picture.draw(list(grid[: len(picture.panels)]))
        handles = [
            Line2D([], [], color=look.color, linestyle=look.dash, marker=look.marker, markersize=5, lw=look.width)
            for look in picture.legend.values()
        ]
        if handles:
            labels = [shorten(arm.label, 30) for arm in picture.legend]
            figure.legend(handles, labels, loc="outside lower center", ncols=per_row, frameon=False, handlelength=3.2)
        path = directory / f"{picture.name}.png"
        figure.savefig(path, metadata={"Software": None})
    return base64.b64encode(path.read_bytes()).decode("ascii")


def shorten(text: str, limit: int) -> str:
    """`text` on one line of at most `limit` characters."""
    flat = " ".join(text.split())
    return flat if len(flat) <= limit else flat[: limit - 3] + "..."


def scale(axes: Any, values: Sequence[float], *, side: str = "y") -> None:
    """Make one axis logarithmic where sizes span more than a factor of 50; call it after drawing.

    Zeros and negative values stay visible: the axis is then linear around 0.
    """
    sizes = sorted(abs(value) for value in values if value != 0.0)
    if not sizes or sizes[-1] < 50 * sizes[len(sizes) // 10]:
        return
    if min(values) > 0:
        getattr(axes, f"set_{side}scale")("log", nonpositive="clip")
        getattr(axes, f"set_{side}lim")(sizes[0] / 1.6, None)
    else:
        getattr(axes, f"set_{side}scale")("symlog", linthresh=max(sizes[len(sizes) // 10], sizes[-1] * 1e-4))
    # The usual labels of such an axis are formulas, which are switched off here.
    getattr(axes, f"{side}axis").set_major_formatter(lambda value, _: f"{value:g}")
    getattr(axes, f"{side}axis").set_minor_formatter(lambda *_: "")


def whole_steps(axes: Any) -> None:
    """Label the horizontal axis as steps, which are whole."""
    axes.set_xlabel("step")
    axes.xaxis.get_major_locator().set_params(integer=True)


def say_empty(axes: Any) -> None:
    """Write in the middle of a panel that there is nothing to draw."""
    axes.text(0.5, 0.5, "not measured", ha="center", va="center", transform=axes.transAxes, color="#51606e")
    axes.set_xticks([])
    axes.set_yticks([])
