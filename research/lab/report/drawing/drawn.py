"""What a figure shows, as data: numbers, words and colours of everything on its axes, and their digest.

Pixels and fonts have no part in it, so two machines agree on whether a committed picture is up to date.
"""

from __future__ import annotations

import json
from typing import Any

from heterorl.common.wire.common_messages import bytes_digest
from heterorl_research.lab.report.drawing.canvas import STYLE, Picture, figure_of

_DIGITS = 6
_DECIMALS = 9


def digest(picture: Picture) -> str:
    """Digest of all that a picture shows; another one for another number, word, colour or style."""
    text = json.dumps(contents(figure_of(picture)), separators=(",", ":"))
    return bytes_digest(text.encode())


def contents(figure: Any) -> list[Any]:
    """Size, style, legends and each panel of a figure; numbers with six digits."""
    width, height = figure.get_size_inches()
    legends = [[text.get_text() for text in legend.get_texts()] for legend in figure.legends]
    panels = [_panel(axes) for axes in figure.axes if axes.get_visible()]
    return [STYLE, _number(width), _number(height), legends, panels]


def _panel(axes: Any) -> dict[str, Any]:
    from matplotlib.colors import to_hex

    return {
        "words": [axes.get_title(), axes.get_xlabel(), axes.get_ylabel()],
        "ranges": [_numbers(axes.get_xlim()), _numbers(axes.get_ylim()), axes.get_xscale(), axes.get_yscale()],
        "ticks": [_ticks(axis) for axis in (axes.xaxis, axes.yaxis)],
        "lines": [
            [
                to_hex(line.get_color()), str(line.get_marker()), _number(line.get_linewidth()),
                [_numbers(point) for point in line.get_xydata()],
            ]
            for line in axes.lines
        ],
        "areas": [
            [[_numbers(point) for point in path.vertices] for path in collection.get_paths()]
            for collection in axes.collections
        ],
        "images": [[_numbers(row) for row in image.get_array().filled(float("nan"))] for image in axes.images],
        "texts": [[*_numbers(text.get_position()), text.get_text(), to_hex(text.get_color())] for text in axes.texts],
    }  # fmt: skip


def _ticks(axis: Any) -> list[str]:
    """What was written at the ticks; nothing where matplotlib chooses them."""
    from matplotlib.ticker import FixedLocator

    if not isinstance(axis.get_major_locator(), FixedLocator):
        return []
    return [text.get_text() for text in axis.get_ticklabels()]


def _numbers(values: Any) -> list[str]:
    return [_number(value) for value in values]


def _number(value: Any) -> str:
    # What is 0 but for rounding may have another sign on another machine.
    return f"{round(float(value), _DECIMALS) + 0.0:.{_DIGITS}g}"
