"""A claim as a test of paired seeds, and the rule that turns the seeds' differences into a verdict. Pure.

A test compares A with `ratio` x B, seed by seed, with D = A - ratio B: `above` claims mean D > margin, `below` claims
mean D < -margin, `within` claims |mean D| <= margin. Its p value is that of the paired t-test against the nearest
border of what is claimed, or of the equivalence test where the mean lies within. The p values of one experiment are
corrected by Holm, so that what another experiment finds changes no verdict of this one; a question that two claims ask,
each from its side, counts once. Then

    shown           corrected p < 0.05, and the mean is on the claimed side
    contradicted    corrected p < 0.05, and the mean is on the other side
    not shown       anything else: neither can be said
    not tested      there are no results, or fewer than two pairs of seeds
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from heterorl.common.evaluation.intervals import Interval, interval
from heterorl.lab.statistics.significance import equivalence_test, holm, sign_flip_test, t_test

Verdict = Literal["shown", "contradicted", "not shown", "not tested"]
Direction = Literal["above", "below", "within"]
LEVEL = 0.05
ONLINE = "no delay"


def versions(lag: int) -> str:
    """How results call a fixed delay of so many versions."""
    return ONLINE if lag == 0 else f"{lag} version{'s' if lag > 1 else ''}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """What is measured: a number of one algorithm at one delay, as a report names them."""

    algorithm: str
    delay: str
    metric: str = "last"
    variant: str = ""

    @property
    def label(self) -> str:
        """In a table."""
        arm = f"{self.algorithm} [{self.variant}]" if self.variant else self.algorithm
        return f"{self.metric} of {arm}, {self.delay}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """One sentence, who says it, and the test that answers it."""

    claim: str
    source: Literal["paper", "README"]
    experiment: str
    a: Side
    b: Side
    direction: Direction
    ratio: float = 1.0
    margin: float = 0.0
    task: str = "add3"

    @property
    def question(self) -> tuple[object, ...]:
        """What is asked of the results; two claims with the same question have the same p value."""
        if self.ratio == 1.0 and self.margin == 0.0:
            return (self.experiment, self.task, frozenset((self.a, self.b)))
        return (self.experiment, self.task, self.a, self.b, self.direction, self.ratio, self.margin)

    @property
    def test(self) -> str:
        """The test in a line."""
        factor = "" if self.ratio == 1.0 else f"{self.ratio:g} x "
        # No margin is 0, never -0.
        below = 0.0 - self.margin
        end = {"above": f"> {self.margin:g}", "below": f"< {below:g}", "within": f"within {self.margin:g}"}
        return f"{self.task}: {self.a.label} - {factor}{self.b.label} {end[self.direction]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What the seeds say about a claim; `p` before, `adjusted_p` after correction within its experiment."""

    claim: Claim
    difference: Interval | None
    p: float | None
    sign_flip_p: float | None
    adjusted_p: float | None = None

    @property
    def verdict(self) -> Verdict:
        """See the module docstring."""
        if self.difference is None or self.adjusted_p is None:
            return "not tested"
        if self.adjusted_p >= LEVEL:
            return "not shown"
        return "shown" if _is_claimed(self.claim, self.difference.mean) else "contradicted"


def judge(tested: Sequence[tuple[Claim, Sequence[float]]]) -> list[Finding]:
    """The verdict on each claim, given its differences A - ratio B by seed; the order stays."""
    p_values = [p_value(claim, differences) for claim, differences in tested]
    adjusted_p = _corrected({claim.question: p for (claim, _), p in zip(tested, p_values, strict=True)})
    return [
        Finding(
            claim=claim,
            difference=interval(differences) if len(differences) > 1 else None,
            p=p,
            sign_flip_p=sign_flip_test([value - _border(claim, differences) for value in differences]),
            adjusted_p=adjusted_p[claim.question],
        )
        for (claim, differences), p in zip(tested, p_values, strict=True)
    ]


def p_value(claim: Claim, differences: Sequence[float]) -> float | None:
    """p of one claim by itself; None below two pairs."""
    if len(differences) < 2:
        return None
    mean = math.fsum(differences) / len(differences)
    if claim.direction == "within" and abs(mean) <= claim.margin:
        return equivalence_test(differences, margin=claim.margin)
    border = _border(claim, differences)
    return t_test([value - border for value in differences])


def _corrected(p_values: Mapping[tuple[object, ...], float | None]) -> dict[tuple[object, ...], float | None]:
    adjusted: dict[tuple[object, ...], float | None] = {}
    for experiment in {question[0] for question in p_values}:
        family = [question for question in p_values if question[0] == experiment]
        adjusted |= zip(family, holm([p_values[question] for question in family]), strict=True)
    return adjusted


def _border(claim: Claim, differences: Sequence[float]) -> float:
    """The value of the mean difference where what is claimed ends; of two, the one that is nearer to the mean."""
    if claim.direction == "within":
        return math.copysign(claim.margin, math.fsum(differences))
    return claim.margin if claim.direction == "above" else -claim.margin


def _is_claimed(claim: Claim, mean: float) -> bool:
    if claim.direction == "within":
        return abs(mean) <= claim.margin
    return mean > claim.margin if claim.direction == "above" else mean < -claim.margin
