"""New step reports and evaluations of a run for one tracker: each once, in order, also over rollbacks.

ListSteps has a cursor of steps, and a rollback repeats steps under new versions, so new reports may lie behind the
cursor. Abandoned reports are not listed. While the tracker's newest report is listed, new ones come after its step;
otherwise the whole list is read.

An evaluation in progress holds back later ones of its set, so that the newest version of a set says what a tracker has.
"""

from __future__ import annotations

from collections.abc import Mapping

from heterorl.common.api import OperatorApi
from heterorl.common.errors import RemoteError, Unreachable
from heterorl.common.evaluation.summary import UNDER_WAY
from heterorl.common.types.common import StepReport
from heterorl.common.types.evaluation import Evaluation, EvaluationState
from heterorl.track.tracker import Mark, mark_of

STEPS_A_CALL = 1000
_BEGINNING = -1
PAGE = 1000


class StepFeed:
    """Step reports after `after`."""

    def __init__(self, api: OperatorApi, *, after: Mark | None) -> None:
        self._api = api
        self._mark = after
        self._head: int | None = None

    async def read(self, head: int) -> tuple[StepReport, ...]:
        """New reports of versions up to `head`, taken from a status before this call, so that none can appear behind
        it.

        Raises:
            HeterorlError: the coordinator refuses or cannot be reached; the next call reads the same.
        """
        if head == self._head:
            return ()
        mark = self._mark
        reports = await self._list(_BEGINNING if mark is None else mark.step - 1)
        if mark is not None and mark not in map(mark_of, reports):
            reports = await self._list(_BEGINNING)
        found = [report for report in reports if report.version <= head and (mark is None or mark_of(report) > mark)]
        new = tuple(sorted(found, key=mark_of))
        self._head = head
        if new:
            self._mark = mark_of(new[-1])
        return new

    async def _list(self, cursor: int) -> list[StepReport]:
        reports: list[StepReport] = []
        while True:
            page = await self._api.list_steps(after_step=cursor, limit=STEPS_A_CALL)
            if len(page) < STEPS_A_CALL:
                return [*reports, *page]
            # A step may have several versions and the cursor counts steps: the last step is read again.
            whole = [report for report in page if report.step < page[-1].step] or list(page)
            reports += whole
            cursor = whole[-1].step


class EvaluationFeed:
    """Evaluations after `after`, which maps sets to versions."""

    def __init__(self, api: OperatorApi, *, after: Mapping[str, int]) -> None:
        self._api = api
        self._marks = dict(after)
        self._cursor = -1
        self.is_waiting = False
        """Whether a site was drawing an evaluation at the last reading."""

    async def read(self) -> tuple[Evaluation, ...]:
        """New evaluations that have ended.

        Raises:
            HeterorlError: the coordinator cannot be reached; the next call reads the same.
        """
        listed = await self._list()
        new: list[Evaluation] = []
        held: set[str] = set()
        for found in sorted(listed, key=lambda found: (found.version, found.task_set)):
            if found.state in UNDER_WAY:
                held.add(found.task_set)
            elif found.task_set not in held and found.version > self._marks.get(found.task_set, -1):
                new.append(found)
        self.is_waiting = any(found.state is EvaluationState.RUNNING for found in listed)
        self._marks |= {found.task_set: found.version for found in new}
        versions = [found.version for found in listed]
        changing = [found.version for found in listed if found.state in UNDER_WAY]
        self._cursor = min(changing, default=max(versions, default=self._cursor + 1)) - 1
        return tuple(new)

    async def _list(self) -> list[Evaluation]:
        found: list[Evaluation] = []
        cursor = self._cursor
        while True:
            try:
                page = await self._api.list_evaluations(after_version=cursor, limit=PAGE)
            except Unreachable:
                raise
            except RemoteError:
                # A coordinator of an earlier release has none.
                return []
            if not page:
                return found
            found += page
            cursor = page[-1].version
