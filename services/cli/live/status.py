"""The state of a run for people (tables) and programs (JSON)."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

from rich.table import Table
from rich.text import Text

from heterorl.cli.live.curves import progress_words, report_rows
from heterorl.cli.live.sites import site_tables
from heterorl.common.types.common import StepReport
from heterorl.common.types.run import RunStatus, describe_standstill, fold_incarnations, quarantined_sites, steps_wanted

STANDS_STILL = "STANDS STILL"


def plain(value: Any) -> Any:
    """A domain value as plain JSON values."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {plain(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, tuple | list):
        return [plain(entry) for entry in value]
    return value.value if isinstance(value, enum.Enum) else value


def status_json(status: RunStatus) -> dict[str, Any]:
    """A run's state as plain JSON values; enum keys become their values."""
    result: dict[str, Any] = plain(status)
    result["ledger"]["is_balanced"] = status.ledger.is_balanced
    result["standstill"] = describe_standstill(quarantined_sites(status))
    return result


def status_tables(status: RunStatus, *, width: int, accuracy: float | None = None) -> tuple[Table, ...]:
    """A run's state as tables, the run and then its sites, for a screen of `width` characters.

    `accuracy` is the newest held-out one, where it is known.
    """
    run = Table(title=Text(f"run {status.run_id}"), show_header=False)
    for name, value in status_rows(status, accuracy=accuracy):
        # Names come from other machines: text, never markup.
        style = "bold red" if name == STANDS_STILL else ""
        run.add_row(Text(name, style=style), Text(value, style=style))
    return run, *site_tables(status.sites, head_version=status.head_version, width=width)


def status_rows(status: RunStatus, *, accuracy: float | None = None) -> list[tuple[str, str]]:
    """A run's state as names and values, what needs a person first."""
    ledger = status.ledger
    dropped = ", ".join(f"{reason.value} {count}" for reason, count in ledger.dropped.items() if count) or "none"
    rows = [
        ("version", _version(status)),
        ("learner", f"{status.learner or 'none'} (epoch {status.epoch})"),
        ("weights", _weights(status)),
        ("changed", f"{status.changed_fraction:.2%} of the elements"),
        ("encode", f"{status.encode_s:.3g} s" if status.encode_s else "-"),
        ("store", _store(status)),
        ("queue", f"{ledger.pending} pending, {ledger.leased} leased"),
        ("trained", f"{ledger.consumed} groups"),
        ("dropped", dropped),
        *_closed(status),
        *_prompts(status),
        ("ledger", "balanced" if ledger.is_balanced else f"BROKEN: {ledger}"),
        ("uptime", f"{status.uptime_s:.0f} s" + (", draining" if status.is_draining else "")),
    ]
    report = status.last_report
    if report is not None:
        rows.insert(1, ("step", _step(report, accuracy, steps_wanted(status.facts))))
        if report.sources:
            rows.insert(2, ("sources", _sources(report)))
        rows.insert(2, ("staleness", f"{report.staleness_mean:.1f} mean, {report.staleness_max} max"))
        rows[3:3] = report_rows(report)
    if status.progress is not None:
        rows.insert(1, ("now", progress_words(status.progress, status.progress_age_s)))
    if status.rollback_to >= 0:
        rows.insert(1, ("ordered", f"back to version {status.rollback_to}; not carried out yet"))
    if status.store_problem:
        rows.insert(1, ("DISK FULL", status.store_problem))
    for form in status.flavours:
        sizes = _sizes(form.full_bytes, delta=form.delta_bytes, full=form.snapshot_bytes)
        rows.append((f"flavour {form.flavour}", f"{sizes}, {form.changed_fraction:.2%} changed"))
    stands_still = describe_standstill(quarantined_sites(status))
    if stands_still:
        rows.insert(0, (STANDS_STILL, stands_still))
    for site in [entry.newest for entry in fold_incarnations(status.sites)]:
        if site.quarantine:
            rows.append((f"quarantine of {site.site}", site.quarantine))
        if site.problem:
            rows.append((f"problem of {site.site}", site.problem))
    return rows


def _version(status: RunStatus) -> str:
    if status.head_version < 0:
        return "none yet: a learner publishes version 0 when its model is loaded"
    return f"{status.head_version}, {'signed' if status.is_head_signed else 'unsigned'}"


def _closed(status: RunStatus) -> list[tuple[str, str]]:
    """Assignments whose rows gave no group, where there are some."""
    closed = status.ledger.closed
    words = ", ".join(f"{reason.value} {count}" for reason, count in closed.items() if count)
    return [("closed", f"{words} (assignments without a group; the coordinator's log names the prompts)")] * bool(words)


def _prompts(status: RunStatus) -> list[tuple[str, str]]:
    """Prompts by difficulty, where the coordinator keeps a window."""
    found = status.prompts
    if found is None:
        return []
    return [
        (
            "prompts",
            f"{found.in_window} in the window, {found.too_easy} too easy, {found.too_hard} too hard,"
            f" {found.unseen} unseen; {found.passed_over} assignments passed over",
        )
    ]


def _step(report: StepReport, accuracy: float | None, wanted: int) -> str:
    scored = "" if accuracy is None else f", held-out reward {accuracy:.3f}"
    number = f"{report.step} of {wanted}" if wanted else str(report.step)
    return f"{number}: reward {report.reward_mean:.3f}, KL {report.kl:.3f}{scored}"


def _sources(report: StepReport) -> str:
    """Share of the step's groups and mean reward of each source of a mixture."""
    total = sum(source.num_groups for source in report.sources)
    return ", ".join(
        f"{source.label} {source.num_groups / total:.0%}, reward {source.reward_mean:.3f}" for source in report.sources
    )


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
