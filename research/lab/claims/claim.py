"""A claim as a test of paired seeds, and the rule that turns the seeds' differences into a verdict. Pure.

A test compares A with `ratio` x B, seed by seed, with D = A - ratio B: `above` claims mean D > margin, `below` claims
mean D < -margin, `within` claims |mean D| <= margin. Its p value is that of the paired t-test against the nearest
border of what is claimed, or of the equivalence test where the mean lies within. A claim without B is about a share
of the seeds: `above` claims that more than `margin` of them have the property A, `below` fewer, by the exact binomial
test.

p values are corrected by Holm over all claims that answer one `question`, whatever experiment answers them; those on
exploratory evidence apart, so that a look at old data costs nothing. A test that two claims ask, each from its side,
counts once. Evidence is exploratory where the runs kept no protocol or were fewer seeds than it asks for or than five,
and where the claim was suggested by the very seeds that it is tested on. Then

    shown           corrected p < 0.05, and the mean is on the claimed side
    contradicted    corrected p < 0.05, and the mean is on the other side
    suggested       as shown, on exploratory evidence: a reason to test it, not to believe it
    doubted         as contradicted, on exploratory evidence
    not shown       anything else: neither can be said
    not tested      results that it rests on are not there or cannot be read, or there are fewer than two pairs of seeds
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from heterorl.common.evaluation.summary import wilson
from heterorl_research.lab.statistics.intervals import Interval, interval
from heterorl_research.lab.statistics.power import power
from heterorl_research.lab.statistics.significance import binomial_test, equivalence_test, holm, sign_flip_test, t_test

Verdict = Literal["shown", "contradicted", "suggested", "doubted", "not shown", "not tested"]
Direction = Literal["above", "below", "within"]
Evidence = Literal["exploratory", "protocol", "confirmation"]
LEVEL = 0.05
WORTH_FINDING = 0.05
"""Difference of accuracies that a test's power is given for."""
ONLINE = "no delay"


def versions(lag: int) -> str:
    """How results call a fixed delay of so many versions."""
    return ONLINE if lag == 0 else f"{lag} version{'s' if lag > 1 else ''}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """What is measured: a number of one algorithm at one delay, as a report names them.

    `variant` None is the mean over all variants of the experiment, such as a grid of learning rates.
    """

    algorithm: str
    delay: str
    metric: str = "last"
    variant: str | None = ""

    @property
    def label(self) -> str:
        """In a table."""
        variant = "all variants" if self.variant is None else self.variant
        arm = f"{self.algorithm} [{variant}]" if variant else self.algorithm
        return f"{self.metric} of {arm}, {self.delay}"

    @property
    def is_accuracy(self) -> bool:
        """Whether the number is an accuracy, or the gap between two."""
        return self.metric in {"last", "best", "gap", "smooth_gap", "warm_start_accuracy"} or self.metric.startswith(
            ("at:", "after:")
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """One sentence, who says it, which question it answers, and the test that answers it.

    `suggested_by` are experiments whose results suggested it; on seeds of theirs it is not confirmed.
    """

    claim: str
    source: Literal["paper", "README", "project"]
    question: str
    experiment: str
    a: Side
    b: Side | None
    direction: Direction
    ratio: float = 1.0
    margin: float = 0.0
    task: str = "add3"
    suggested_by: tuple[str, ...] = ()

    @property
    def key(self) -> tuple[object, ...]:
        """What is asked of the results; two claims with the same key have the same p value."""
        if self.b is not None and self.ratio == 1.0 and self.margin == 0.0:
            return (self.experiment, self.task, frozenset((self.a, self.b)))
        return (self.experiment, self.task, self.a, self.b, self.direction, self.ratio, self.margin)

    @property
    def test(self) -> str:
        """The test in a line."""
        if self.b is None:
            sign = ">" if self.direction == "above" else "<"
            return f"{self.task}: share of seeds with {self.a.label} {sign} {self.margin:g}"
        factor = "" if self.ratio == 1.0 else f"{self.ratio:g} x "
        # No margin is 0, never -0.
        below = 0.0 - self.margin
        end = {"above": f"> {self.margin:g}", "below": f"< {below:g}", "within": f"within {self.margin:g}"}
        return f"{self.task}: {self.a.label} - {factor}{self.b.label} {end[self.direction]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """A claim with what the results have for it: differences A - ratio B by seed, or 0 and 1 where there is no B."""

    claim: Claim
    differences: Sequence[float]
    evidence: Evidence = "protocol"

    @property
    def family(self) -> tuple[str, bool]:
        """Claims whose p values are corrected together."""
        return self.claim.question, self.evidence == "exploratory"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What the seeds say about a claim; `p` before, `adjusted_p` after correction within its question.

    `low` and `high` are the ends of the 95 % interval: t for differences, Wilson's for shares. `power` is the chance
    that so many pairs of this spread find a true difference of `WORTH_FINDING`, before correction; None for other
    numbers than accuracies.
    """

    claim: Claim
    evidence: Evidence
    num: int
    mean: float | None = None
    low: float | None = None
    high: float | None = None
    p: float | None = None
    sign_flip_p: float | None = None
    adjusted_p: float | None = None
    power: float | None = None

    @property
    def verdict(self) -> Verdict:
        """See the module docstring."""
        if self.mean is None or self.adjusted_p is None:
            return "not tested"
        if self.adjusted_p >= LEVEL:
            return "not shown"
        is_claimed = _is_claimed(self.claim, self.mean)
        if self.evidence == "exploratory":
            return "suggested" if is_claimed else "doubted"
        return "shown" if is_claimed else "contradicted"


