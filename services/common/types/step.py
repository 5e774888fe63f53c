"""What a step's report says beside its losses: the completions it trained on, and where its time went."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MAX_REPORTED_PARTS = 32
"""Names of reward parts in a report: those that most completions have."""
MAX_REPORTED_SITES = 32
"""Sites in a report: those of which most tokens came."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartMean:
    """Mean of one named part of the reward, over the completions that have it."""

    name: str
    mean: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteTokens:
    """What one site made of the groups of a step."""

    site: str
    num_groups: int
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionNumbers:
    """The completions of a step's groups; lengths in tokens, the end token included.

    Example: CompletionNumbers(length_mean=212.5, length_p95=498.0, length_max=512, length_high_reward=180.0,
        length_low_reward=245.0, truncated_fraction=0.04, uniform_fraction=0.25,
        reward_parts=(PartMean(name="correct", mean=0.5),), sites=())
    """

    length_mean: float
    length_p95: float
    length_max: int
    length_high_reward: float | None = None
    """Mean over completions whose reward is above the step's mean; None without any, as where all rewards are equal."""
    length_low_reward: float | None = None
    """Mean over the others; None without any."""
    truncated_fraction: float
    """Share of completions that were cut at the longest length."""
    uniform_fraction: float
    """Share of groups in which all rewards are equal, so that no completion is better than another."""
    reward_parts: tuple[PartMean, ...] = ()
    sites: tuple[SiteTokens, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Where the time went since the step before ended, seconds; what is left of `period_s` is bookkeeping.

    `examining_s` is time without enough groups while some were being checked, so the checks hold the step up;
    `waiting_s` the rest of the time without enough groups, so the samplers or the link do. `publishing_s` rounds and
    copies the weights of a version and waits for a publication that takes longer than its step.
    """

    period_s: float
    waiting_s: float
    examining_s: float
    computing_s: float
    evaluating_s: float
    publishing_s: float


class LearnerPhase(enum.Enum):
    """What a learner's trainer is doing."""

    WAITING = "waiting"
    EXAMINING = "examining"
    COMPUTING = "computing"
    EVALUATING = "evaluating"
    PUBLISHING = "publishing"


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerProgress:
    """Where a learner stands: the step under way, and while it computes, how many of its micro-batches are done."""

    step: int
    phase: LearnerPhase
    phase_s: float
    """Seconds since the phase began."""
    micro_batches_done: int = 0
    micro_batches: int = 0
    """0 where they are not counted yet."""


def completions_from_row(row: Mapping[str, Any]) -> CompletionNumbers:
    """What `dataclasses.asdict` made of one."""
    nested = {
        "reward_parts": tuple(PartMean(**part) for part in row["reward_parts"]),
        "sites": tuple(SiteTokens(**site) for site in row["sites"]),
    }
    return CompletionNumbers(**{**row, **nested})
