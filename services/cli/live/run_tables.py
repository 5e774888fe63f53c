"""Tables, lines and JSON of a run: state, sites, evaluations, versions."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic_core import to_jsonable_python
from rich import box
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from heterorl.cli.live.step_curves import progress_words, report_rows
from heterorl.common.api import OperatorApi, every_evaluation, every_step
from heterorl.common.errors import RemoteError
from heterorl.common.evaluation.summary import HEADS, UNDER_WAY, evaluation_rows
from heterorl.common.types.common import SOURCE_STEPS, StepReport, amount, mean_of_sources
from heterorl.common.types.evaluation import Evaluation, EvaluationState
from heterorl.common.types.run import (
    NEVER_S,
    Folded,
    RunStatus,
    SiteStatus,
    describe_standstill,
    fold_incarnations,
    quarantined_sites,
    step_words,
    steps_wanted,
)
from heterorl.report.figures import newest_evaluated

STANDS_STILL = "STANDS STILL"


def status_json(status: RunStatus) -> dict[str, Any]:
    """A run's state as plain JSON values."""
    result: dict[str, Any] = to_jsonable_python(status)
    result["ledger"]["is_balanced"] = status.ledger.is_balanced
    result["standstill"] = describe_standstill(quarantined_sites(status))
    return result


def status_tables(status: RunStatus, *, reports: Sequence[StepReport] = ()) -> tuple[Table, ...]:
    """A run's tables: state, sites' work, details, sites' state.
    `reports` are its newest steps."""
    run, details = (
        Table(title=Text(title), show_header=False, box=None, pad_edge=False, padding=(0, 1, 0, 0))
        for title in (f"run {status.run_id}", "details")
    )
    for table, rows in ((run, status_rows(status, reports=reports)), (details, _detail_rows(status))):
        for name, value in rows:
            # Names come from other machines, so markup is off.
            style = "bold red" if name == STANDS_STILL else ""
            table.add_row(Text(name, style=style), Text(value, style=style))
    work, state = site_tables(status.sites, head_version=status.head_version)
    return run, work, details, state


def status_rows(status: RunStatus, *, reports: Sequence[StepReport] = ()) -> list[tuple[str, str]]:
    """Names and values for a small screen; problems come first."""
    ledger, report = status.ledger, status.last_report
    dropped = ", ".join(f"{reason.value} {count}" for reason, count in ledger.dropped.items() if count) or "none"
    rows = [*_problem_rows(status), ("version", _version(status))]
    if status.rollback_to >= 0:
        said = "the learner refused it, its log says why" if status.is_rollback_refused else "not done yet"
        rows.append(("ordered", f"rollback to version {status.rollback_to}; {said}"))
    progress = status.progress
    if progress is not None and not (report and _is_done(progress.step, report, head=status.head_version)):
        rows.append(("now", progress_words(progress, status.progress_age_s)))
    if report is not None:
        rows.append(("step", _step(report, newest_evaluated(reports), steps_wanted(status.facts))))
        if report.sources:
            rows.append(("sources", _sources(reports or (report,))))
    return [
        *rows,
        ("queue", f"{ledger.pending} pending, {ledger.leased} leased"),
        ("trained", amount(ledger.consumed, "group")),
        ("dropped", dropped),
        *_closed(status),
        *([("ledger", "balanced")] if ledger.is_balanced else []),
    ]


def _is_done(step: int, newest: StepReport, *, head: int) -> bool:
    """Whether a stated step is over; statements come with lease renewals.
    A head newer than the last step is a rollback's, from which steps are repeated."""
    return newest.version >= head and step <= newest.step


def _detail_rows(status: RunStatus) -> list[tuple[str, str]]:
    """Names and values that a small screen leaves out."""
    report = status.last_report
    rows = []
    if report is not None:
        rows.append(("staleness", f"{report.staleness_mean:.1f} mean, {report.staleness_max} max"))
        rows += report_rows(report)
    rows += [
        *_prompts(status),
        ("learner", f"{status.learner or 'none'} (epoch {status.epoch})"),
        ("weights", _sizes(status.bytes_full, delta=status.delta_bytes, full=status.snapshot_bytes)),
        ("changed", f"{status.changed_fraction:.2%} of the elements"),
        ("encode", f"{status.encode_s:.3g} s" if status.encode_s else "-"),
        ("store", _store(status)),
        ("uptime", f"{status.uptime_s:.0f} s" + (", draining" if status.is_draining else "")),
    ]
    for form in status.variants:
        sizes = _sizes(form.full_bytes, delta=form.delta_bytes, full=form.snapshot_bytes)
        rows.append((f"variant {form.variant}", f"{sizes}, {form.changed_fraction:.2%} changed"))
    return rows


