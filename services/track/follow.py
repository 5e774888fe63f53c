"""The loop of `heterorl track`: follows a run and writes missing rows.

The newest row in the tracker is the only state, so that no row is missing or doubled after an interruption. A tracker
that fails does not delay the others.

A learner that resumes from an older checkpoint repeats steps under new versions, so new reports may lie behind
ListSteps' cursor of steps. While the tracker's newest report is listed, new ones come after its step; otherwise the
whole list is read.

An evaluation in progress holds back later ones of its set, so that a tracker has all up to its newest version.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from heterorl.common.api import OperatorApi, every_evaluation, every_step
from heterorl.common.errors import OperatorError, RemoteError
from heterorl.common.evaluation.summary import UNDER_WAY
from heterorl.common.process.clock import Clock
from heterorl.common.types.common import StepReport
from heterorl.common.types.evaluation import Evaluation, EvaluationState
from heterorl.common.types.run import RunStatus
from heterorl.track.tracker import Mark, Tracker, TrackerFailed, mark_of, read_table

_OTHER_HISTORY = "the tracker's run has another history: choose another name by --run"


class StepFeed:
    """Step reports after `after`, which was published at a time (0: unknown)."""

    def __init__(self, api: OperatorApi, *, after: Mark | None, published: float = 0.0) -> None:
        self._api = api
        self.newest = after
        """Place of the newest report read."""
        self._published = published
        self._head: int | None = None

    async def read(self, head: int) -> tuple[StepReport, ...]:
        """New reports of versions up to `head`.
        The status that states `head` is older than this call, so that no report can appear behind it.

        Raises HeterorlError: the coordinator refuses, cannot be reached or was restored from a backup; the next call
        reads the same.
        """
        if head == self._head:
            return ()
        mark = self.newest
        reports = await every_step(self._api, after=-1 if mark is None else mark.step - 1)
        same = next((report for report in reports if mark_of(report) == mark), None)
        if mark is not None and same is None:
            reports = await every_step(self._api)
        again = 0.0 if same is None else same.published_time
        # A tracker may round.
        if again and self._published and abs(again - self._published) > 1.0:
            raise OperatorError("the tracker's newest version was published again", action=_OTHER_HISTORY)
        found = [report for report in reports if report.version <= head and (mark is None or mark_of(report) > mark)]
        new = tuple(sorted(found, key=mark_of))
        self._head = head
        if new:
            self.newest, self._published = mark_of(new[-1]), new[-1].published_time
        return new


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

        Raises HeterorlError: the coordinator cannot be reached; the next call reads the same.
        """
        listed = await every_evaluation(self._api, after=self._cursor)
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


ValueT = TypeVar("ValueT")
_LOG = logging.getLogger(__name__)
_AT_ONCE = 500
"""Most reports in one write."""
LINGER_S = 600.0
"""Longest wait for evaluations in progress after the run has ended."""

Open = Callable[[RunStatus], Tracker]
"""Opens the run in a tracker. Raises TrackerFailed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Pace of polls and tables: `samples` prompts (0: none) every `samples_every` versions."""

    every_s: float = 5.0
    is_once: bool = False
    samples: int = 0
    samples_every: int = 50


async def follow(api: OperatorApi, opens: Mapping[str, Open], *, pace: Pace, clock: Clock) -> None:
    """Write a run into trackers until it ends, or once.

    Raises OperatorError: a tracker's run has another history than the coordinator's; TrackerFailed: a tracker does not
    answer when it is first opened, so that a wrong key is reported. Later failures are retried, unless `is_once`.
    """
    slots = [_Slot(name, open_, api, pace) for name, open_ in opens.items()]
    status: RunStatus | None = None
    ended_at: float | None = None
    try:
        while True:
            try:
                found = await api.get_status()
                if status is not None and found.run_id != status.run_id:
                    problem = f"the coordinator now serves run {found.run_id}, not {status.run_id}"
                    raise OperatorError(problem, action="start heterorl track again")
                status = found
                all_have = True
                for slot in slots:
                    all_have &= await _write(slot, status, is_once=pace.is_once)
                if pace.is_once:
                    return
                ended_at = (ended_at if ended_at is not None else clock.monotonic()) if status.has_ended else None
                is_waiting = any(slot.is_waiting for slot in slots)
                if ended_at is not None and all_have and not (is_waiting and clock.monotonic() - ended_at < LINGER_S):
                    return
            except RemoteError as error:
                if pace.is_once or not error.is_transient:
                    raise
                _LOG.warning("the coordinator is asked again in %g s: %s", pace.every_s, error)
            await clock.sleep(pace.every_s)
    finally:
        for slot in slots:
            await slot.close()


