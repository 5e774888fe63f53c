"""The end of a step on its way to be a version: all that is read of the backend, so that the next step may compute."""

from __future__ import annotations

from dataclasses import dataclass

from heterorl.learner.backends.weights import Weights
from heterorl.learner.publish.checkpoint import Begun
from heterorl.learner.publish.encode import Encoded
from heterorl.learner.publish.flavours import QuantisedFlavour


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Draft:
    """The next version as its step left it; nothing here changes when the next step does.

    `arena` has the rounded weights, `forms` the flavours of them; `canary` are the log-probs of the agreed tokens,
    computed now because the model that is trained computes them; `begun` is the checkpoint, where one is due.
    `encoded` is what all ranks have encoded already; None where this process does it, beside the next step.
    """

    version: int
    step: int
    arena: Weights
    canary: tuple[float, ...]
    forms: tuple[QuantisedFlavour, ...]
    begun: Begun | None
    encoded: Encoded | None = None
