"""Following a run until it ends: each tracker gets what it lacks, whatever was cut meanwhile.

Guarantees: nothing is sent to a tracker before it was asked what it has, so that nothing is there twice and nothing is
missing; the run is only read. One tracker that fails does not hold up the others. What a tracker has not is asked from
the coordinator, nothing is kept here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

from heterorl.common.api import OperatorApi
from heterorl.common.errors import OperatorError, Unreachable
from heterorl.common.process.clock import Clock
from heterorl.common.types.run import RunStatus
from heterorl.track.feed import Feed
from heterorl.track.tracker import Tracker, mark_of

_LOG = logging.getLogger(__name__)
_AT_ONCE = 500
"""Reports in one write."""

Open = Callable[[RunStatus], Tracker]
"""Opens the run in a tracker; Unreachable where it does not answer."""


async def follow(api: OperatorApi, opens: Mapping[str, Open], *, every_s: float, is_once: bool, clock: Clock) -> None:
    """Write a run's reports into trackers, by name, until the run has ended, or what there is with `is_once`.

    Raises:
        OperatorError: a tracker's run is of another history than the coordinator's.
        Unreachable: only with `is_once`; otherwise what does not answer is asked again after `every_s`.
        HeterorlError: the coordinator refuses.
    """
    slots = [_Slot(name, open_, api) for name, open_ in opens.items()]
    run_id = ""
    try:
        while True:
            try:
                status = await api.get_status()
                if run_id and status.run_id != run_id:
                    raise OperatorError(f"the coordinator now serves run {status.run_id}, not {run_id}")
                run_id = status.run_id
                all_have = True
                for slot in slots:
                    all_have &= await _write(slot, status, is_once=is_once)
                if is_once or (all_have and has_ended(status)):
                    return
            except Unreachable as error:
                if is_once:
                    raise
                _LOG.warning("%s", error)
            await clock.sleep(every_s)
    finally:
        for slot in slots:
            await slot.close()


def has_ended(status: RunStatus) -> bool:
    """Whether a run's learner ordered it to end and has gone; one that comes back begins it again."""
    return status.is_draining and not status.learner


class _Slot:
    """One tracker, open or not."""

    def __init__(self, name: str, open_: Open, api: OperatorApi) -> None:
        self.name, self._open, self._api = name, open_, api
        self._tracker: Tracker | None = None
        self._feed: Feed | None = None

    async def write(self, status: RunStatus) -> None:
        if self._tracker is None or self._feed is None:
            # Packages of trackers block, and take seconds to import.
            self._tracker = await asyncio.to_thread(self._open, status)
            mark = await asyncio.to_thread(self._tracker.last)
            if mark is not None and mark.version > status.head_version:
                raise OperatorError(
                    f"{self.name}: its run has version {mark.version}, the coordinator {status.head_version} at most",
                    action="it is of another history of that name: choose another name by --run",
                )
            self._feed = Feed(self._api, after=mark)
        reports = await self._feed.read(status.head_version)
        for start in range(0, len(reports), _AT_ONCE):
            await asyncio.to_thread(self._tracker.write, reports[start : start + _AT_ONCE])
        if reports:
            mark = mark_of(reports[-1])
            _LOG.info("%s: %d steps, up to %d of version %d", self.name, len(reports), mark.step, mark.version)

    async def close(self) -> None:
        tracker, self._tracker, self._feed = self._tracker, None, None
        if tracker is not None:
            await asyncio.to_thread(tracker.close)


async def _write(slot: _Slot, status: RunStatus, *, is_once: bool) -> bool:
    try:
        await slot.write(status)
    except Unreachable as error:
        if is_once:
            raise
        _LOG.warning("%s: %s", slot.name, error)
        # What it took before it failed it says itself when it is opened again.
        await slot.close()
        return False
    return True
