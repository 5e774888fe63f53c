"""Where a trainer stands and where its time goes, on a clock that moves only when told."""

import pytest

from heterorl.common.types.common import LearnerPhase, StepTimes
from heterorl.learner.step_metrics import PassCount, StepTimer
from tests.support.clock import ManualClock


@pytest.fixture
def clock():
    return ManualClock()


def test_period_is_divided_among_its_phases(clock):
    progress = StepTimer(clock=clock)
    progress.begin(4)
    clock.advance(0.5)
    with progress.phase(LearnerPhase.EVALUATING):
        clock.advance(2.0)
    with progress.waiting():
        clock.advance(3.0)
        with progress.checks, progress.checks:
            clock.advance(1.5)
    with progress.phase(LearnerPhase.EXAMINING):
        clock.advance(0.25)
    with progress.phase(LearnerPhase.COMPUTING):
        clock.advance(10.0)

    times = progress.end_step(is_applied=True)

    assert times == StepTimes(
        period_s=17.25, waiting_s=3.0, examining_s=1.75, computing_s=10.0, evaluating_s=2.0, publishing_s=0.0
    )
    # The next period begins where this one ended.
    with progress.phase(LearnerPhase.PUBLISHING):
        clock.advance(1.0)
    assert progress.end_step(is_applied=False) == StepTimes(
        period_s=1.0, waiting_s=0.0, examining_s=0.0, computing_s=0.0, evaluating_s=0.0, publishing_s=1.0
    )


def test_checks_beside_a_step_are_not_what_it_waits_for(clock):
    progress = StepTimer(clock=clock)
    progress.begin(0)
    with progress.checks:
        with progress.phase(LearnerPhase.COMPUTING):
            clock.advance(5.0)
        with progress.waiting():
            clock.advance(1.0)

    times = progress.end_step(is_applied=True)

    assert (times.computing_s, times.examining_s, times.waiting_s) == (5.0, 1.0, 0.0)


def test_long_step_shows_how_far_it_is(clock):
    passes = PassCount()
    progress = StepTimer(clock=clock, passes=passes)
    progress.begin(11)
    assert progress.now is None
    with progress.phase(LearnerPhase.COMPUTING):
        passes.note(0, 40)
        clock.advance(7.0)
        passes.note(3, 40)
        now = progress.now
    assert (now.step, now.phase, now.phase_s) == (12, LearnerPhase.COMPUTING, 7.0)
    assert (now.micro_batches_done, now.micro_batches) == (3, 40)

    progress.end_step(is_applied=True)
    with progress.waiting():
        assert progress.now.step == 13
        assert progress.now.phase is LearnerPhase.WAITING
        with progress.checks:
            assert progress.now.phase is LearnerPhase.EXAMINING
    # A step that changed nothing is taken again under its number.
    progress.end_step(is_applied=False)
    with progress.phase(LearnerPhase.EVALUATING):
        assert progress.now.step == 13
        assert progress.now.micro_batches == 0, "of an earlier step nothing is shown"


def test_phase_that_fails_is_over(clock):
    progress = StepTimer(clock=clock)
    progress.begin(0)
    with pytest.raises(RuntimeError), progress.phase(LearnerPhase.COMPUTING):
        raise RuntimeError
    with pytest.raises(RuntimeError), progress.waiting():
        raise RuntimeError

    assert progress.now is None
