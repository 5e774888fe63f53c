"""Regions, arms, the keys of each arm, and the bytes that a scheme sends.

Everything here is a value or a pure function.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

SITES = ("near", "middle", "far", "edge")
"""Names of the samplers; at one site there are as many, without a line."""
ROWS, GROUP_SIZE, GROUPS_PER_VERSION = 32, 8, 32
SECONDS_PER_TOKEN = 0.02
"""Time of one token of an engine, all its rows at once."""
MEDIAN_TOKENS, SPREAD, MAX_TOKENS = 80, 0.5, 192
"""Lengths of completions are log-normal: median, standard deviation of the logarithm, and the longest."""
LONG_TOKENS = 4096
"""Length of a completion of a reasoning model, to which a run's times are compared."""
STEP_SHARE = 0.6
"""A learner's step, as a share of the time in which the engines make its groups."""
SLOWER = 10.0
CUT = "far"
"""The region whose line is cut."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """One line: there and back, bits a second each way, share of lost packets."""

    rtt_s: float
    bits_per_s: float
    loss: float


REGIONS = dict(
    zip(
        SITES,
        (
            Region(rtt_s=0.02, bits_per_s=1e9, loss=0.001),
            Region(rtt_s=0.08, bits_per_s=1e8, loss=0.002),
            Region(rtt_s=0.15, bits_per_s=1e8, loss=0.005),
            Region(rtt_s=0.25, bits_per_s=2e7, loss=0.01),
        ),
        strict=True,
    )
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One way to run; `scheme` is what a version costs a sampler: `full`, `sparse`, or empty for heterorl as it is."""

    name: str
    title: str
    is_far: bool = True
    scheme: str = ""
    is_cut: bool = False
    slow_site: str = ""

    def seconds_per_token(self, site: str) -> float:
        """Of a site's engine."""
        return SECONDS_PER_TOKEN * (SLOWER if site == self.slow_site else 1.0)

    @property
    def capacity(self) -> float:
        """All engines' speed as a share of equal engines'."""
        return sum(SECONDS_PER_TOKEN / self.seconds_per_token(site) for site in SITES) / len(SITES)


ONE = "one-site"
ARMS = (
    Arm(name=ONE, title="one site, no line", is_far=False),
    Arm(name="full", title="a full snapshot of each version", scheme="full"),
    Arm(name="sparse", title="positions and values of what changed", scheme="sparse"),
    Arm(name="heterorl", title="heterorl"),
    Arm(name="outage", title="heterorl, one region cut off", is_cut=True),
    Arm(name="slow", title="heterorl, one region ten times slower", slow_site=SITES[-1]),
)


def mean_tokens() -> float:
    """Mean length of a completion, without the bound: exp(mu + sigma^2 / 2)."""
    return MEDIAN_TOKENS * math.exp(SPREAD**2 / 2)


def groups_per_s() -> float:
    """Groups that one engine can make in a second."""
    return ROWS / (SECONDS_PER_TOKEN * mean_tokens() * GROUP_SIZE)


def version_s() -> float:
    """Seconds in which all engines make the groups of one version."""
    return GROUPS_PER_VERSION / (groups_per_s() * len(SITES))


def keys_of(arm: Arm, *, staleness: int, outage_s: float) -> dict[str, int]:
    """The coordinator's keys; in an outage as docs/recipes.md sizes them: for its groups, and for their age."""
    if not arm.is_cut:
        return {"max_staleness_versions": staleness, "max_outstanding_groups": 4 * GROUPS_PER_VERSION}
    # Each site may hold an equal share: what it makes in the outage, and what it had before.
    held = math.ceil(groups_per_s() * outage_s) + GROUPS_PER_VERSION
    return {
        "max_staleness_versions": max(staleness, math.ceil(outage_s / version_s()) + staleness),
        "max_outstanding_groups": held * len(SITES),
    }


def scheme_bytes(scheme: str, sizes: Sequence[dict[str, Any]], *, have: int, want: int) -> int:
    """Bytes that a scheme sends from version `have` to `want`: one snapshot, or each version's changes in turn.

    `sizes` has a row for each version, with the bytes of both schemes.
    """
    if scheme == "full":
        return int(next(row["full"] for row in sizes if row["version"] == want))
    return sum(int(row["sparse"]) for row in sizes if have < row["version"] <= want)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Seconds of the measurement."""

    span_s: float
    outage_s: float


START_AND_END_S = 56.0
"""Of a run besides its span: processes that load, the first versions, the end."""
LONGEST_OUTAGE_S = 200.0
OUTAGE_SHARE = 0.4
"""Of a span: afterwards there is time to deliver."""


def lengths_of(minutes: float, repeats: int, *, num_arms: int, outage_s: float | None) -> Lengths:
    """How long each span is, so that all runs fit into the minutes."""
    span_s = max(10.0, 60.0 * minutes / (repeats * num_arms) - START_AND_END_S)
    longest = min(LONGEST_OUTAGE_S, OUTAGE_SHARE * span_s)
    return Lengths(span_s=round(span_s, 1), outage_s=round(longest if outage_s is None else outage_s, 1))


def order_of(repeat: int, arms: Sequence[Arm]) -> list[Arm]:
    """The arms of one repeat; each repeat begins with another one, so that no arm always runs first."""
    place = repeat % len(arms)
    return [*arms[place:], *arms[:place]]