def judge(tested: Sequence[Observed]) -> list[Finding]:
    """The verdict on each claim; the order stays."""
    p_values = [p_value(one.claim, one.differences) for one in tested]
    by_test: dict[tuple[tuple[str, bool], tuple[object, ...]], float | None] = {}
    for one, p in zip(tested, p_values, strict=True):
        # The same test may stand in a second claim that cannot be tested, as what suggested it is absent.
        if p is not None or (one.family, one.claim.key) not in by_test:
            by_test[one.family, one.claim.key] = p
    adjusted_p = _corrected(by_test)
    return [_finding(one, p, adjusted_p[one.family, one.claim.key]) for one, p in zip(tested, p_values, strict=True)]


def p_value(claim: Claim, differences: Sequence[float]) -> float | None:
    """p of one claim by itself; None below two pairs."""
    if len(differences) < 2:
        return None
    if claim.b is None:
        return binomial_test(round(math.fsum(differences)), len(differences), share=claim.margin)
    mean = math.fsum(differences) / len(differences)
    if claim.direction == "within" and abs(mean) <= claim.margin:
        return equivalence_test(differences, margin=claim.margin)
    border = _border(claim, differences)
    return t_test([value - border for value in differences])


def _finding(one: Observed, p: float | None, adjusted_p: float | None) -> Finding:
    claim, differences = one.claim, one.differences
    found = interval(differences)
    if found is None or found.half is None:
        return Finding(claim=claim, evidence=one.evidence, num=0)
    low, high = found.low, found.high
    if claim.b is None:
        low, high = wilson(round(math.fsum(differences)), found.num)
    return Finding(
        claim=claim,
        evidence=one.evidence,
        num=found.num,
        mean=found.mean,
        low=low,
        high=high,
        p=p,
        sign_flip_p=_sign_flips(claim, differences),
        adjusted_p=adjusted_p,
        power=_power(claim, found),
    )


def _sign_flips(claim: Claim, differences: Sequence[float]) -> float | None:
    if claim.b is None:
        return None
    return sign_flip_test([value - _border(claim, differences) for value in differences])


def _power(claim: Claim, found: Interval) -> float | None:
    if claim.b is None or not claim.a.is_accuracy or found.sd == 0.0:
        return None
    return power(WORTH_FINDING, sd=found.sd, num=found.num, level=LEVEL)


def _corrected(
    p_values: Mapping[tuple[tuple[str, bool], tuple[object, ...]], float | None],
) -> dict[tuple[tuple[str, bool], tuple[object, ...]], float | None]:
    adjusted: dict[tuple[tuple[str, bool], tuple[object, ...]], float | None] = {}
    for family in {family for family, _ in p_values}:
        members = [key for key in p_values if key[0] == family]
        adjusted |= zip(members, holm([p_values[key] for key in members]), strict=True)
    return adjusted


def _border(claim: Claim, differences: Sequence[float]) -> float:
    """The value of the mean difference where what is claimed ends; of two, the one that is nearer to the mean."""
    if claim.direction == "within":
        return math.copysign(claim.margin, math.fsum(differences))
    return claim.margin if claim.direction == "above" else -claim.margin


def _is_claimed(claim: Claim, mean: float) -> bool:
    if claim.direction == "within":
        return abs(mean) <= claim.margin
    if claim.b is None:
        return mean > claim.margin if claim.direction == "above" else mean < claim.margin
    return mean > claim.margin if claim.direction == "above" else mean < -claim.margin
