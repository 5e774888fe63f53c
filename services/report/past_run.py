"""A run for a report: store and journals, or the coordinator's answers.

Files are never changed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from heterorl.common.api import OperatorApi, every_evaluation, every_step
from heterorl.common.errors import CorruptStore, OperatorError
from heterorl.common.process.files import BAD_ROW, journal_rows
from heterorl.common.types.common import StepReport, value_of_row
from heterorl.common.types.evaluation import Evaluation
from heterorl.common.types.run import (
    EVALUATIONS_FILE,
    RUN_FILE,
    STEPS_FILE,
    VERSIONS_FILE,
    LedgerCounts,
    facts_of,
    fold_incarnations,
    with_changes,
)
from heterorl.coordinator.evaluation_jobs import listed
from heterorl.coordinator.groups import ledger
from heterorl.coordinator.offline.history import BACKUPS, STORE_FILE, is_in_use, open_store
from heterorl.coordinator.status_report import FACTS, list_steps
from heterorl.coordinator.store.database import get_meta


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SiteTotals:
    """One site over the whole run: groups by outcome."""

    site: str
    engines: tuple[str, ...] = ()
    accepted: int
    dropped: int
    state_dirs: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PastRun:
    """A run from its files; missing ones leave None or empty fields.

    `reports` are all steps in order, applied or not; `versions` rows have `version`, `bytes`, `full_bytes`; `published`
    are (version, seconds since the epoch).
    """

    run_id: str
    sources: tuple[Path, ...]
    reports: tuple[StepReport, ...]
    versions: tuple[Mapping[str, Any], ...]
    evaluations: tuple[Mapping[str, Any], ...] = ()
    published: tuple[tuple[int, float], ...] = ()
    num_abandoned: int = 0
    ledger: LedgerCounts | None = None
    sites: tuple[SiteTotals, ...] = ()
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """The learner's run.json: `heterorl_version` and `config`."""
    facts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    is_live: bool = False
    """Whether the run was still going."""
    sets: tuple[Evaluation, ...] = ()
    """Evaluations by samplers, by version and set."""


_ALL = 1 << 40
DEPTH = 4
"""Levels of directories searched below the named one."""


class InUse(OperatorError):
    """A coordinator runs on the store; `journal` is the learner's directory."""

    def __init__(self, store: Path, journal: Path | None) -> None:
        self.journal = journal
        try:
            self.address = (store / "address").read_text(encoding="ascii")[:300].strip()
        except OSError:
            self.address = ""
        command = f"heterorl report {self.address or 'HOST:PORT'} --credentials DIR"
        action = f"{command}, or with --insecure if the run has no certificates, asks the running coordinator"
        super().__init__(f"{store / STORE_FILE} is in use", action=action)


def _places(directory: Path, depth: int = 0) -> Iterator[Path]:
    """A directory and its subdirectories to DEPTH.
    Hidden ones, links and a run's own backups are left out."""
    yield directory
    if depth < DEPTH:
        has_run = (directory / STORE_FILE).is_file()
        for path in sorted(directory.iterdir()):
            if path.is_dir() and not path.is_symlink() and not path.name.startswith("."):
                if has_run and path.name == BACKUPS:
                    continue
                with contextlib.suppress(PermissionError):
                    yield from _places(path, depth + 1)


def read_run(directory: Path) -> PastRun:
    """Read a data_dir, a state_dir, or a directory that holds them.

    Raises InUse if a coordinator runs on it, CorruptStore for an unreadable file, and OperatorError if it is not a
    run's, holds several runs, or has no step.
    """
    if not directory.is_dir():
        raise OperatorError(f"{directory} is not a directory", action="give a coordinator's data_dir")
    places = list(_places(directory))
    stores = [place for place in places if (place / STORE_FILE).is_file()]
    learners = [place for place in places if (place / STEPS_FILE).is_file()]
    for found in (stores, learners):
        if len(found) > 1:
            names = ", ".join(str(place) for place in found)
            raise OperatorError(f"{directory} holds several runs: {names}", action="give one of them")
    if not stores and not learners:
        problem = f"{directory} has no run: neither it nor a directory below it has {STORE_FILE} or {STEPS_FILE}"
        action = "give a coordinator's data_dir, a learner's state_dir, or a directory that holds them"
        raise OperatorError(problem, action=action)
    journal = learners[0] if learners else None
    if stores and is_in_use(stores[0]):
        raise InUse(stores[0], journal)
    run = _from_store(stores[0], journal) if stores else _from_journal(learners[0])
    if not any(report.is_applied for report in run.reports):
        raise OperatorError(f"{directory}: the run took no step yet", action="run the report after the first step")
    return run


