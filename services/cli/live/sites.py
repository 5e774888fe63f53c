"""The sites of a run for people: one row a site, whatever number of its incarnations the coordinator remembers."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from heterorl.common.types.run import NEVER_S, Folded, SiteStatus, fold_incarnations

_WORK = ("site", "version", "behind", "accepted", "dropped", "tokens/s", "leased", "seen")
_STATE = ("flavour", "starts", "canary", "failed", "refused", "apply", "quota")


def site_tables(sites: Sequence[SiteStatus], *, head_version: int, width: int) -> tuple[Table, ...]:
    """One line a site: one table where all columns fit, and otherwise two, each with the names of the sites."""
    rows = [(_work(site, head_version), _state(site)) for site in fold_incarnations(sites)]
    flat = Table(*_WORK, *_STATE, title="sites")
    for work, state in rows:
        flat.add_row(*work, *state)
    if Console(width=1000, markup=False).measure(flat).maximum <= width:
        return (flat,)
    narrow = [
        Table(*columns, title=title, box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
        for title, columns in (("sites: work", _WORK), ("sites: state", ("site", *_STATE)))
    ]
    for work, state in rows:
        narrow[0].add_row(*work)
        narrow[1].add_row(work[0], *state)
    return tuple(narrow)


def work_lines(sites: Sequence[SiteStatus], *, head_version: int) -> tuple[str, list[str]]:
    """The head and a line a site of the table of work, without a frame."""
    rows = [[cell.plain for cell in _work(site, head_version)] for site in fold_incarnations(sites)]
    widths = [max(map(cell_len, column)) for column in zip(_WORK, *rows, strict=True)]
    head, *lines = (
        "  ".join(f"{cell}{' ' * (width - cell_len(cell))}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (_WORK, *rows)
    )
    return head, lines


def _work(site: Folded, head_version: int) -> list[Text]:
    status = site.newest
    has_none = status.policy_version < 0
    # Its clock is read after the site's last call, so a little less than nothing is now.
    seen = "never" if status.last_seen_s <= NEVER_S else f"{max(status.last_seen_s, 0.0):.0f} s ago"
    # Names come from other machines: text, never markup.
    return [
        Text(cell)
        for cell in (
            status.site,
            "none yet" if has_none else str(status.policy_version),
            "-" if has_none else str(head_version - status.policy_version),
            str(status.groups_accepted),
            str(status.groups_dropped),
            f"{status.tokens_per_s:.0f}",
            f"{status.work_leased} ({status.work_away} away)" if status.work_away else str(status.work_leased),
            seen,
        )
    ]


def _state(site: Folded) -> list[Text]:
    status = site.newest
    return [
        Text(cell)
        for cell in (
            status.flavour or "-",
            str(site.starts),
            _canary(status),
            str(status.groups_failed),
            str(status.groups_refused),
            f"{status.apply_s:.3g} s" if status.apply_s else "-",
            f"{status.quota_used:.0%}",
        )
    ]


def _canary(site: SiteStatus) -> str:
    if site.quarantine:
        return "QUARANTINE"
    return "-" if site.canary_difference is None else f"{site.canary_difference:.2g} nats"
