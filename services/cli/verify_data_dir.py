"""Offline checks of a coordinator's data_dir: `heterorl verify-lineage` and `heterorl audit`."""

from __future__ import annotations

import datetime
import functools
import re
from collections.abc import Sequence
from pathlib import Path

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from heterorl.common.errors import ConfigError
from heterorl.common.identity.signing import PUBLIC_KEY
from heterorl.common.process.config_file import PATTERNS
from heterorl.common.types.common import amount
from heterorl.common.types.policy import Manifest
from heterorl.coordinator.offline.history import History, open_store, read_histories
from heterorl.coordinator.offline.verify import (
    Check,
    Report,
    check_manifests,
    check_payloads,
    rebuildable,
    replay,
    with_offered,
)
from heterorl.coordinator.sites import audit
from heterorl.coordinator.sites.audit import AuditRow

SOUND, FAULTY = 0, 2
MAX_SHOWN = 50
"""Findings in the table; the verdict counts all of them."""


def verify_directory(directory: Path, *, keys: Sequence[str], is_replaying: bool, console: Console) -> int:
    """Check a data directory and print the findings; returns the exit code.

    Raises OperatorError if there is no store, it is in use, its payloads are in a bucket, or a key is not a public key;
    CorruptStore if it is unreadable.
    """
    for key in keys:
        if re.fullmatch(PUBLIC_KEY, key) is None:
            raise ConfigError("--key", f"{key!r} is not {PATTERNS[PUBLIC_KEY]}", action="copy its line")
    trained: dict[int, Manifest] | None = None
    is_sound = True
    with read_histories(directory) as histories:
        for history in histories:
            report = Report()
            manifests = check_manifests(history, keys=keys, report=report, trained=trained)
            if trained is None:
                trained = manifests
            _check_payloads(history, manifests, report, is_replaying=is_replaying, console=console)
            console.print(_checks(history, report, keys=keys, is_replaying=is_replaying))
            if report.findings:
                console.print(_findings(report))
            console.print(_verdict(history, manifests, report))
            is_sound = is_sound and report.is_sound
    return SOUND if is_sound else FAULTY


def _check_payloads(
    history: History, manifests: dict[int, Manifest], report: Report, *, is_replaying: bool, console: Console
) -> None:
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        for version, manifest in sorted(manifests.items()):
            if not manifest.payloads:
                report.find(Check.PAYLOADS, version, "names no payload that leads to it")
        kept = with_offered(history, manifests)
        total = sum(payload.num_bytes for manifest in kept.values() for payload in manifest.payloads)
        hashing = progress.add_task("hashing payloads", total=total)
        files = check_payloads(history, kept, report=report, advance=lambda n: progress.advance(hashing, n))
        if is_replaying:
            rebuilt = rebuildable(manifests, kept)
            total = sum(len(manifest.payloads) for manifest in rebuilt.values())
            rebuilding = progress.add_task("rebuilding states", total=total)
            advance = functools.partial(progress.advance, rebuilding)
            replay(history, rebuilt, files, report=report, advance=advance)


def _checks(history: History, report: Report, *, keys: Sequence[str], is_replaying: bool) -> Table:
    title = f"lineage, variant {history.variant}" if history.variant else "lineage"
    table = Table("check", "checked", "faults", title=title)
    skipped = {Check.SIGNATURES: "" if keys else "no --key given", Check.REPLAY: "" if is_replaying else "no --replay"}
    for check in Check:
        faults = sum(finding.check is check for finding in report.findings)
        if skipped.get(check):
            table.add_row(check.value, Text(skipped[check], style="yellow"), "-")
        else:
            table.add_row(
                check.value, str(report.checked.get(check, 0)), Text(str(faults), style="red" if faults else "")
            )
    return table


def _findings(report: Report) -> Table:
    table = Table("version", "check", "fault", title="faults")
    for finding in report.findings[:MAX_SHOWN]:
        table.add_row(str(finding.version), finding.check.value, Text(finding.problem))
    if len(report.findings) > MAX_SHOWN:
        table.add_row("...", "", f"{len(report.findings) - MAX_SHOWN} more")
    return table


def _verdict(history: History, manifests: dict[int, Manifest], report: Report) -> Text:
    variant = f" in variant {history.variant}" if history.variant else ""
    name = f"run {history.run_id}, {amount(report.checked.get(Check.MANIFESTS, 0), 'version')}{variant}"
    if not report.is_sound:
        return Text.assemble(("FAULTY", "bold red"), f": {name}, {amount(len(report.findings), 'fault')}")
    head = f", head {max(manifests)}" if manifests else "; none is published yet"
    return Text.assemble(("SOUND", "bold green"), f": {name}{head}")


def read_log(directory: Path) -> list[AuditRow]:
    """All rows of a data directory's audit log.
    Raises OperatorError without a free store, CorruptStore for damage."""
    with open_store(directory) as connection:
        return audit.read(connection)


def verify_log(directory: Path, *, expected: str) -> int:
    """Check every link and print the verdict; returns the exit code."""
    rows = read_log(directory)
    faults = audit.find_faults(rows, expected=expected)
    for fault in faults:
        typer.echo(f"fault: {fault}")
    newest = rows[-1].digest if rows else "none"
    verdict = "FAULTY" if faults else "SOUND"
    typer.echo(f"{verdict}: {amount(len(rows), 'row')}, {amount(len(faults), 'fault')}, newest digest {newest}")
    return FAULTY if faults else SOUND


def show_log(directory: Path, *, subject: str) -> None:
    """Print the rows, oldest first."""
    for row in read_log(directory):
        if subject in ("", row.subject):
            at = datetime.datetime.fromtimestamp(row.at_us / 1e6, tz=datetime.UTC).isoformat(timespec="seconds")
            typer.echo(f"{row.sequence} {at} {row.kind} {row.subject}: {row.detail}")
