"""A run that is going on, as its coordinator tells an operator; its store is the coordinator's alone."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path

from heterorl.common.api import OperatorApi
from heterorl.common.errors import OperatorError, RemoteError
from heterorl.common.types.common import StepReport
from heterorl.common.types.evaluation import Evaluation
from heterorl.common.types.run import fold_incarnations
from heterorl.report.files import read_journal
from heterorl.report.past_run import PastRun, SiteTotals, newer_facts

STEPS_A_CALL = 1000


async def ask_run(api: OperatorApi, *, address: str, journal: Path | None = None) -> PastRun:
    """Ask a running coordinator; a learner's state_dir adds versions, accuracies and configuration.

    Raises:
        HeterorlError: the coordinator refuses or cannot be reached.
        OperatorError: nothing was trained yet.
    """
    status = await api.get_status()
    reports: list[StepReport] = []
    while True:
        newest = await api.list_steps(after_step=reports[-1].step if reports else -1, limit=STEPS_A_CALL)
        reports += newest
        if len(newest) < STEPS_A_CALL:
            break
    if not any(report.is_applied for report in reports):
        raise OperatorError(f"{address}: the run took no step", action="there is nothing to draw yet")
    known: list[Evaluation] = []
    with contextlib.suppress(RemoteError):
        # A coordinator of an earlier release has none.
        while page := await api.list_evaluations(after_version=known[-1].version if known else -1):
            known += page
    by_step = {report.step: report for report in reports}
    sites = tuple(
        SiteTotals(
            site=site.newest.site,
            engines=(),
            accepted=site.newest.groups_accepted,
            dropped=site.newest.groups_dropped,
            incarnations=site.starts,
        )
        for site in fold_incarnations(status.sites)
    )
    own = None if journal is None else read_journal(journal)
    run = PastRun(
        run_id=status.run_id,
        sources=(Path(address),),
        reports=tuple(by_step[step] for step in sorted(by_step)),
        versions=(),
        ledger=status.ledger,
        sites=sites,
        facts=status.facts,
        is_live=True,
        sets=tuple(known),
    )
    if own is None or journal is None:
        return run
    return dataclasses.replace(
        run,
        sources=(*run.sources, journal),
        reports=own.reports or run.reports,
        versions=own.versions,
        evaluations=own.evaluations,
        config=own.config,
        facts=newer_facts(run.facts, own.facts),
    )
