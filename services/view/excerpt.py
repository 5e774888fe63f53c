"""Where in a sample a search found something, with the words around it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from heterorl.common.types.sample import Sample

BEFORE, AFTER = 50, 110
"""Characters on either side of a hit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Excerpt:
    """A hit: `where` is "prompt" or the number of a completion."""

    where: str
    before: str
    hit: str
    after: str


def excerpt_of(sample: Sample, needle: str) -> Excerpt | None:
    """The first hit, in a completion before the prompt; None where letters differ in ways of their own."""
    pattern = re.compile(re.escape(needle), re.IGNORECASE)
    texts = [(f"completion {i + 1}", rollout.completion) for i, rollout in enumerate(sample.rollouts)]
    for where, text in (*texts, ("prompt", sample.prompt)):
        found = pattern.search(text)
        if found is not None:
            begin, end = found.span()
            return Excerpt(
                where=where,
                before=("..." if begin > BEFORE else "") + text[max(0, begin - BEFORE) : begin],
                hit=text[begin:end],
                after=text[end : end + AFTER] + ("..." if len(text) > end + AFTER else ""),
            )
    return None