def _problem_rows(status: RunStatus) -> list[tuple[str, str]]:
    """Problems that an operator solves, worst first."""
    rows = []
    stands_still = describe_standstill(quarantined_sites(status))
    if stands_still:
        rows.append((STANDS_STILL, stands_still))
    if status.store_problem:
        rows.append(("DISK FULL", status.store_problem))
    if not status.ledger.is_balanced:
        rows.append(("ledger", f"BROKEN: {status.ledger}"))
    for site in [entry.newest for entry in fold_incarnations(status.sites)]:
        if site.quarantine:
            rows.append((f"quarantine of {site.site}", site.quarantine))
        if site.problem:
            rows.append((f"problem of {site.site}", site.problem))
    return rows


def _version(status: RunStatus) -> str:
    if status.head_version < 0:
        return "none yet: the learner publishes version 0 after it loads its model"
    return f"{status.head_version}, {'signed' if status.is_head_signed else 'unsigned'}"


def _closed(status: RunStatus) -> list[tuple[str, str]]:
    closed = status.ledger.closed
    words = ", ".join(f"{reason.value} {count}" for reason, count in closed.items() if count)
    return [("closed", f"{words} (no group; see the coordinator's log)")] * bool(words)


def _prompts(status: RunStatus) -> list[tuple[str, str]]:
    """Prompts by difficulty, if the coordinator keeps a window."""
    found = status.prompts
    if found is None:
        return []
    return [
        (
            "prompts",
            f"{found.in_window} in the window, {found.too_easy} too easy, {found.too_hard} too hard,"
            f" {found.unseen} unseen; {amount(found.passed_over, 'assignment')} skipped",
        )
    ]


def _step(report: StepReport, evaluated: StepReport | None, wanted: int) -> str:
    # After a rollback it may be of a version that the run has left.
    scored = (
        f", held-out reward {evaluated.evaluation_accuracy:.3f} at version {evaluated.version}" if evaluated else ""
    )
    return f"{step_words(report.step, wanted)}: reward {report.reward_mean:.3f}, KL {report.kl:.3f}{scored}"


def _sources(reports: Sequence[StepReport]) -> str:
    """Share of groups and mean reward of each source, newest steps."""
    newest = reports[-SOURCE_STEPS:]
    found = mean_of_sources(newest)
    total = sum(source.num_groups for source in found)
    said = [f"{source.label} {source.num_groups / total:.0%}, reward {source.reward_mean:.3f}" for source in found]
    return f"{'; '.join(said)} ({amount(len(newest), 'step')})"


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
    used = f"{decimal(status.store_bytes)} of {decimal(status.store_limit_bytes)}"
    return f"{used}, {snapshot}, {decimal(status.reclaimed_bytes)} reclaimed"


_WORK = ("site", "version", "behind", "accepted", "dropped", "tokens/s", "leased", "seen")
_STATE = ("variant", "state\ndirs", "canary", "failed", "refused", "apply", "quota")


