"""Claims about `gepo_whole`: one rule, one setting, at every delay and length; stated before any ran."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from heterorl_research.lab.claims.claim import ONLINE, Claim
from heterorl_research.lab.claims.terms import FAR, FARTHEST, ONE_RULE, declare, side

RULE = "gepo-whole"
LEVEL = 0.02
"""Accuracy by which a rule may end below another one and still count as level with it."""


class _Where(NamedTuple):
    experiment: str
    task: str
    delay: str
    words: str
    variant: str | None = ""


_ADDITION = _Where("whole", "add3", FAR, "64 versions behind, in the mean over three learning rates", variant=None)
_FARTHEST = _Where("whole_ends", "add3", FARTHEST, "256 versions behind")
_FRESH = _Where("whole_ends", "add3", ONLINE, "without delay")
_LONGER = _Where("whole_lengths", "t21", FAR, "64 versions behind with 21 tokens")
_LONGEST = _Where("whole_lengths", "t101", FAR, "64 versions behind with 101 tokens")

_ABOVE: tuple[tuple[_Where, tuple[str, ...]], ...] = (
    (_ADDITION, ("gepo", "gepo-1s", "topr")), (_FARTHEST, ("gepo",)), (_LONGER, ("gepo",)), (_LONGEST, ("gepo",)),
)  # fmt: skip
_LEVEL: tuple[tuple[_Where, tuple[str, ...]], ...] = (
    (_FARTHEST, ("topr", "gspo")), (_FRESH, ("gepo", "topr", "gspo")), (_LONGER, ("topr",)), (_LONGEST, ("topr",)),
)  # fmt: skip


def of_whole() -> Iterator[Claim]:
    """All of them: where it should end above, and where it should not end below."""
    for where, others in _ABOVE:
        for other in others:
            yield _ends(where, other, f"{RULE} ends above {other} {where.words}", margin=0.0)
    for where, others in _LEVEL:
        for other in others:
            yield _ends(where, other, _level(where, other), margin=-LEVEL)
    # Its results said so before anybody had asked.
    yield _ends(_ADDITION, "gepo-1s", _level(_ADDITION, "gepo-1s"), margin=-LEVEL, suggested_by=("whole",))


def _level(where: _Where, other: str) -> str:
    return f"{RULE} ends at most {LEVEL:g} below {other} {where.words}"


def _ends(where: _Where, other: str, sentence: str, *, margin: float, suggested_by: tuple[str, ...] = ()) -> Claim:
    rule, beside = (side(name, where.delay, variant=where.variant) for name in (RULE, other))
    return declare(
        ONE_RULE, sentence, where.experiment, rule, beside, direction="above", margin=margin, task=where.task,
        source="project", suggested_by=suggested_by,
    )  # fmt: skip
