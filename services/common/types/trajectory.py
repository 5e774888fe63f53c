"""The token sequences of a rollout as the model reads them, and its turns. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from heterorl.common.types.common import Float32Array, Int32Array
from heterorl.common.types.rollout import GIVEN, Group, Rollout, Span

BoolArray = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Strip:
    """Tokens that the model reads at once, int32 [L], and which are trained, bool [L]; the last one is."""

    token_ids: Int32Array
    is_drawn: BoolArray

    @property
    def num_inputs(self) -> int:
        """Tokens that the model reads: all but the last."""
        return self.token_ids.size - 1


def is_drawn(spans: Sequence[Span], count: int) -> BoolArray:
    """Which of `count` tokens a policy drew."""
    drawn = np.zeros(count, np.bool_)
    for span in spans:
        drawn[span.start : span.end] = span.is_drawn
    return drawn


def strips_of(prompt: Int32Array, rollout: Rollout) -> tuple[Strip, ...]:
    """The sequences of a rollout up to their last drawn token; each drawn token is in one of them.

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Tokens [start, end) of a rollout by one writer: a turn of the policy, or given tokens.

    `versions` drew the turn, each once, in order; given tokens have none. `keeps` is that of the Span.
    """

    start: int
    end: int
    versions: tuple[int, ...]
    keeps: int | None = None

    @property
    def is_drawn(self) -> bool:
        return bool(self.versions)

    @property
    def writer(self) -> str:
        """Who wrote it, for people.

        Example: "version 7", "versions 7, 8", "environment"
        """
        name = f"version{'s'[: len(self.versions) > 1]} {', '.join(map(str, self.versions))}"
        if not self.is_drawn:
            name = "environment"
        return name if self.keeps is None else f"{name}, in a new sequence that keeps {self.keeps} tokens"


def parts_of(spans: Sequence[Span]) -> tuple[Part, ...]:
    """The turns of the policy and the given tokens between them, in order; one drawn part for a single completion.

    A turn may have several versions; given tokens or another sequence end it.
    """
    parts: list[Part] = []
    for span in spans:
        versions = (span.version,) if span.is_drawn else ()
        if parts and span.keeps is None and parts[-1].is_drawn == span.is_drawn:
            known = tuple(dict.fromkeys((*parts[-1].versions, *versions)))
            parts[-1] = replace(parts[-1], end=span.end, versions=known)
        else:
            parts.append(Part(start=span.start, end=span.end, versions=versions, keeps=span.keeps))
    return tuple(parts)


def turns_of(rollout: Rollout) -> tuple[tuple[int, int], ...]:
    """Begin and end of each turn of the policy among the rollout's tokens."""
    return tuple((part.start, part.end) for part in parts_of(rollout.spans) if part.is_drawn)


def without_stale(group: Group, *, oldest: int) -> Group:
    """The group with what versions before `oldest` drew as context: given tokens, which have no log-probs.

    The group itself where there is none. A rollout of which nothing else was drawn is trained on no longer.
    """
    if group.oldest_version >= oldest:
        return group
    rollouts = tuple(_without_stale(rollout, oldest) for rollout in group.rollouts)
    left = [span.version for one in rollouts if one.is_trainable for span in one.spans if span.is_drawn]
    return replace(group, rollouts=rollouts, oldest_version=min(left, default=group.oldest_version))


def _without_stale(rollout: Rollout, oldest: int) -> Rollout:
    drawn = [span for span in rollout.spans if span.is_drawn]
    is_kept = np.repeat([span.version >= oldest for span in drawn], [span.end - span.start for span in drawn])
    if is_kept.all():
        return rollout
    spans = tuple(replace(span, version=GIVEN) if span.version < oldest else span for span in rollout.spans)
    return replace(rollout, spans=spans, sampler_logprobs=rollout.sampler_logprobs[is_kept])


def spread(values: Float32Array, drawn: BoolArray) -> Float32Array:
    """Numbers of the drawn tokens, at the places of all tokens: NaN at given ones.

    NaN at all of them where there is not one number for each drawn token.
    """
    found = np.full(drawn.size, np.nan, np.float32)
    if values.size == np.count_nonzero(drawn):
        found[drawn] = values
    return found
