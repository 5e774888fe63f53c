"""Tokens of a completion for the page: text, numbers, colour classes."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from heterorl.common.types.common import Float32Array, Int32Array
from heterorl.common.types.rollout import Span, spread
from heterorl.common.types.sample import SampleRollout

RATIO_EDGES = (0.05, 0.2, 0.5, 1.0)
"""Log-ratios, nats, at which the next stronger colour begins."""
PROBABILITY_EDGES = (0.9, 0.5, 0.1, 0.01)
"""Probabilities below which the next stronger colour begins."""
_SIGNED = ("n4", "n3", "n2", "n1", "z", "p1", "p2", "p3", "p4")
_CUTS = np.array([*(-edge for edge in reversed(RATIO_EDGES)), *RATIO_EDGES], np.float64)
_LOG_CUTS = np.log(np.array(PROBABILITY_EDGES[::-1], np.float64))
UNKNOWN = "x"


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step of a legend: a CSS class and its label."""

    name: str
    label: str


def ratio_classes(log_ratios: Float32Array) -> list[str]:
    """CSS class of each log-ratio, n4 (unlikely to the learner) to p4.
    z is equal; log-ratios are in nats."""
    places = np.digitize(log_ratios.astype(np.float64), _CUTS)
    return [_SIGNED[place] if known else UNKNOWN for place, known in _known(places, log_ratios)]


def probability_classes(logprobs: Float32Array) -> list[str]:
    """CSS class of each log-prob: l0 (from 0.9) to l4 (below 0.01)."""
    places = len(PROBABILITY_EDGES) - np.digitize(logprobs.astype(np.float64), _LOG_CUTS)
    return [f"l{place}" if known else UNKNOWN for place, known in _known(places, logprobs)]


def _known(places: np.ndarray, values: Float32Array) -> zip[tuple[int, bool]]:
    return zip(places.tolist(), np.isfinite(values).tolist(), strict=True)


def ratio_legend() -> tuple[Step, ...]:
    """Legend of log-ratios, from less to more likely."""
    less = [Step(name=f"n{i + 1}", label=f"-{RATIO_EDGES[i]:g}") for i in reversed(range(len(RATIO_EDGES)))]
    more = [Step(name=f"p{i + 1}", label=f"+{RATIO_EDGES[i]:g}") for i in range(len(RATIO_EDGES))]
    return (*less, Step(name="z", label="0"), *more)


def probability_legend() -> tuple[Step, ...]:
    """Legend of the sampler's probabilities, from sure to surprising."""
    steps = [Step(name=f"l{i + 1}", label=f"<{edge:g}") for i, edge in enumerate(PROBABILITY_EDGES)]
    return (Step(name="l0", label=f"{PROBABILITY_EDGES[0]:g}-1"), *steps)


GIVEN_WORD = "given"
"""Shown in place of a version for tokens of the environment."""


class Token(NamedTuple):
    """One token. `numbers` is "id log-prob log-ratio version", with "-" for unknown values.

    `switch` is the new version if it changes here, `head` the writer of a turn that begins here; else empty.
    """

    text: str
    classes: str
    numbers: str
    switch: str
    head: str


def tokens_of(rollout: SampleRollout, *, limit: int) -> tuple[list[Token], str]:
    """The first `limit` tokens and the text after them.

    Without a text, tokens show their ids. Without valid character ends of tokens there are no tokens, and the whole
    text follows.
    """
    count = min(len(rollout.token_ids), limit)
    if rollout.completion:
        pieces = _pieces(rollout.completion, rollout.token_ends, len(rollout.token_ids))
        if pieces is None:
            return [], rollout.completion
        texts, rest = pieces[:count], "".join(pieces[count:])
    else:
        texts, rest = [f"{number} " for number in rollout.token_ids[:count].tolist()], ""
    drawn = rollout.is_drawn
    logprobs = spread(rollout.sampler_logprobs, drawn)[:count]
    ratios = spread(rollout.log_ratios, drawn)[:count]
    versions = _versions(rollout.spans, count)
    heads = {part.start: part.writer for part in rollout.turns}
    tokens = []
    last = versions[0] if versions else ""
    for place, (text, number, logprob, ratio, by_ratio, by_probability, version, is_drawn) in enumerate(
        zip(
            texts,
            rollout.token_ids[:count].tolist(),
            logprobs.tolist(),
            ratios.tolist(),
            ratio_classes(ratios),
            probability_classes(logprobs),
            versions,
            drawn[:count].tolist(),
            strict=True,
        )
    ):
        said = "-" if by_probability == UNKNOWN else f"{logprob:.4g}"
        moved = "-" if by_ratio == UNKNOWN else f"{ratio:.4g}"
        kind = "" if is_drawn else " given"
        if "\n" in text and text.isspace():
            kind += " line"
        elif not text:
            kind += " none"
        # The head shows a turn's beginning, so a switch is marked only within a turn.
        head = heads.get(place, "")
        switch = "" if version == last or head else version
        last = version
        numbers = f"{number} {said} {moved} {version or '-'}"
        tokens.append(Token(text, f"{by_ratio} {by_probability}{kind}", numbers, switch, head))
    return tokens, rest


def _pieces(text: str, ends: Int32Array, num_tokens: int) -> list[str] | None:
    """Each token's characters, then the remaining text; None for bad ends."""
    if len(ends) != num_tokens or not num_tokens:
        return None
    places = [0, *ends.tolist()]
    if any(end < begin for begin, end in pairwise(places)) or places[-1] > len(text):
        return None
    pieces = [text[begin:end] for begin, end in pairwise(places)]
    return [*pieces, text[places[-1] :]]


def _versions(spans: tuple[Span, ...], count: int) -> list[str]:
    versions = [""] * count
    for span in spans:
        begin, end = max(span.start, 0), min(span.end, count)
        versions[begin:end] = [str(span.version) if span.is_drawn else GIVEN_WORD] * max(end - begin, 0)
    return versions