def site_tables(sites: Sequence[SiteStatus], *, head_version: int) -> tuple[Table, ...]:
    """Two tables of 80 characters, one line a site in each."""
    tables = [
        Table(*columns, title=title, box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
        for title, columns in (("sites: work", _WORK), ("sites: state", ("site", *_STATE)))
    ]
    for site in fold_incarnations(sites):
        # Names come from other machines, so markup is off.
        tables[0].add_row(*map(Text, _work(site, head_version)))
        tables[1].add_row(*map(Text, (site.newest.site, *_state(site))))
    return tuple(map(_uncut, tables))


def _work(site: Folded, head_version: int) -> tuple[str, ...]:
    status = site.newest
    has_none = status.policy_version < 0
    # The status clock is read after the site's last call, so a small negative age means now.
    seen = "never" if status.last_seen_s <= NEVER_S else f"{max(status.last_seen_s, 0.0):.0f} s ago"
    if status.is_stopped:
        seen = f"stopped {seen}"
    if status.is_revoked:
        seen = "revoked"
    return (
        status.site,
        "none yet" if has_none else str(status.policy_version),
        "-" if not 0 <= status.policy_version <= head_version else str(head_version - status.policy_version),
        str(status.groups_accepted),
        str(status.groups_dropped),
        f"{status.tokens_per_s:.0f}",
        f"{status.work_leased} ({status.work_away} away)" if status.work_away else str(status.work_leased),
        seen,
    )


def _state(site: Folded) -> tuple[str, ...]:
    status = site.newest
    return (
        status.variant or "-",
        str(site.state_dirs),
        _canary(status),
        str(status.groups_failed),
        str(status.groups_refused),
        f"{status.apply_s:.3g} s" if status.apply_s else "-",
        f"{status.quota_used:.0%}",
    )


def _canary(site: SiteStatus) -> str:
    if site.quarantine:
        return "QUARANTINE"
    return "-" if site.canary_difference is None else f"{site.canary_difference:.2g} nats"


Known = MutableMapping[tuple[int, str], Evaluation]
"""Evaluations by version and set."""


async def read_evaluations(api: OperatorApi, known: Known) -> None:
    """Ask for new and unfinished evaluations; without an answer known ones stay."""
    changing = [version for (version, _), found in known.items() if found.state in UNDER_WAY]
    after = min(changing, default=max((version for version, _ in known), default=0)) - 1
    with contextlib.suppress(RemoteError):
        listed = await every_evaluation(api, after=after)
        for key in [key for key in known if key[0] > after]:
            # A newer version may have replaced an evaluation that had not begun.
            del known[key]
        known.update({(found.version, found.task_set): found for found in listed})


def evaluation_tables(evaluations: Iterable[Evaluation]) -> tuple[Table, ...]:
    """A table of `evaluation_rows`; none without evaluations."""
    rows = evaluation_rows(evaluations)
    if not rows:
        return ()
    table = Table(*HEADS, title="evaluation")
    for row in rows:
        table.add_row(*map(Text, row))
    return (_uncut(table),)


def _uncut(table: Table) -> Table:
    """Break cells of a wide table over lines instead of cutting them."""
    for column in table.columns:
        column.overflow = "fold"
    return table


LEARNER = "held out, by the learner"


@dataclass(slots=True, kw_only=True)
class Restorable:
    """One version; `held_out` maps each evaluated set to its mean reward."""

    version: int
    reward: float | None = None
    """Mean reward of the step that made it."""
    held_out: dict[str, float] = field(default_factory=dict)


async def read_versions(api: OperatorApi) -> tuple[Restorable, ...]:
    """Ask for versions to roll back to and their results, newest last."""
    found = {version: Restorable(version=version) for version in await api.list_restorable()}
    for report in await every_step(api):
        if report.version in found and report.is_applied:
            found[report.version].reward = report.reward_mean
            if report.evaluation_accuracy is not None and math.isfinite(report.evaluation_accuracy):
                found[report.version].held_out[LEARNER] = report.evaluation_accuracy
    known: Known = {}
    await read_evaluations(api, known)
    for (version, name), each in known.items():
        if version in found and each.state is EvaluationState.DONE and each.summary.average is not None:
            found[version].held_out[name] = each.summary.average.mean
    return tuple(sorted(found.values(), key=lambda each: each.version))


def versions_table(versions: Sequence[Restorable]) -> Table:
    """One line for each version; marks the best of each set."""
    names = sorted({name for each in versions for name in each.held_out}, key=lambda name: (name != LEARNER, name))
    best = {name: max(each.held_out.get(name, -math.inf) for each in versions) for name in names}
    table = Table("version", "reward of its step", title="versions to go back to")
    for name in names:
        table.add_column(Text(name))
    for each in versions:
        cells = [_cell(each.held_out.get(name), best=best[name]) for name in names]
        table.add_row(str(each.version), _cell(each.reward, best=None), *cells)
    return table


def _cell(value: float | None, *, best: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.3f} best" if value == best else f"{value:.3f}"
