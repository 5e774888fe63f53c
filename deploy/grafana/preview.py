"""Draws the dashboards from the table and a Prometheus's data, to look at them without Grafana.

    python -m deploy.grafana.preview http://127.0.0.1:9090 --out DIRECTORY --minutes 30

Places panels as the dashboards do; legends, units and scales are Grafana's in spirit, not pixel by pixel.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import time
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.dates as mdates
import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MultipleLocator

from deploy.grafana.generate import COLUMNS, file_of, place
from deploy.grafana.panels import BOARDS, Dashboard, Panel, Query

COLOURS = ("#5794f2", "#ff9830", "#73bf69", "#b877d9", "#fade2a", "#f2495c", "#8ab8ff", "#c0d8a8", "#ffb357", "#cfa6e8")
DARK, PANEL, TEXT, GRID = "#111217", "#181b1f", "#d8d9da", "#2c3036"
MAX_LEGEND, MAX_TICKS = 6, 6
TIME_STEPS_S = (60.0, 120.0, 300.0, 900.0, 1800.0, 3600.0, 14_400.0, 86_400.0, 172_800.0, 604_800.0, 2_592_000.0)
WIDTH_IN, HEADER_IN, ROW_IN = 15.0, 0.4, 0.33
"""Inches; a row is a unit of the dashboards' grid."""
MARGINS_IN, MARGINS_STAT_IN = (0.65, 0.72, 0.15, 0.3), (0.15, 0.1, 0.15, 0.3)
"""Left, bottom, right and top of a panel: numbers of the scale, times and legend, title."""
SECONDS_PER_DAY = 86_400.0
"""matplotlib counts days since the Unix epoch."""
SUFFIXES = {"s": " s", "percentunit": " %", "bytes": " B", "Bps": " B/s", "ops": "/s", "reqps": "/s", "suffix:x": " x"}


def fetch(server: str, path: str, **parameters: str) -> Any:
    """The `result` of a query of the HTTP API."""
    url = f"{server}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
    with urllib.request.urlopen(url, timeout=60) as answer:
        return json.load(answer)["data"]["result"]


def filled(query: Query, window: str) -> str:
    """The expression with every run and site chosen."""
    return query.expr.replace("$window", window).replace("$run", ".*").replace("$site", ".*")


def legend(query: Query, labels: dict[str, str]) -> str:
    """The legend of a series."""
    return re.sub(r"\{\{(\w+)\}\}", lambda found: labels.get(found.group(1), ""), query.legend).strip()


def humane(value: float, unit: str) -> str:
    """A number as a person reads it."""
    if math.isnan(value):
        return "no data"
    if unit == "bool_yes_no":
        return "Yes" if value else "No"
    if unit == "percentunit":
        return f"{100 * value:.3g} %"
    if unit == "s":
        for size, name in ((86_400.0, "d"), (3600.0, "h"), (60.0, "min")):
            if abs(value) >= size:
                return f"{value / size:.3g} {name}"
    suffix = SUFFIXES.get(unit, "")
    if unit == "s" and 0 < abs(value) < 1:
        return f"{1000 * value:.3g} ms"
    for size, prefix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size and unit != "s":
            return f"{value / size:.3g} {prefix}{suffix.strip()}"
    return f"{value:.4g}{suffix}"


def save(
    board: Dashboard,
    *,
    directory: Path,
    server: str,
    end: float,
    minutes: float,
    window: str,
    marked: tuple[float, float] | None = None,
    dpi: int = 70,
) -> None:
    """Write a dashboard as a PNG named after its file; `marked` is a span that every graph shades."""
    figure = draw(board, server=server, end=end, minutes=minutes, window=window, marked=marked)
    figure.savefig(directory / file_of(board).replace(".json", ".png"), dpi=dpi, facecolor=DARK)
    plt.close(figure)


def draw(
    board: Dashboard, *, server: str, end: float, minutes: float, window: str, marked: tuple[float, float] | None = None
) -> Figure:
    """One dashboard as a figure."""
    placed = [entry["gridPos"] for entry in place(board)]
    by_title = {panel.title: panel for panel in board.panels}
    num_rows = max(position["y"] + position["h"] for position in placed)
    height = HEADER_IN + ROW_IN * num_rows
    figure = plt.figure(figsize=(WIDTH_IN, height), facecolor=DARK)
    figure.text(0.01, 1 - 0.2 / height, board.title, color=TEXT, fontsize=13, va="center")
    span = (end - 60 * minutes, end)
    for entry, position in zip(place(board), placed, strict=True):
        panel = by_title[entry["title"]]
        left, width = WIDTH_IN * position["x"] / COLUMNS, WIDTH_IN * position["w"] / COLUMNS
        bottom, tall = ROW_IN * (num_rows - position["y"] - position["h"]), ROW_IN * position["h"]
        room = MARGINS_STAT_IN if panel.kind == "stat" else MARGINS_IN
        box = (left + room[0], bottom + room[1], width - room[0] - room[2], tall - room[1] - room[3])
        axes = figure.add_axes((box[0] / WIDTH_IN, box[1] / height, box[2] / WIDTH_IN, box[3] / height))
        if panel.kind == "stat":
            _stat(axes, panel, server=server, end=end, window=window)
            continue
        _graph(axes, panel, server=server, span=span, window=window)
        if marked is not None and axes.lines:
            axes.axvspan(*(at / SECONDS_PER_DAY for at in marked), color=COLOURS[5], alpha=0.15, linewidth=0)
    return figure


