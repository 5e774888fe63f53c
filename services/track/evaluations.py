"""The evaluations that a run finished since a tracker's newest: each once, by set in the order of versions.

One that has not ended holds back the later ones of its set, so that the newest version of a set says
what a tracker has.
"""

from __future__ import annotations

from collections.abc import Mapping

from heterorl.common.api import OperatorApi
from heterorl.common.errors import RemoteError, Unreachable
from heterorl.common.evaluation.rows import UNDER_WAY
from heterorl.common.types.evaluation import Evaluation, EvaluationState

PAGE = 1000


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
