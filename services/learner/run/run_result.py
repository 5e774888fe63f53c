"""Where a learner left, as numbers and as the sentence that its operator reads last."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """Where a learner left.

    `step` optimizer steps are in its weights, of which `num_unpublished` are in no version; `version` is the newest
    that is known to be committed (-1: none), and the next one may be when `is_undecided`. `is_finished` when max_steps
    is reached; `has_begun` once it held the weights of `version`.
    """

    step: int
    version: int
    is_finished: bool
    num_unpublished: int = 0
    is_undecided: bool = False
    has_begun: bool = True

    def __str__(self) -> str:
        """The last line of a learner's log."""
        if not self.has_begun:
            where = "before the first version" if self.version < 0 else f"before it went on from version {self.version}"
            return f"stopped {where}"
        text = f"stopped at step {self.step - self.num_unpublished}, version {self.version}"
        if self.is_undecided:
            text += f"; version {self.version + 1} was on its way, the next start asks whether it arrived"
        elif self.num_unpublished:
            steps = f"{self.num_unpublished} step" + "s" * (self.num_unpublished > 1)
            text += f"; {steps} after it not yet published: the groups return to the queue"
        return text