def _stat(axes: Any, panel: Panel, *, server: str, end: float, window: str) -> None:
    _style(axes, panel)
    axes.set_xticks([])
    axes.set_yticks([])
    texts = []
    for query in panel.queries:
        for row in fetch(server, "query", query=filled(query, window), time=f"{end}"):
            name = legend(query, row["metric"])
            texts.append(f"{name} {humane(float(row['value'][1]), panel.unit)}".strip())
    size = 13 if len(texts) < 2 else 10
    axes.text(0.5, 0.5, "\n".join(texts) or "no data", color=COLOURS[2], ha="center", va="center", fontsize=size)


def _graph(axes: Any, panel: Panel, *, server: str, span: tuple[float, float], window: str) -> None:
    _style(axes, panel)
    step = max(1.0, (span[1] - span[0]) / 240)
    asked = {"start": f"{span[0]}", "end": f"{span[1]}", "step": f"{step:g}"}
    num_series = 0
    values = []
    for query in panel.queries:
        for row in fetch(server, "query_range", query=filled(query, window), **asked):
            name = legend(query, row["metric"])
            points = [(float(at), float(value)) for at, value in row["values"]]
            values += [value for _, value in points if math.isfinite(value)]
            style = {"color": "#f2495c", "linestyle": "--"} if name.endswith(" bound") else {
                "color": COLOURS[num_series % len(COLOURS)]}  # fmt: skip
            label = name if num_series < MAX_LEGEND else None
            points = with_gaps(points, step)
            axes.plot(
                [at / SECONDS_PER_DAY for at, _ in points],
                [value for _, value in points], linewidth=1.1, label=label, **style,
            )  # fmt: skip
            num_series += 1
    if not num_series:
        axes.text(0.5, 0.5, "no data", color=TEXT, ha="center", va="center", transform=axes.transAxes)
        axes.set_xticks([])
        axes.set_yticks([])
        return
    _scale(axes, panel, values)
    axes.set_xlim(*(at / SECONDS_PER_DAY for at in span))
    axes.xaxis.set_major_locator(mdates.AutoDateLocator(minticks=4, maxticks=9))
    axes.xaxis.set_major_formatter(mdates.DateFormatter("%H:%M:%S" if span[1] - span[0] < 900 else "%H:%M"))
    more = f"and {num_series - MAX_LEGEND} more" if num_series > MAX_LEGEND else ""
    made = axes.legend(
        loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=3, fontsize=6, frameon=False, labelcolor=TEXT,
        title=more or None, title_fontsize=6,
    )  # fmt: skip
    made.get_title().set_color(TEXT)


def _scale(axes: Any, panel: Panel, values: list[float]) -> None:
    positive = [value for value in values if value > 0]
    if panel.is_log and positive:
        axes.set_yscale("log")
        # A scale without a power of ten in it still has numbers.
        decades = math.log10(max(positive) / min(positive))
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if decades < 2.5 else (1,), numticks=7))
    else:
        top = axes.get_ylim()[1] if panel.maximum is None else panel.maximum
        if panel.minimum is not None and not positive:
            top = 1.0
        # A little below, so that a series of zeros is seen.
        axes.set_ylim(bottom=None if panel.minimum is None else panel.minimum - 0.02 * top, top=1.05 * top)
        if panel.unit == "s" and top >= 2 * TIME_STEPS_S[0]:
            step = next((each for each in TIME_STEPS_S if top / each <= MAX_TICKS), top / MAX_TICKS)
            axes.yaxis.set_major_locator(MultipleLocator(step))
    axes.yaxis.set_major_formatter(lambda value, _: humane(value, panel.unit))
    axes.yaxis.set_minor_formatter(lambda _, __: "")


def with_gaps(points: list[tuple[float, float]], step: float) -> list[tuple[float, float]]:
    """Put a NaN where a series misses a step, as the dashboards do not span gaps."""
    drawn: list[tuple[float, float]] = []
    for at, value in points:
        if drawn and at - drawn[-1][0] > 1.5 * step:
            drawn.append((at - step, math.nan))
        drawn.append((at, value))
    return drawn


def _style(axes: Any, panel: Panel) -> None:
    axes.set_facecolor(PANEL)
    axes.set_title(panel.title, color=TEXT, fontsize=9, loc="left")
    axes.tick_params(colors=TEXT, labelsize=7)
    axes.grid(visible=True, color=GRID, linewidth=0.6)
    for side in axes.spines.values():
        side.set_color(GRID)


def main() -> None:
    """Draw every dashboard."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("server")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--window", default="1m")
    parser.add_argument("--dpi", type=int, default=70)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    for board in BOARDS:
        save(
            board,
            directory=arguments.out,
            server=arguments.server.rstrip("/"),
            end=time.time(),
            minutes=arguments.minutes,
            window=arguments.window,
            dpi=arguments.dpi,
        )


if __name__ == "__main__":
    main()
