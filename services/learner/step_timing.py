"""The trainer's progress, and how the time of a step was spent.

    writes   the training loop, its phases one after another; the backend's thread, its micro-batches
    reads    the renewal of the lease, at any time

A write is one assignment and never waits for a reader.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from heterorl.common.process import metrics
from heterorl.common.process.clock import Clock
from heterorl.common.types.common import LearnerPhase, LearnerProgress, StepTimes


@dataclass(slots=True)
class PassCount:
    """Micro-batches of the current step: done, and in total."""

    counts: tuple[int, int] = (0, 0)

    def note(self, done: int, total: int) -> None:
        """Set both; called from the thread that computes."""
        self.counts = (done, total)
        metrics.STEP_PROGRESS.set(done / total if total else 0.0)


@dataclass(slots=True, kw_only=True)
class BusyTime:
    """Seconds in which at least one block was open, on the event loop or in threads that it waits for."""

    clock: Clock
    _num_open: int = 0
    _since: float = 0.0
    _total_s: float = 0.0

    def __enter__(self) -> None:
        if not self._num_open:
            self._since = self.clock.monotonic()
        self._num_open += 1

    def __exit__(self, *_: object) -> None:
        self._num_open -= 1
        if not self._num_open:
            self._total_s += self.clock.monotonic() - self._since

    @property
    def is_busy(self) -> bool:
        return self._num_open > 0

    @property
    def seconds(self) -> float:
        return self._total_s + (self.clock.monotonic() - self._since if self.is_busy else 0.0)


@dataclass(slots=True, kw_only=True)
class StepTimer:
    """The phases of the trainer.

    `passes` is written by the backend, `checks` by the verifier.
    """

    clock: Clock
    checks: BusyTime
    passes: PassCount = field(default_factory=PassCount)
    step: int = 0
    """Steps taken."""
    _spent_s: dict[LearnerPhase, float] = field(default_factory=dict)
    _phase: tuple[LearnerPhase, float] | None = None
    _period_began: float = 0.0

    def begin(self, step: int) -> None:
        """Start counting at a loop that continues after `step` steps."""
        self.step, self._spent_s, self._period_began = step, {}, self.clock.monotonic()

    @contextmanager
    def phase(self, phase: LearnerPhase) -> Iterator[None]:
        """Count the time until the end of the block as spent in a phase; blocks do not nest."""
        began = self.clock.monotonic()
        self.passes.note(0, 0)
        self._phase = (phase, began)
        try:
            yield
        finally:
            self._phase = None
            self._spend(phase, self.clock.monotonic() - began)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time until the end of the block as checks, as long as they ran, and as waiting."""
        began, checked_s = self.clock.monotonic(), self.checks.seconds
        self._phase = (LearnerPhase.WAITING, began)
        try:
            yield
        finally:
            self._phase = None
            waited_s = self.clock.monotonic() - began
            examining_s = min(waited_s, self.checks.seconds - checked_s)
            self._spend(LearnerPhase.EXAMINING, examining_s)
            self._spend(LearnerPhase.WAITING, waited_s - examining_s)

    def _spend(self, phase: LearnerPhase, seconds: float) -> None:
        self._spent_s[phase] = self._spent_s.get(phase, 0.0) + seconds
        metrics.PHASE_SECONDS.labels(phase.value).inc(seconds)

    def end_step(self, *, is_applied: bool) -> StepTimes:
        """Close the period of a step and begin the next one's."""
        now = self.clock.monotonic()
        spent_s = {f"{phase.value}_s": self._spent_s.get(phase, 0.0) for phase in LearnerPhase}
        times = StepTimes(period_s=now - self._period_began, **spent_s)
        self.step += is_applied
        self._spent_s, self._period_began = {}, now
        return times

    @property
    def now(self) -> LearnerProgress | None:
        """The current progress; None between two phases."""
        current = self._phase
        if current is None:
            return None
        phase, began = current
        if phase is LearnerPhase.WAITING and self.checks.is_busy:
            phase = LearnerPhase.EXAMINING
        done, total = self.passes.counts
        return LearnerProgress(
            step=self.step + 1,
            phase=phase,
            phase_s=max(0.0, self.clock.monotonic() - began),
            micro_batches_done=done,
            micro_batches=total,
        )


def new_step_timer(clock: Clock, passes: PassCount | None = None) -> StepTimer:
    """The timer of a trainer that has not begun; `passes` is the backend's."""
    return StepTimer(clock=clock, checks=BusyTime(clock=clock), passes=passes or PassCount())
