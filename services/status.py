"""The state of a run for people (tables) and programs (JSON)."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from services.common.standstill import describe, quarantined_sites
from services.common.types import RunStatus, SiteStatus

_COLUMNS = (
    "site",
    "flavour",
    "version",
    "behind",
    "accepted",
    "dropped",
    "tokens/s",
    "leased",
    "canary",
    "failed",
    "apply",
    "quota",
    "seen",
    "refused",
)


def status_json(status: RunStatus) -> dict[str, Any]:
    """A run's state as plain JSON values; enum keys become their values."""

    def plain(value: Any) -> Any:
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
        if isinstance(value, dict):
            return {plain(key): plain(entry) for key, entry in value.items()}
        if isinstance(value, tuple | list):
            return [plain(entry) for entry in value]
        return value.value if isinstance(value, enum.Enum) else value

    result: dict[str, Any] = plain(status)
    result["ledger"]["is_balanced"] = status.ledger.is_balanced
    result["standstill"] = describe(quarantined_sites(status))
    return result


def status_tables(status: RunStatus, *, width: int) -> tuple[Table, Table]:
    """A run's state as two tables, the run and its sites, for a screen of `width` characters."""
    run = Table(title=Text(f"run {status.run_id}"), show_header=False)
    ledger = status.ledger
    dropped = ", ".join(f"{reason.value} {count}" for reason, count in ledger.dropped.items() if count) or "none"
    rows = [
        ("version", f"{status.head_version}, {'signed' if status.is_head_signed else 'unsigned'}"),
        ("learner", f"{status.learner or 'none'} (epoch {status.epoch})"),
        ("weights", _weights(status)),
        ("changed", f"{status.changed_fraction:.2%} of the elements"),
        ("encode", f"{status.encode_s:.3g} s" if status.encode_s else "-"),
        ("store", _store(status)),
        ("queue", f"{ledger.pending} pending, {ledger.leased} leased"),
        ("trained", f"{ledger.consumed} groups"),
        ("dropped", dropped),
        ("ledger", "balanced" if ledger.is_balanced else f"BROKEN: {ledger}"),
        ("uptime", f"{status.uptime_s:.0f} s" + (", draining" if status.is_draining else "")),
    ]
    report = status.last_report
    if report is not None:
        rows.insert(1, ("step", f"{report.step}: reward {report.reward_mean:.3f}, KL {report.kl:.3f}"))
        rows.insert(2, ("staleness", f"{report.staleness_mean:.1f} mean, {report.staleness_max} max"))
    if status.rollback_to >= 0:
        rows.insert(1, ("ordered", f"back to version {status.rollback_to}; not carried out yet"))
    for form in status.flavours:
        sizes = _sizes(form.full_bytes, delta=form.delta_bytes, full=form.snapshot_bytes)
        rows.append((f"flavour {form.flavour}", f"{sizes}, {form.changed_fraction:.2%} changed"))
    stands_still = describe(quarantined_sites(status))
    if stands_still:
        run.add_row(Text("STANDS STILL", style="bold red"), Text(stands_still, style="bold red"))
    for row in rows:
        # Names come from other machines: text, never markup.
        run.add_row(*map(Text, row))
    for site in status.sites:
        if site.quarantine:
            run.add_row(Text(f"quarantine of {site.site}"), Text(site.quarantine))
    return run, _site_table(status, width=width)


def _site_table(status: RunStatus, *, width: int) -> Table:
    """One line a site where all columns fit, and otherwise two: half of the columns under the other half."""
    flat = Table(*_COLUMNS, title="sites")
    cells = [_cells(site, head_version=status.head_version) for site in status.sites]
    for row in cells:
        flat.add_row(*row)
    if Console(width=1000, markup=False).measure(flat).maximum <= width:
        return flat
    stacked = Table(title="sites", box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    for heading in _pairs(_COLUMNS):
        stacked.add_column(heading)
    for row in cells:
        stacked.add_row(*_pairs(row))
    return stacked


def _pairs(cells: Sequence[str | Text]) -> list[Text]:
    return [Text("\n").join([Text(str(cell)) for cell in cells[at : at + 2]]) for at in range(0, len(cells), 2)]


def _cells(site: SiteStatus, *, head_version: int) -> list[Text]:
    # Names come from other machines: text, never markup.
    return [
        Text(cell)
        for cell in (
            site.site,
            site.flavour or "-",
            str(site.policy_version),
            str(head_version - site.policy_version),
            str(site.groups_accepted),
            str(site.groups_dropped),
            f"{site.tokens_per_s:.0f}",
            str(site.work_leased),
            _canary(site),
            str(site.groups_failed),
            f"{site.apply_s:.3g} s" if site.apply_s else "-",
            f"{site.quota_used:.0%}",
            # Its clock is read after the site's last call, so a little less than nothing is now, and -1 is not yet.
            "never" if site.last_seen_s <= -1.0 else f"{max(site.last_seen_s, 0.0):.0f} s ago",
            str(site.groups_refused),
        )
    ]


def _canary(site: SiteStatus) -> str:
    if site.quarantine:
        return "QUARANTINE"
    return "-" if site.canary_difference is None else f"{site.canary_difference:.2g} nats"


def _weights(status: RunStatus) -> str:
    """The payloads of the newest version beside the size of the weights."""
    return _sizes(status.bytes_full, delta=status.delta_bytes, full=status.snapshot_bytes)


def _sizes(full_bytes: int, **payloads: int) -> str:
    parts = [
        f"{name} {num_bytes:,} bytes ({full_bytes / num_bytes:.1f}x)"
        for name, num_bytes in payloads.items()
        if num_bytes
    ]
    return f"{full_bytes:,} bytes; {', '.join(parts) or 'no payload'}"


def _store(status: RunStatus) -> str:
    snapshot = "no verified snapshot"
    if status.snapshot_version >= 0:
        snapshot = f"snapshot of version {status.snapshot_version}, {status.snapshot_age_s:.0f} s old"
    used = f"{_rounded(status.store_bytes)} of {_rounded(status.store_limit_bytes)}"
    return f"{used}, {snapshot}, {_rounded(status.reclaimed_bytes)} reclaimed"


def _rounded(num_bytes: float) -> str:
    for unit in ("bytes", "KB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} TB"
