"""Draws docs/assets/imports.svg: the folders of `services` on floors, with an arrow for each import between them.

A folder stands one floor above the highest folder that it imports. The lowest one, which all import, and the highest
one are as wide as the house; the lowest one gets no arrows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.support.import_graph import NAME, SERVICES, between_rooms, edges, modules

PATH = Path(__file__).parent / "assets" / "imports.svg"
LARGE = {"coordinator", "learner", "sampler", "common"}
"""Folders whose own folders are named in their box."""
WIDTH, MARGIN, GAP, TOP = 1240, 20, 10, 56
HEIGHTS = {"small": 40, "large": 112, "wide": 64}
SPACE = 62
"""Between two floors."""
HEAD = (
    f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {{height}}" role="img" '
    'aria-labelledby="imports-title" font-family="system-ui, -apple-system, \'Segoe UI\', Roboto, Helvetica, Arial, '
    'sans-serif">\n'
    '  <title id="imports-title">Folders of services on floors, and the imports between them</title>\n'
    '  <defs><marker id="tip" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="6" markerHeight="6" orient="auto">'
    '<path d="M0 0 10 5 0 10z" fill="#3f51b5"/></marker></defs>\n'
    f'  <rect width="{WIDTH}" height="{{height}}" rx="14" fill="#ffffff"/>\n'
    f'  <text x="{MARGIN}" y="34" fill="#6b7280" font-size="14">An arrow is an import. Every folder also imports '
    "{lowest}, which has no arrows here.</text>\n"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """A folder in the picture."""

    name: str
    inner: tuple[str, ...]
    x: float
    y: float
    width: float
    height: float


def graph() -> dict[str, set[str]]:
    """Each folder of `services`, and the folders that it imports."""
    found = between_rooms(edges(modules()), NAME)
    folders = {path.parent.name for path in SERVICES.glob("*/__init__.py")} - {"v1"}
    names = {name.rpartition(".")[2]: {one.rpartition(".")[2] for one in found.get(name, ())} for name in found}
    return {name: names.get(name, set()) & folders for name in sorted(folders)}


def floors(imports: Mapping[str, set[str]]) -> list[list[str]]:
    """Folders by floor, the lowest first."""

    @cache
    def floor(name: str) -> int:
        return 1 + max((floor(other) for other in imports[name]), default=-1)

    return [sorted(name for name in imports if floor(name) == number) for number in range(1 + max(map(floor, imports)))]


def render() -> str:
    """The picture."""
    imports = graph()
    boxes = _placed(imports)
    lowest, highest = _ends(imports)
    height = boxes[lowest].y + boxes[lowest].height + MARGIN
    arrows = [
        _arrow(boxes[name], boxes[other], boxes, is_straight=name == highest)
        for name in imports
        for other in sorted(imports[name] - {lowest})
    ]
    parts = [HEAD.format(height=round(height), lowest=lowest), *arrows, *map(_drawn, boxes.values()), "</svg>\n"]
    return "".join(parts)


def _ends(imports: Mapping[str, set[str]]) -> tuple[str, str]:
    levels = floors(imports)
    return levels[0][0], levels[-1][0]


def _placed(imports: Mapping[str, set[str]]) -> dict[str, Box]:
    """Boxes from the lowest floor up: a folder stands over the middle of the folders that it imports."""
    levels = floors(imports)
    lowest, highest = _ends(imports)
    centres: dict[str, float] = {}
    rows: list[list[tuple[str, float, float]]] = []
    for number, names in enumerate(levels):
        if number == 0 or names == [highest]:
            rows.append([(name, MARGIN, WIDTH - 2 * MARGIN) for name in names])
            continue
        # On the first floor the services stand in the middle, in their order, and the tools on both sides.
        tools = [name for name in names if name not in LARGE]
        half = (len(tools) + 1) // 2
        order = [*tools[:half], *(name for name in names if name in LARGE), *tools[half:]] if number == 1 else names
        wanted = {
            name: sum(centres[other] for other in imports[name] - {lowest}) / max(1, len(imports[name] - {lowest}))
            for name in order
        }
        if number > 1:
            order = sorted(order, key=wanted.__getitem__)
        row, left = [], float(MARGIN)
        widths = [188.0 if name in LARGE else max(94.0, 28 + 8.8 * len(name)) for name in order]
        spare = WIDTH - 2 * MARGIN - sum(widths) - GAP * (len(order) - 1)
        for name, width in zip(order, widths, strict=True):
            x = left + spare / max(1, len(order)) / 2 if number == 1 else max(left, wanted[name] - width / 2)
            row.append((name, x, width))
            left = x + width + (GAP + spare / len(order) / 2 if number == 1 else GAP)
        rows.append(row)
        centres |= {name: x + width / 2 for name, x, width in row}
    boxes, y = {}, float(TOP)
    for row in reversed(rows):
        kinds = [_kind(name, width) for name, _, width in row]
        tallest = max(HEIGHTS[kind] for kind in kinds)
        for (name, x, width), kind in zip(row, kinds, strict=True):
            boxes[name] = Box(name=name, inner=_inner(name), x=x, y=y, width=width, height=HEIGHTS[kind])
        y += tallest + SPACE
    return boxes


def _kind(name: str, width: float) -> str:
    if name not in LARGE:
        return "small"
    return "wide" if width > WIDTH / 2 else "large"


def _inner(name: str) -> tuple[str, ...]:
    return tuple(sorted(path.parent.name for path in (SERVICES / name).glob("*/__init__.py"))) if name in LARGE else ()


def _arrow(one: Box, other: Box, boxes: Mapping[str, Box], *, is_straight: bool) -> str:
    """From the bottom of a box to the top of a lower one; straight down where the upper box is above all of it."""
    y, end = one.y + one.height, other.y - 2
    if is_straight:
        places = [other.x + other.width * part / 12 for part in (6, 3, 9, 1, 11, 2, 10)]
        between = [box for box in boxes.values() if y < box.y and box.y + box.height < other.y]
        free = [x for x in places if not any(box.x - 4 <= x <= box.x + box.width + 4 for box in between)]
        start = stop = (free or places)[0]
    else:
        start, stop = one.x + one.width / 2, other.x + other.width / 2
        stop += max(-other.width / 3, min(other.width / 3, (start - stop) / 3))
    bend = (y + end) / 2
    colour = "#9aa5d6" if is_straight else "#3f51b5"
    return (
        f'  <path d="M{start:.0f} {y:.0f}C{start:.0f} {bend:.0f} {stop:.0f} {bend:.0f} {stop:.0f} {end:.0f}" '
        f'fill="none" stroke="{colour}" stroke-width="1.6" marker-end="url(#tip)"/>\n'
    )


def _drawn(box: Box) -> str:
    lines = _lines(box.inner, width=int(box.width / 7.5))
    text = "".join(
        f'\n  <text x="{box.x + 14:.0f}" y="{box.y + 48 + 18 * number:.0f}" font-size="13" fill="#374151">{line}</text>'
        for number, line in enumerate(lines)
        if line
    )
    size = 17 if box.name in LARGE else 15
    return (
        f'  <rect x="{box.x:.0f}" y="{box.y:.0f}" width="{box.width:.0f}" height="{box.height:.0f}" rx="8" '
        f'fill="#f8fafc" stroke="#cbd5e1" stroke-width="1.5"/>\n'
        f'  <text x="{box.x + 14:.0f}" y="{box.y + 26:.0f}" font-size="{size}" font-weight="700" '
        f'fill="#111827">{box.name}</text>{text}\n'
    )


def _lines(names: tuple[str, ...], width: int) -> list[str]:
    """Names with commas, in lines that fit a box."""
    lines = [""]
    for number, name in enumerate(names):
        word = name + ("," if number + 1 < len(names) else "")
        if lines[-1] and len(lines[-1]) + 1 + len(word) > width:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return lines


if __name__ == "__main__":
    PATH.write_text(render(), encoding="utf-8")
