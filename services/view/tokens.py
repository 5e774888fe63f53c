"""A completion as a browser shows it: token by token, each with its colours and its numbers."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np

from heterorl.common.types.common import Float32Array, Int32Array
from heterorl.common.types.rollout import Span
from heterorl.common.types.sample import SampleRollout
from heterorl.view.scale import UNKNOWN, probability_classes, ratio_classes


class Token(NamedTuple):
    """One token. `numbers` are id, sampler's log-prob, log-ratio and policy version, parted by blanks, "-" if unknown.

    `switch` is the version that writes from here on where it is another one than before; empty elsewhere.
    """

    text: str
    classes: str
    numbers: str
    switch: str


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
    logprobs = _at_most(rollout.sampler_logprobs, len(rollout.token_ids), count)
    ratios = _at_most(rollout.log_ratios, len(rollout.token_ids), count)
    versions = _versions(rollout.spans, count)
    tokens = []
    last = versions[0] if versions else ""
    for text, number, logprob, ratio, by_ratio, by_probability, version in zip(
        texts,
        rollout.token_ids[:count].tolist(),
        logprobs.tolist(),
        ratios.tolist(),
        ratio_classes(ratios),
        probability_classes(logprobs),
        versions,
        strict=True,
    ):
        said = "-" if by_probability == UNKNOWN else f"{logprob:.4g}"
        moved = "-" if by_ratio == UNKNOWN else f"{ratio:.4g}"
        kind = "" if text else " none"
        if "\n" in text and text.isspace():
            kind = " line"
        switch = "" if version == last else version
        last = version
        token = Token(text, f"{by_ratio} {by_probability}{kind}", f"{number} {said} {moved} {version or '-'}", switch)
        tokens.append(token)
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


def _at_most(values: Float32Array, num_tokens: int, count: int) -> Float32Array:
    """The first values, or as many that are none where there is not one a token."""
    return values[:count] if len(values) == num_tokens else np.full(count, np.nan, np.float32)


def _versions(spans: tuple[Span, ...], count: int) -> list[str]:
    versions = [""] * count
    for span in spans:
        begin, end = max(span.start, 0), min(span.end, count)
        versions[begin:end] = [str(span.version)] * max(end - begin, 0)
    return versions
