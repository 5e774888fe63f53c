"""The view of a run on a small screen: the most important lines of the run, its sites and its curves. Pure.

A third of the screen is for the run, a third at most for sites, and curves take what is left.
"""

from __future__ import annotations

from collections.abc import Sequence

from heterorl.cli.live.curves import series
from heterorl.cli.live.sites import work_lines
from heterorl.cli.live.status import STANDS_STILL, status_rows
from heterorl.common.types.common import StepReport
from heterorl.common.types.run import RunStatus
from heterorl.report.sparkline import sparkline

_FIRST = (STANDS_STILL, "DISK FULL", "ordered")
_ALWAYS = ("version", "now", "step", "staleness", "queue", "rate", "dropped", "time")
"""Rows in the order in which they are left out, the last one first; problems of sites stand before them."""
_NAME, _NEWEST = 14, 23
"""Characters of a curve's name and newest value."""


def lines_of(
    status: RunStatus,
    reports: Sequence[StepReport],
    *,
    accuracy: float | None,
    rates: str,
    height: int,
    line: int,
    is_unicode: bool,
) -> list[str]:
    """At most `height` lines.

    Args:
        status: of the run.
        reports: its steps in order.
        accuracy: newest held-out reward, where it is known.
        rates: versions and groups a minute, in words; may be empty.
        height: of the screen.
        line: characters of a curve.
        is_unicode: whether the screen knows blocks.
    """
    rows = dict(status_rows(status, accuracy=accuracy)) | ({"rate": rates} if rates else {})
    problems = [name for name in rows if name.startswith(("quarantine of ", "problem of "))]
    wanted = [name for name in (*_FIRST, *problems, *_ALWAYS) if name in rows]
    run = [f"{name:<11}  {' '.join(rows[name].split())}" for name in wanted][: height // 3]
    head, sites = work_lines(status.sites, head_version=status.head_version)
    room = max(1, height // 3 - 1)
    if len(sites) > room:
        sites = [*sites[: room - 1], f"and {len(sites) - room + 1} more sites"]
    curves = [
        f"{name:<{_NAME}.{_NAME}}  {newest:<{_NEWEST}.{_NEWEST}} {sparkline(values[-line:], is_unicode=is_unicode)}"
        for name, newest, values in series(reports)
    ]
    shown = [f"run {status.run_id}", *run, *((head, *sites) if sites else ()), *curves]
    if len(shown) > height:
        shown[height - 1 :] = ["the rest needs a taller screen; `heterorl status` shows all"]
    # Names come from other machines: a line is one line, and no character of it steers the terminal.
    return ["".join(each if each.isprintable() else "?" for each in one) for one in shown]
