"""Where the learner stands within a step, as it says when it renews its lease. In memory: a restart hears it again."""

from __future__ import annotations

from dataclasses import dataclass

from heterorl.common.types.step import LearnerProgress


@dataclass(slots=True)
class Standing:
    """The newest word of a learner; used by store operations only."""

    _epoch: int = 0
    _progress: LearnerProgress | None = None
    _heard: float = 0.0

    def note(self, progress: LearnerProgress | None, *, epoch: int, now: float) -> None:
        """Keep what the holder of an epoch said at an instant of the monotonic clock."""
        self._epoch, self._progress, self._heard = epoch, progress, now

    def of(self, epoch: int, now: float) -> tuple[LearnerProgress | None, float]:
        """What the holder of this epoch said last, and seconds since then; of another epoch nothing is known."""
        if epoch != self._epoch or self._progress is None:
            return None, 0.0
        return self._progress, max(0.0, now - self._heard)
