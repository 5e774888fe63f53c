"""Drawing surfaces: figures without global state or display, the same bytes for the same numbers."""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from heterorl.common.errors import DependencyMissing
from heterorl_research.lab.report.data import Arm
from heterorl_research.lab.report.drawing.palette import Look

_DPI = 160
STYLE = 2
"""Raise it when pictures look different for the same data."""
_FONTS: Any = {
    # Foreign text is never read as a formula.
    "text.parse_math": False,
    "font.size": 9.5,
    "axes.titlesize": 10.5,
    "xtick.labelsize": 9.0,
    "ytick.labelsize": 9.0,
    "legend.fontsize": 9.5,
}
_SOFT = "#57606a"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sign:
    """What a legend says of a mark that all arms have, in grey: of lines, bands and bars."""

    mark: Literal["thick", "thin", "band", "bar", "hollow", "plus", "minus"]
    text: str


MEAN = Sign(mark="thick", text="mean over seeds")
WORST = Sign(mark="thin", text="the seed that ends worst")
BAND = Sign(mark="band", text="95 % t-interval of the mean")
BAR = Sign(mark="bar", text="mean over seeds and its 95 % t-interval")
PAIRED_BAR = Sign(mark="bar", text="mean difference on equal seeds and its 95 % t-interval")


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
    has_markers: bool = True
    """Whether dots are drawn, so that the legend shows the marker of each arm."""
    signs: Sequence[Sign] = ()


def save(picture: Picture, directory: Path) -> str:
    """Write `directory`/NAME.png and return it as base64.

    Raises:
        DependencyMissing: matplotlib is not installed.
    """
    figure = figure_of(picture)
    import matplotlib as mpl

    path = directory / f"{picture.name}.png"
    with mpl.rc_context(_FONTS):
        figure.savefig(path, metadata={"Software": None})
    return base64.b64encode(path.read_bytes()).decode("ascii")


def figure_of(picture: Picture) -> Any:
    """A picture as a figure of matplotlib's, drawn but not laid out.

    Raises:
        DependencyMissing: matplotlib is not installed.
    """
    try:
        import matplotlib as mpl
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise DependencyMissing("matplotlib", "demo") from None

    columns = max(1, min(picture.columns, len(picture.panels)))
    rows = math.ceil(len(picture.panels) / columns)
    # A lone panel is wide: it has to hold every arm.
    width = max(9.0, picture.panel_width * columns)
    arms = [shorten(arm.label, 30) for arm in picture.legend]
    signs = [sign.text for sign in picture.signs]
    lines = _lines(arms, width) + _lines(signs, width)
    with mpl.rc_context(_FONTS):
        height = picture.panel_height * rows + 0.24 * lines + 0.2 * bool(lines)
        figure: Any = Figure(figsize=(width, height), dpi=_DPI, layout="constrained")
        FigureCanvasAgg(figure)
        grid = figure.subplots(rows, columns, squeeze=False).ravel()
        for axes, title in zip(grid, picture.panels, strict=False):
            axes.set_title(shorten(title, 70))
            axes.grid(alpha=0.25)
            axes.spines[["top", "right"]].set_visible(False)
        for axes in grid[len(picture.panels) :]:
            axes.set_visible(False)
        picture.draw(list(grid[: len(picture.panels)]))
        for side, handles, texts in (("upper", _of_signs(picture), signs), ("lower", _of_arms(picture), arms)):
            if handles:
                figure.legend(
                    handles, texts, loc=f"outside {side} center", ncols=math.ceil(len(texts) / _lines(texts, width)),
                    frameon=False, handlelength=3.2, borderpad=0.1,
                )  # fmt: skip
    return figure


def _per_line(texts: Sequence[str], width: float) -> int:
    return max(1, int(width // (0.9 + 0.075 * max(len(text) for text in texts))))


def _lines(texts: Sequence[str], width: float) -> int:
    return math.ceil(len(texts) / _per_line(texts, width)) if texts else 0


def _of_arms(picture: Picture) -> list[Any]:
    from matplotlib.lines import Line2D

    return [
        Line2D(
            [], [], color=look.color, linestyle=look.dash, lw=look.width, markersize=5,
            marker=look.marker if picture.has_markers else "",
        )
        for look in picture.legend.values()
    ]  # fmt: skip


def _of_signs(picture: Picture) -> list[Any]:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    lines: dict[str, dict[str, Any]] = {
        "thick": {"lw": 1.8},
        "thin": {"lw": 0.6},
        "bar": {"lw": 1.0, "marker": "o", "markersize": 5},
        "hollow": {"lw": 0.0, "marker": "o", "markersize": 6, "markerfacecolor": "white"},
        "plus": {"lw": 0.0, "marker": "+", "markersize": 7},
        "minus": {"lw": 0.0, "marker": "_", "markersize": 7},
    }
    return [
        Patch(color=_SOFT, alpha=0.2, linewidth=0)
        if sign.mark == "band"
        else Line2D([], [], color=_SOFT, **lines[sign.mark])
        for sign in picture.signs
    ]


def beside(name: str, *pictures: Picture) -> Picture:
    """One picture with the panels of several, which have one range of values and one legend."""

    def draw(grid: Sequence[Any]) -> None:
        rest = list(grid)
        for picture in pictures:
            picture.draw(rest[: len(picture.panels)])
            rest = rest[len(picture.panels) :]
        same_range(grid)

    first = pictures[0]
    panels = [panel for picture in pictures for panel in picture.panels]
    legend = {arm: look for picture in pictures for arm, look in picture.legend.items()}
    return replace(first, name=name, panels=panels, draw=draw, columns=len(panels), legend=legend)


def same_range(grid: Sequence[Any]) -> None:
    """Give all panels one range of values, or the panel of small differences looks like that of large ones."""
    ranges = [axes.get_ylim() for axes in grid]
    for axes in grid:
        axes.set_ylim(min(low for low, _ in ranges), max(high for _, high in ranges))


def shorten(text: str, limit: int) -> str:
    """`text` on one line of at most `limit` characters."""
    flat = " ".join(text.split())
    return flat if len(flat) <= limit else flat[: limit - 3] + "..."


def short(rate: float) -> str:
    """A learning rate as 1.5e-4: figures and power without the zeros between."""
    figures, _, power = f"{rate:.3e}".partition("e")
    return f"{float(figures):g}e{int(power)}"


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