def _from_store(directory: Path, journal: Path | None) -> PastRun:
    with open_store(directory) as connection:
        run_id = get_meta(connection, "run_id") or ""
        rows = connection.execute(
            "SELECT version, bytes_last, bytes_full, published, is_abandoned FROM versions ORDER BY version"
        ).fetchall()
        reports = _newest(list_steps(connection, -1, _ALL))
        sites = connection.execute(
            "SELECT site, group_concat(DISTINCT engine), sum(accepted), sum(dropped), count(*) FROM sites "
            "GROUP BY site ORDER BY site"
        ).fetchall()
        counts = ledger.counts(connection)
        sets = tuple(each.evaluation() for each in listed(connection, limit=_ALL))
        facts = json.loads(get_meta(connection, FACTS) or "{}")
    run = PastRun(
        run_id=run_id,
        sources=(directory,),
        reports=reports,
        versions=tuple({"version": row[0], "bytes": row[1], "full_bytes": row[2]} for row in rows),
        facts=facts,
        published=tuple((row[0], row[3]) for row in rows),
        num_abandoned=sum(row[4] for row in rows),
        ledger=counts,
        sets=sets,
        sites=tuple(
            SiteTotals(
                site=site, engines=tuple(sorted(engines.split(","))), accepted=taken, dropped=lost, state_dirs=count
            )
            for site, engines, taken, lost, count in sites
        ),
    )
    return _with_journal(run, journal)


def _with_journal(run: PastRun, journal: Path | None) -> PastRun:
    """A run with what only the learner's journal has.
    An example is steps that were not applied."""
    if journal is None:
        return run
    own = _from_journal(journal)
    return dataclasses.replace(
        run,
        sources=(*run.sources, journal),
        # If a step has two rows, the newer version's stays. A learner that adopted the run lacks the steps before.
        reports=_newest([*run.reports, *own.reports]),
        versions=run.versions or own.versions,
        evaluations=own.evaluations,
        config=own.config,
        # The directory's, if any, with the changes that the coordinator knows.
        facts=with_changes(run.facts, own.facts or run.facts, words="", step=0),
    )


def _from_journal(directory: Path) -> PastRun:
    try:
        reports = [value_of_row(StepReport, row) for row in journal_rows(directory / STEPS_FILE)]
        versions = {
            int(row["version"]): {name: int(row[name]) for name in ("version", "bytes", "full_bytes")}
            for row in journal_rows(directory / VERSIONS_FILE)
        }
        evaluations = {
            int(row["version"]): row | {"accuracy": None if row["accuracy"] is None else float(row["accuracy"])}
            for row in journal_rows(directory / EVALUATIONS_FILE)
        }
        path = directory / RUN_FILE
        config = dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}
    except BAD_ROW as error:
        raise CorruptStore(f"{directory}: a journal has a bad row: {error}") from error
    return PastRun(
        run_id="",
        sources=(directory,),
        reports=_newest(reports),
        versions=tuple(versions[number] for number in sorted(versions)),
        evaluations=tuple(evaluations[number] for number in sorted(evaluations)),
        config=config,
        facts=facts_of(config),
    )


def _newest(reports: Sequence[StepReport]) -> tuple[StepReport, ...]:
    """Each step's last applied and last unapplied report, in order.
    Steps above the newest version's belong to abandoned versions; they are left out."""
    ordered = sorted(reports, key=lambda report: report.version)
    found = {(report.step, report.is_applied): report for report in ordered}
    _, last = max(((one.version, one.step) for one in found.values() if one.is_applied), default=(0, 0))
    return tuple(found[key] for key in sorted(found) if found[key].step <= last or not found[key].is_applied)


async def ask_run(api: OperatorApi, *, address: str, journal: Path | None = None) -> PastRun:
    """Ask a running coordinator; a learner's state_dir adds versions, accuracies and configuration.

    Raises HeterorlError if the coordinator refuses or is unreachable, OperatorError before the first step.
    """
    status = await api.get_status()
    reports = await every_step(api)
    if not any(report.is_applied for report in reports):
        raise OperatorError(f"{address}: the run took no step yet", action="run the report after the first step")
    known = await every_evaluation(api)
    sites = tuple(
        SiteTotals(
            site=site.newest.site,
            accepted=site.newest.groups_accepted,
            dropped=site.newest.groups_dropped,
            state_dirs=site.state_dirs,
        )
        for site in fold_incarnations(status.sites)
    )
    run = PastRun(
        run_id=status.run_id,
        sources=(Path(address),),
        reports=_newest(reports),
        versions=(),
        ledger=status.ledger,
        sites=sites,
        facts=status.facts,
        is_live=not status.has_ended,
        sets=tuple(known),
    )
    return _with_journal(run, journal)
