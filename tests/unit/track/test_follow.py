"""Following a run: what fails is opened anew, another history is refused, the end is seen."""

import asyncio
import dataclasses

import pytest

from heterorl.common.errors import OperatorError, Unreachable
from heterorl.common.types.run import RunStatus
from heterorl.track.follow import follow
from heterorl.track.tracker import mark_of
from tests.support.run import REPORT

STATUS = RunStatus(
    run_id="run", head_version=3, epoch=1, learner="l", is_draining=False, uptime_s=1.0,
    ledger=None, bytes_full=0, bytes_last=0, changed_fraction=0.0, sites=(), last_report=None,
)  # fmt: skip
REPORTS = tuple(dataclasses.replace(REPORT, step=step, version=step) for step in (1, 2, 3))
ENDED = dataclasses.replace(STATUS, is_draining=True, learner="")


class Api:
    def __init__(self, *answers):
        self.answers = list(answers)

    async def get_status(self):
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def list_steps(self, *, after_step, limit):
        return tuple(entry for entry in REPORTS if entry.step > after_step)[:limit]


class Kept:
    """A tracker whose service keeps what was sent; it fails after `fails_after` reports, once."""

    def __init__(self, fails_after=99):
        self.reports, self.fails_after, self.opened, self.closed = [], fails_after, 0, 0

    def open(self, status):
        self.opened += 1
        return self

    def last(self):
        return mark_of(self.reports[-1]) if self.reports else None

    def write(self, reports):
        for entry in reports:
            if len(self.reports) == self.fails_after:
                self.fails_after = 99
                raise Unreachable("gone")
            self.reports.append(entry)

    def close(self):
        self.closed += 1


class NoWait:
    async def sleep(self, seconds):
        await asyncio.sleep(0)


async def run(api, *kept, is_once=False):
    opens = {str(number): tracker.open for number, tracker in enumerate(kept)}
    await follow(api, opens, every_s=1.0, is_once=is_once, clock=NoWait())


async def test_a_tracker_that_fails_gets_the_rest_and_holds_up_no_other():
    kept, other = Kept(fails_after=2), Kept()
    await run(Api(ENDED), kept, other)

    assert kept.reports == other.reports == list(REPORTS)
    assert (kept.opened, kept.closed, other.opened, other.closed) == (2, 2, 1, 1)


async def test_the_coordinator_may_be_away():
    kept = Kept()
    await run(Api(Unreachable("away"), STATUS, Unreachable("away"), ENDED), kept)

    assert kept.reports == list(REPORTS)
    assert kept.opened == kept.closed == 1


async def test_once_ends_and_says_what_does_not_answer():
    kept = Kept()
    await run(Api(STATUS), kept, is_once=True)
    assert kept.reports == list(REPORTS)

    with pytest.raises(Unreachable):
        await run(Api(Unreachable("away")), kept, is_once=True)
    with pytest.raises(Unreachable):
        await run(Api(STATUS), Kept(fails_after=0), is_once=True)


async def test_another_history_is_refused():
    kept = Kept()
    kept.reports = list(REPORTS)
    with pytest.raises(OperatorError, match="version 3, the coordinator 2"):
        await run(Api(dataclasses.replace(STATUS, head_version=2)), kept)
    with pytest.raises(OperatorError, match="run other"):
        await run(Api(STATUS, dataclasses.replace(STATUS, run_id="other")), Kept())


async def test_a_run_that_drains_is_followed_while_its_learner_is_there():
    kept = Kept()
    draining = dataclasses.replace(STATUS, is_draining=True, head_version=1)
    await run(Api(draining, draining, ENDED), kept)

    assert kept.reports == list(REPORTS)
