"""What a run published since a mark: each report once, in the order of publication, over rollbacks too.

ListSteps has a cursor of steps, and a rollback takes steps again under new versions: reports behind the cursor may be
new. So the feed goes on from its cursor only while steps and versions follow one another without a gap, and reads the
list from its beginning where they do not.
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
        new = None
        if self._head is not None and self._mark is not None:
            new = self._new(await self._list(self._mark.step), head)
            if not self._follows(new, self._head, head, self._mark.step):
                new = None
        if new is None:
            new = self._new(await self._list(_BEGINNING), head)
        self._head = head
        if new:
            self._mark = mark_of(new[-1])
        return new

    def _new(self, reports: list[StepReport], head: int) -> tuple[StepReport, ...]:
        found = [r for r in reports if r.version <= head and (self._mark is None or mark_of(r) > self._mark)]
        return tuple(sorted(found, key=mark_of))

    @staticmethod
    def _follows(new: tuple[StepReport, ...], known: int, head: int, step: int) -> bool:
        versions = {report.version for report in new}
        steps = [report.step for report in new]
        return versions == set(range(known + 1, head + 1)) and steps == list(range(step + 1, step + 1 + len(new)))

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
