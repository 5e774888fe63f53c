"""A completion as a browser shows it: token by token, each with its colours and its numbers."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

from heterorl.common.types.common import Int32Array
from heterorl.common.types.rollout import Span
from heterorl.common.types.sample import SampleRollout
from heterorl.common.types.trajectory import spread
from heterorl.view.scale import UNKNOWN, probability_classes, ratio_classes

GIVEN_WORD = "given"
"""In place of a version: the environment wrote the token."""


class Token(NamedTuple):
    """One token. `numbers` are id, sampler's log-prob, log-ratio and policy version, parted by blanks, "-" if unknown.

    `switch` is the version that writes from here on where it is another one than before; empty elsewhere. `head` says
    who wrote the turn that begins here; empty elsewhere, and in a single completion.
    """

    text: str
    classes: str
    numbers: str
    switch: str
    head: str


def tokens_of(rollout: SampleRollout, *, limit: int) -> tuple[list[Token], str]:
    """The first `limit` tokens, and the text behind them; without text the tokens show their ids.

    Where nobody said which characters are whose, the whole text is behind no tokens.
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
        # A head says who writes; within a turn another version is marked.
        head = heads.get(place, "")
        switch = "" if version == last or head else version
        last = version
        numbers = f"{number} {said} {moved} {version or '-'}"
        tokens.append(Token(text, f"{by_ratio} {by_probability}{kind}", numbers, switch, head))
    return tokens, rest


def _pieces(text: str, ends: Int32Array, num_tokens: int) -> list[str] | None:
    """The characters of each token, and last what stands behind all; None where the ends are not of this text."""
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
