"""The step size of a step: warm-up by the optimizer's age, decay by the run's step. Pure.

Guarantees: what a step gets depends on the configuration and two counts, both of which outlive every process: steps in
the run's weights, which a version states, and steps that the optimizer has taken, which a checkpoint holds. A learner
that begins with a new optimizer warms up again and goes on with the decay.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Shape = Literal["constant", "linear", "cosine"]
OptimizerName = Literal["adamw", "adafactor"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A warm-up and a decay; see `rate`.

    Example: Schedule(lr=1e-6, warmup_steps=10, shape="cosine", decay_steps=500, final_ratio=0.1)
    """

    lr: float
    warmup_steps: int = 0
    shape: Shape = "constant"
    decay_steps: int = 0
    final_ratio: float = 0.0

    def rate(self, *, step: int, applied_steps: int) -> float:
        """Step size: lr * min(1, (applied_steps + 1) / warmup_steps) * decay(step - 1).

        With p = (s - warmup_steps) / (decay_steps - warmup_steps) in [0, 1] after s steps of the run, and f the final
        ratio: decay = f + (1 - f) (1 - p) of `linear`, f + (1 - f) (1 + cos(pi p)) / 2 of `cosine`, 1 of `constant`.
        Source of the cosine: arXiv 1608.03983 equation 5, without restarts.

        Args:
            step: of the run, from 1.
            applied_steps: taken by this optimizer before.
        """
        warmth = min(1.0, (applied_steps + 1) / self.warmup_steps) if self.warmup_steps else 1.0
        return self.lr * warmth * self._decay(step - 1)

    def _decay(self, num_done: int) -> float:
        if self.shape == "constant":
            return 1.0
        progress = (num_done - self.warmup_steps) / (self.decay_steps - self.warmup_steps)
        progress = min(1.0, max(0.0, progress))
        left = 1.0 - progress if self.shape == "linear" else (1.0 + math.cos(math.pi * progress)) / 2.0
        return self.final_ratio + (1.0 - self.final_ratio) * left
