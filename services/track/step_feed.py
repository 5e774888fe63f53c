"""What a run published since a tracker's newest: each report and each evaluation once, in order, over rollbacks too.

ListSteps has a cursor of steps, and a rollback takes steps again under new versions: reports behind the cursor may be
new. What a rollback abandons is no longer listed. While the mark itself is, everything new is behind its step; where
it is not, the list is read from its beginning.

An evaluation that has not ended holds back the later ones of its set, so that the newest version of a set says what a
tracker has.
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
    """The reports behind `after`, for one tracker."""

    def __init__(self, api: OperatorApi, *, after: Mark | None) -> None:
        self._api = api
        self._mark = after
        self._head: int | None = None

    async def read(self, head: int) -> tuple[StepReport, ...]:
        """Reports of versions up to `head`, which a status asked before this call named; later ones are the next's.

        All of them were committed before the listing began, so none can come behind it.

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
            # A step may have several versions, and the cursor knows steps alone: the last one is read again, whole.
            whole = [report for report in page if report.step < page[-1].step] or list(page)
            reports += whole
            cursor = whole[-1].step


class EvaluationFeed:
    """The evaluations behind `after`, sets to versions, for one tracker."""

    def __init__(self, api: OperatorApi, *, after: Mapping[str, int]) -> None:
        self._api = api
        self._marks = dict(after)
        self._cursor = -1
        self.is_waiting = False
        """Whether one that a site has begun was under way at the last reading."""

    async def read(self) -> tuple[Evaluation, ...]:
        """Those that have ended by now.

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
                # A coordinator of an earlier release knows none.
                return []
            if not page:
                return found
            found += page
            cursor = page[-1].version
