"""Claims about `gepo_whole`: one rule, one setting, at every delay and length; stated before any ran."""

from __future__ import annotations

from collections.abc import Iterator

from heterorl.lab.claims.claim import ONLINE, Claim
from heterorl.lab.claims.terms import FAR, FARTHEST, ONE_RULE, declare, side

RULE = "gepo-whole"
LEVEL = 0.02
"""Accuracy by which a rule may end below another one and still count as level with it."""

_ADDITION = ("whole", "add3", FAR, None, "64 versions behind, in the mean over three learning rates")
_FARTHEST = ("whole_ends", "add3", FARTHEST, "", "256 versions behind")
_FRESH = ("whole_ends", "add3", ONLINE, "", "without delay")
_LONGER = ("whole_lengths", "t21", FAR, "", "64 versions behind with 21 tokens")
_LONGEST = ("whole_lengths", "t101", FAR, "", "64 versions behind with 101 tokens")

_ABOVE = (
    (_ADDITION, ("gepo", "gepo-1s", "topr")), (_FARTHEST, ("gepo",)), (_LONGER, ("gepo",)), (_LONGEST, ("gepo",)),
)  # fmt: skip
_LEVEL = (
    (_FARTHEST, ("topr", "gspo")), (_FRESH, ("gepo", "topr", "gspo")), (_LONGER, ("topr",)), (_LONGEST, ("topr",)),
)  # fmt: skip


def of_whole() -> Iterator[Claim]:
    """All of them: where it should end above, and where it should not end below."""
    for (experiment, task, delay, variant, words), others in _ABOVE:
        for other in others:
            yield declare(
                ONE_RULE, f"{RULE} ends above {other} {words}", experiment, side(RULE, delay, variant=variant),
                side(other, delay, variant=variant), direction="above", task=task, source="project",
            )  # fmt: skip
    for (experiment, task, delay, variant, words), others in _LEVEL:
        for other in others:
            yield declare(
                ONE_RULE, f"{RULE} ends at most {LEVEL:g} below {other} {words}", experiment,
                side(RULE, delay, variant=variant), side(other, delay, variant=variant),
                direction="above", margin=-LEVEL, task=task, source="project",
            )  # fmt: skip
