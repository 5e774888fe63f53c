"""Following a run: what fails is opened anew, another history is refused, the end is seen, texts leave if asked for."""

import asyncio
import dataclasses
import threading

import pytest

from heterorl.common.errors import OperatorError, Unreachable
from heterorl.common.types.evaluation import EvaluationState
from heterorl.common.types.run import RunStatus
from heterorl.common.types.sample import SampleList
from heterorl.track.follow import LINGER_S, Pace, follow
from heterorl.track.tracker import Had, TrackerFailed, mark_of
from tests.support.evaluations import evaluation
from tests.support.limits import WAIT_S
from tests.support.run import REPORT
from tests.support.samples import make_sample

STATUS = RunStatus(
    run_id="run", head_version=3, epoch=1, learner="l", is_draining=False, uptime_s=1.0,
    ledger=None, bytes_full=0, bytes_last=0, changed_fraction=0.0, sites=(), last_report=None,
)  # fmt: skip
REPORTS = tuple(dataclasses.replace(REPORT, step=step, version=step) for step in (1, 2, 3))
SAMPLE = make_sample(1)
ENDED = dataclasses.replace(STATUS, is_draining=True, learner="")


class Api:
    def __init__(self, *answers, evaluations=((),)):
        self.answers, self.evaluations, self.num_asked = list(answers), list(evaluations), 0

    async def get_status(self):
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def list_steps(self, *, after_step, limit):
        return tuple(entry for entry in REPORTS if entry.step > after_step)[:limit]

    async def list_evaluations(self, *, after_version, limit):
        evaluations = self.evaluations.pop(0) if len(self.evaluations) > 1 else self.evaluations[0]
        return tuple(found for found in evaluations if found.version > after_version)[:limit]

    async def list_samples(self, *, wanted, page):
        self.num_asked += 1
        return SampleList(samples=(SAMPLE.summary,), next_page=None, num_kept=1, kept_bytes=1, limit_bytes=1)

    async def get_sample(self, *, sample_id):
        return SAMPLE


class Kept:
    """A tracker whose service keeps what was sent; it fails after `fails_after` reports, once."""

    def __init__(self, fails_after=99):
        self.reports, self.fails_after, self.opened, self.closed = [], fails_after, 0, 0
        self.evaluations, self.tables = [], []

    def open(self, status):
        self.opened += 1
        return self

    @property
    def had(self):
        return Had(
            steps=mark_of(self.reports[-1]) if self.reports else None,
            evaluations={found.task_set: found.version for found in self.evaluations},
            table=self.tables[-1].version if self.tables else -1,
        )

    def write_evaluations(self, evaluations):
        self.evaluations += evaluations

    def write_table(self, table):
        self.tables.append(table)

    def write(self, reports):
        for entry in reports:
            if len(self.reports) == self.fails_after:
                self.fails_after = 99
                raise TrackerFailed("gone")
            self.reports.append(entry)

    def close(self):
        self.closed += 1


class NoWait:
    now = 0.0

    def monotonic(self):
        return self.now

    async def sleep(self, seconds):
        self.now += seconds
        await asyncio.sleep(0)


async def run(api, *kept, is_once=False, samples=0, clock=None):
    opens = {str(number): tracker.open for number, tracker in enumerate(kept)}
    pace = Pace(every_s=1.0, is_once=is_once, samples=samples, samples_every=2)
    await follow(api, opens, pace=pace, clock=clock or NoWait())


async def test_a_tracker_that_fails_gets_the_rest_and_holds_up_no_other():
    kept, other = Kept(fails_after=2), Kept()
    await run(Api(ENDED), kept, other)

    assert kept.reports == other.reports == list(REPORTS)
    assert (kept.opened, kept.closed, other.opened, other.closed) == (2, 2, 1, 1)


async def test_a_tracker_that_never_answered_is_said_at_once():
    class Refusing(Kept):
        def open(self, status):
            raise TrackerFailed("no key", action="log in")

    with pytest.raises(TrackerFailed, match="no key .log in."):
        await run(Api(STATUS), Refusing())


