"""A rollout's tokens as the model reads them: its sequences, each from its first token on, and its turns. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from heterorl.common.types.common import Int32Array
from heterorl.common.types.rollout import Rollout, Span

BoolArray = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Strip:
    """Tokens that the model reads in one piece, int32 [L], and which of them are trained, bool [L]; the last one is."""

    token_ids: Int32Array
    is_drawn: BoolArray

    @property
    def num_inputs(self) -> int:
        """Tokens that the model reads: all but the last, which nothing follows."""
        return self.token_ids.size - 1


def is_drawn(spans: Sequence[Span], count: int) -> BoolArray:
    """Which of so many tokens a policy drew."""
    drawn = np.zeros(count, np.bool_)
    for span in spans:
        drawn[span.start : span.end] = span.is_drawn
    return drawn


def strips_of(prompt: Int32Array, rollout: Rollout) -> tuple[Strip, ...]:
    """The sequences of a rollout, each drawn token in one of them; without what follows a sequence's last drawn token.

    A sequence that keeps tokens of the one before has them as context. One without a drawn token is left out.
    """
    drawn = is_drawn(rollout.spans, rollout.token_ids.size)
    starts = [span.start for span in rollout.spans if span.keeps is not None]
    kept = [span.keeps for span in rollout.spans if span.keeps is not None]
    ids, marks = prompt, np.zeros(prompt.size, np.bool_)
    strips = []
    for start, end, keeps in zip([0, *starts], [*starts, rollout.token_ids.size], [None, *kept], strict=True):
        ids = np.concatenate([ids[:keeps], rollout.token_ids[start:end]])
        marks = np.concatenate([np.zeros_like(marks[:keeps]), drawn[start:end]])
        if marks.any():
            length = int(np.flatnonzero(marks)[-1]) + 1
            strips.append(Strip(token_ids=ids[:length], is_drawn=marks[:length]))
    return tuple(strips)


def turns_of(rollout: Rollout) -> tuple[tuple[int, int], ...]:
    """Where each turn of the policy begins and ends among the rollout's tokens.

    A turn may be of several versions; what is given ends it.
    """
    turns: list[tuple[int, int]] = []
    goes_on = False
    for span in rollout.spans:
        if span.is_drawn and goes_on and span.keeps is None:
            turns[-1] = (turns[-1][0], span.end)
        elif span.is_drawn:
            turns.append((span.start, span.end))
        goes_on = span.is_drawn
    return tuple(turns)