class _Slot:
    def __init__(self, name: str, open_: Open, api: OperatorApi, pace: Pace) -> None:
        self.name = name
        self.is_waiting = False
        self._open, self._api, self._pace = open_, api, pace
        self.was_open = False
        self._tracker: Tracker | None = None
        self._busy = threading.Lock()
        """Held by each call of the tracker, which goes on in its thread when the command is ended."""
        self._feeds: tuple[StepFeed, EvaluationFeed] | None = None
        self._table = -1

    async def write(self, status: RunStatus) -> None:
        if self._tracker is None or self._feeds is None:
            self._tracker, self._feeds = await self._begin(status)
        steps, evaluations = self._feeds
        had, head = steps.newest, status.head_version
        if had is not None and had.version > head:
            raise OperatorError(
                f"{self.name}: its run has version {had.version}, the coordinator {head} at most", action=_OTHER_HISTORY
            )
        reports = await steps.read(head)
        for start in range(0, len(reports), _AT_ONCE):
            part = reports[start : start + _AT_ONCE]
            await self._call(self._tracker.write, part)
        ended = await evaluations.read()
        self.is_waiting = evaluations.is_waiting
        if ended:
            await self._call(self._tracker.write_evaluations, ended)
        await self._write_table(self._tracker, head)
        if reports:
            newest = mark_of(reports[-1])
            _LOG.info(
                "%s took %d steps, up to step %d of version %d",
                self.name, len(reports), newest.step, newest.version,
            )  # fmt: skip
        for found in ended:
            _LOG.info("%s took the evaluation of version %d on %s", self.name, found.version, found.task_set)

    async def close(self) -> None:
        self._feeds = None
        await asyncio.to_thread(self._closed)

    def _closed(self) -> None:
        with self._busy:
            tracker, self._tracker = self._tracker, None
            if tracker is not None:
                tracker.close()

    def _opened(self, status: RunStatus) -> Tracker:
        with self._busy:
            self._tracker = self._open(status)
            return self._tracker

    async def _call(self, call: Callable[[ValueT], None], value: ValueT) -> None:
        def called() -> None:
            with self._busy:
                call(value)

        await asyncio.to_thread(called)

    async def _begin(self, status: RunStatus) -> tuple[Tracker, tuple[StepFeed, EvaluationFeed]]:
        # Packages of trackers block, and their imports take seconds.
        tracker = await asyncio.to_thread(self._opened, status)
        self.was_open = True
        had = tracker.had
        self._table = had.table
        steps = StepFeed(self._api, after=had.steps, published=had.published)
        return tracker, (steps, EvaluationFeed(self._api, after=had.evaluations))

    async def _write_table(self, tracker: Tracker, head: int) -> None:
        every = self._pace.samples_every
        if self._pace.samples == 0 or head < 1 or head // every <= self._table // every:
            return
        table = await read_table(self._api, version=head, most=self._pace.samples)
        if table is not None:
            await self._call(tracker.write_table, table)
            self._table = head


async def _write(slot: _Slot, status: RunStatus, *, is_once: bool) -> bool:
    try:
        await slot.write(status)
    except TrackerFailed as error:
        if is_once or not slot.was_open:
            raise
        _LOG.warning("%s failed and is opened again: %s", slot.name, error)
        # The next open reads what the tracker took.
        await slot.close()
        return False
    return True