async def test_evaluations_under_way_are_waited_for_when_the_run_has_ended():
    begun, done = evaluation(3, EvaluationState.RUNNING), evaluation(3, EvaluationState.DONE)
    kept = Kept()
    await run(Api(ENDED, evaluations=((begun,), (begun,), (done,))), kept)
    assert kept.evaluations == [done]

    clock = NoWait()
    await run(Api(ENDED, evaluations=((begun,),)), Kept(), clock=clock)
    assert clock.now == LINGER_S


async def test_texts_leave_only_if_asked_for_and_once_in_some_versions():
    api, kept = Api(STATUS), Kept()
    await run(api, kept, is_once=True)
    assert (api.num_asked, kept.tables) == (0, [])

    await run(api, kept, is_once=True, samples=4)
    await run(api, kept, is_once=True, samples=4)
    await run(Api(dataclasses.replace(STATUS, head_version=4)), kept, is_once=True, samples=4)

    assert [table.version for table in kept.tables] == [3, 4]
    assert api.num_asked == 1


async def test_the_coordinator_may_be_away(caplog):
    kept = Kept()
    await run(Api(Unreachable("away"), STATUS, Unreachable("away"), ENDED), kept)

    assert sum("the coordinator is asked again in 1 s: away" in text for text in caplog.messages) == 2
    assert kept.reports == list(REPORTS)
    assert kept.opened == kept.closed == 1


async def test_once_ends_and_says_what_does_not_answer():
    kept = Kept()
    await run(Api(STATUS), kept, is_once=True)
    assert kept.reports == list(REPORTS)

    with pytest.raises(Unreachable):
        await run(Api(Unreachable("away")), kept, is_once=True)
    with pytest.raises(TrackerFailed):
        await run(Api(STATUS), Kept(fails_after=0), is_once=True)


async def test_another_history_is_refused():
    kept = Kept()
    kept.reports = list(REPORTS)
    with pytest.raises(OperatorError, match="version 3, the coordinator 2"):
        await run(Api(dataclasses.replace(STATUS, head_version=2)), kept)
    # A coordinator restored from a backup, while it is followed.
    with pytest.raises(OperatorError, match="version 3, the coordinator 2"):
        await run(Api(STATUS, dataclasses.replace(ENDED, head_version=2)), Kept())
    with pytest.raises(OperatorError, match="run other"):
        await run(Api(STATUS, dataclasses.replace(STATUS, run_id="other")), Kept())


async def test_a_run_that_drains_is_followed_while_its_learner_is_there():
    kept = Kept()
    draining = dataclasses.replace(STATUS, is_draining=True, head_version=1)
    await run(Api(draining, draining, ENDED), kept)

    assert kept.reports == list(REPORTS)


class Slow(Kept):
    """A tracker that opens or writes until it may go on."""

    def __init__(self, *, at):
        super().__init__()
        self.at, self.began, self.may_go, self.seen_at_close = at, threading.Event(), threading.Event(), None

    def open(self, status):
        self._wait("open")
        return super().open(status)

    def write(self, reports):
        self._wait("write")
        super().write(reports)

    def close(self):
        self.seen_at_close = (self.opened, len(self.reports))

    def _wait(self, what):
        if what == self.at:
            self.began.set()
            assert self.may_go.wait(WAIT_S)


@pytest.mark.parametrize(("at", "seen"), [("open", (1, 0)), ("write", (1, 3))])
async def test_an_end_of_the_command_waits_for_the_call_of_a_tracker(at, seen):
    """SIGTERM closed a tracker while rows that had been read were written to it."""
    slow = Slow(at=at)
    following = asyncio.create_task(run(Api(STATUS), slow))
    assert await asyncio.to_thread(slow.began.wait, WAIT_S)

    following.cancel()
    await asyncio.wait([following], timeout=0.1)
    slow.may_go.set()
    with pytest.raises(asyncio.CancelledError):
        await following

    assert slow.seen_at_close == seen
