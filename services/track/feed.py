"""What a run published since a mark: each report once, in the order of publication, over rollbacks too.

ListSteps has a cursor of steps, and a rollback takes steps again under new versions: reports behind the cursor may be
new. What a rollback abandons is no longer listed. While the mark itself is, everything new is behind its step; where
it is not, the list is read from its beginning.
"""

from __future__ import annotations

from heterorl.common.api import OperatorApi
from heterorl.common.types.common import StepReport
from heterorl.track.tracker import Mark, mark_of

STEPS_A_CALL = 1000
_BEGINNING = -1


class Feed:
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
