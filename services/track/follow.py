"""Follows a run until it ends and writes to each tracker what it lacks.

A tracker is asked what it has before anything is sent, so that no row is missing or doubled after an interruption; no
state is kept here. The run is only read. A tracker that fails does not delay the others.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from heterorl.common.api import OperatorApi
from heterorl.common.errors import OperatorError, RemoteError, Unreachable
from heterorl.common.process.clock import Clock
from heterorl.common.types.run import RunStatus
from heterorl.track.step_feed import EvaluationFeed, StepFeed
from heterorl.track.tracker import Mark, Tracker, mark_of
from heterorl.track.tracker_rows import read_table

ValueT = TypeVar("ValueT")
_LOG = logging.getLogger(__name__)
_AT_ONCE = 500
"""Reports in one write."""
LINGER_S = 600.0
"""Longest wait for evaluations in progress after the run has ended."""

Open = Callable[[RunStatus], Tracker]
"""Opens the run in a tracker; Unreachable if it does not answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Seconds between two looks; prompts in a table of samples (0: none) and versions between two tables."""

    every_s: float = 5.0
    is_once: bool = False
    samples: int = 0
    samples_every: int = 50


@dataclass(slots=True)
class Sent:
    """What one tracker got from this process, for a screen."""

    name: str
    steps: int = 0
    evaluations: int = 0
    tables: int = 0
    mark: Mark | None = None
    """The newest report in the tracker."""
    problem: str = ""
    """Why the tracker lacks rows; empty if all is well."""


Show = Callable[[RunStatus | None, str, Sequence[Sent]], None]
"""Takes the newest status, the coordinator's problem (empty: none) and the trackers' states."""


async def follow(api: OperatorApi, opens: Mapping[str, Open], *, pace: Pace, clock: Clock, show: Show) -> None:
    """Write a run into trackers until the run has ended, or once with `is_once`.

    Raises:
        OperatorError: a tracker's run has another history than the coordinator's.
        Unreachable: a tracker does not answer when it is first opened, so that a wrong key or directory is reported.
            Later, and for the coordinator, only with `is_once`; otherwise the call is retried.
        HeterorlError: the coordinator refuses.
    """
    slots = [_Slot(name, open_, api, pace) for name, open_ in opens.items()]
    sent = [slot.sent for slot in slots]
    status: RunStatus | None = None
    ended_at: float | None = None
    try:
        while True:
            try:
                found = await api.get_status()
                if status is not None and found.run_id != status.run_id:
                    raise OperatorError(f"the coordinator now serves run {found.run_id}, not {status.run_id}")
                status = found
                all_have = True
                for slot in slots:
                    all_have &= await _write(slot, status, is_once=pace.is_once)
                    show(status, "", sent)
                if pace.is_once:
                    return
                ended_at = (ended_at if ended_at is not None else clock.monotonic()) if has_ended(status) else None
                is_waiting = any(slot.is_waiting for slot in slots)
                if ended_at is not None and all_have and not (is_waiting and clock.monotonic() - ended_at < LINGER_S):
                    return
            except RemoteError as error:
                if pace.is_once or not error.is_transient:
                    raise
                _LOG.warning("coordinator: %s", error)
                show(status, str(error), sent)
            await clock.sleep(pace.every_s)
    finally:
        for slot in slots:
            await slot.close()


def has_ended(status: RunStatus) -> bool:
    """Whether a run's learner ended it and has gone."""
    return status.is_draining and not status.learner


class _First(Unreachable):
    """A tracker did not answer when it was first opened: the user who started this can repair it."""

    is_transient = False


class _TrackerFailed(Exception):
    """A tracker, not the coordinator, does not answer."""


class _Slot:
    def __init__(self, name: str, open_: Open, api: OperatorApi, pace: Pace) -> None:
        self.sent = Sent(name)
        self.is_waiting = False
        self._open, self._api, self._pace = open_, api, pace
        self._was_open = False
        self._tracker: Tracker | None = None
        self._feeds: tuple[StepFeed, EvaluationFeed] | None = None
        self._table = -1

    async def write(self, status: RunStatus) -> None:
        if self._tracker is None or self._feeds is None:
            self._tracker, self._feeds = await self._begin(status)
        steps, evaluations = self._feeds
        reports = await steps.read(status.head_version)
        for start in range(0, len(reports), _AT_ONCE):
            part = reports[start : start + _AT_ONCE]
            await _call(self._tracker.write, part)
            self.sent.steps += len(part)
            self.sent.mark = mark_of(part[-1])
        ended = await evaluations.read()
        self.is_waiting = evaluations.is_waiting
        if ended:
            await _call(self._tracker.write_evaluations, ended)
            self.sent.evaluations += len(ended)
        await self._write_table(self._tracker, status.head_version)
        self.sent.problem = ""
        if reports:
            newest = mark_of(reports[-1])
            _LOG.info("%s: %d steps, up to %d of version %d", self.sent.name, len(reports), newest.step, newest.version)
        for found in ended:
            _LOG.info("%s: evaluation of version %d on %s", self.sent.name, found.version, found.task_set)

    async def close(self) -> None:
        tracker, self._tracker, self._feeds = self._tracker, None, None
        if tracker is not None:
            await asyncio.to_thread(tracker.close)

    async def _begin(self, status: RunStatus) -> tuple[Tracker, tuple[StepFeed, EvaluationFeed]]:
        # Packages of trackers block, and take seconds to import.
        try:
            tracker = self._tracker = await asyncio.to_thread(self._open, status)
        except Unreachable as error:
            if not self._was_open:
                raise _First(Exception.__str__(error), action=error.action) from error
            raise _TrackerFailed(str(error)) from error
        self._was_open = True
        had = tracker.had()
        if had.steps is not None and had.steps.version > status.head_version:
            raise OperatorError(
                f"{self.sent.name}: its run has version {had.steps.version}, the coordinator {status.head_version} "
                "at most",
                action="it is of another history of that name: choose another name by --run",
            )
        self.sent.mark, self._table = had.steps, had.table
        return tracker, (StepFeed(self._api, after=had.steps), EvaluationFeed(self._api, after=had.evaluations))

    async def _write_table(self, tracker: Tracker, head: int) -> None:
        every = self._pace.samples_every
        if self._pace.samples == 0 or head < 1 or head // every <= self._table // every:
            return
        try:
            table = await read_table(self._api, version=head, most=self._pace.samples)
        except Unreachable:
            raise
        except RemoteError as error:
            # A coordinator of an earlier release keeps none.
            _LOG.debug("no samples: %s", error)
            return
        if table is not None:
            await _call(tracker.write_table, table)
            self._table = head
            self.sent.tables += 1


async def _call(call: Callable[[ValueT], None], value: ValueT) -> None:
    try:
        await asyncio.to_thread(call, value)
    except Unreachable as error:
        raise _TrackerFailed(str(error)) from error


async def _write(slot: _Slot, status: RunStatus, *, is_once: bool) -> bool:
    try:
        await slot.write(status)
    except _TrackerFailed as error:
        if is_once:
            raise error.__cause__ or error from None
        _LOG.warning("%s: %s", slot.sent.name, error)
        slot.sent.problem = str(error)
        # The next open asks the tracker what it took.
        await slot.close()
        return False
    return True
