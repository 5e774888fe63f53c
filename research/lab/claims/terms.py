"""The questions, the delays and the makers of claims. Claims of one question are corrected together.

A fixed delay of 64 versions is not what the paper calls 64: its log shows a saw-tooth of 0 to 57, on average 26.5,
which `sawtooth` runs. Fixed delays are harsher, by more than a factor of two.
"""

from __future__ import annotations

from typing import Any

from heterorl_research.lab.claims.claim import ONLINE, Claim, Side, versions

NEAR, FAR, FARTHER, FARTHEST = versions(8), versions(64), versions(128), versions(256)
SAW = "sawtooth <= 57 versions"
SECONDS = {
    "lognormal": "lognormal refresh less 60 <= 1920 s",
    "Weibull": "weibull refresh less 60 <= 1920 s",
    "exponential": "exponential refresh less 60 <= 1920 s",
    "longer lognormal": "lognormal refresh less 400 <= 3600 s",
}
WHEN = {
    ONLINE: "Without delay",
    SAW: "Under a saw-tooth of 0 to 57 versions",
    **{delay: f"{delay} behind" for delay in (NEAR, FAR, FARTHER, FARTHEST)},
    **{delay: f"With {law} delays of 60 to 1,920 s" for law, delay in SECONDS.items()},
    SECONDS["longer lognormal"]: "With lognormal delays of 400 to 3,600 s",
}
"""How a claim begins, by its delay: the sentence says when it holds."""
CONFIRMED = "gepo-1s"
"""The candidate that experiment `confirm` tests."""
PILOT = ("stale256", "recommend")
"""What suggested that GEPO's upper clip should go."""

DELAY = "Does GEPO bear a delay?"
GSPO = "GEPO or GSPO under delay?"
FRESH = "Which rule is best without delay?"
HIGHEST = "Does GEPO reach the highest scores?"
GAP = "How far does the last accuracy fall below the best?"
COLLAPSE = "Who collapses?"
TOKEN = "Do methods with one weight per token fail under delay?"
OTHERS = "GEPO or another method under delay?"
SECOND = "Does a reference model help under delay?"
STALE = "GEPO or a method made for stale data?"
WHY = "Why: divergence, variance, error"
CLIP = "Which half of the clip acts?"
BETTER = "Is there a better rule than GEPO?"
ONE_RULE = "Is one rule with one setting good everywhere?"
LENGTH = "What makes GEPO fall with 101 tokens?"
CLIFF = "Which rule for completions of 301 tokens?"
GATES = "Is it the size of the gate, or the weight?"


def declare(question: str, claim: str, experiment: str, a: Side, b: Side | None, **test: Any) -> Claim:
    """A claim, of the paper unless `test` names another source."""
    return Claim(**{"source": "paper", **test}, question=question, claim=claim, experiment=experiment, a=a, b=b)


def read_off(question: str, claim: str, experiment: str, a: Side, b: Side | None, **test: Any) -> Claim:
    """What the README says it has read off this very experiment."""
    seen = {"source": "README", "suggested_by": tuple(experiment.split("+"))}
    return declare(question, claim, experiment, a, b, **{**seen, **test})


def side(algorithm: str, delay: str = FAR, metric: str = "last", variant: str | None = "") -> Side:
    """One side of a claim: unless it says so, the last accuracy 64 versions behind."""
    return Side(algorithm=algorithm, delay=delay, metric=metric, variant=variant)
