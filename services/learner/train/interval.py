"""How many optimizer steps a version holds: always the same, or as a bandit finds out; pure.

The program of arXiv 2508.17850 publishes after a step with a probability, and always after a step whose groups were as
many versions old as may be. What learns that probability, from the KL or the entropy since the last publication, is not
in its repository, so `ucb` is an algorithm of this project: UCB1 (Auer, Cesa-Bianchi and Fischer, 2002) over a set of
intervals. An interval is tried for so many steps; the utility of a trial is

    mean reward of its steps - mean reward of the trial before - price x versions published / steps

and the next interval is the one with the largest  mean utility + exploration x sqrt(2 ln(trials) / trials of it).

Rewards are of groups that were drawn some versions ago, so a trial should be longer than the delay. What was learned is
of this process: a restart begins anew.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal, Protocol

from pydantic import Field, model_validator

from heterorl.common.process.config import Config


class FixedIntervalConfig(Config):
    """Every version holds `steps_per_version` steps."""

    kind: Literal["fixed"] = "fixed"


class UcbIntervalConfig(Config):
    """A bandit chooses how many steps a version holds."""

    kind: Literal["ucb"] = "ucb"
    intervals: tuple[int, ...] = Field(default=(1, 2, 4, 8), min_length=2)
    """Steps between publications to choose from. The coordinator's groups_per_version should be groups_per_step times
    the largest one; a learner refuses to lead where so many groups are never under way."""
    trial_steps: int = Field(default=32, ge=1)
    """Steps for which an interval is tried; more than the delay takes."""
    price: float = Field(default=0.01, ge=0)
    """Mean reward that a version is worth when every step makes one: what its bytes cost."""
    exploration: float = Field(default=0.02, ge=0)
    """Weight of what is not known yet, in units of the mean reward."""

    @model_validator(mode="after")
    def _check_intervals(self) -> UcbIntervalConfig:
        if min(self.intervals) < 1 or len(set(self.intervals)) < len(self.intervals):
            raise ValueError("intervals are different numbers of at least 1")
        if self.trial_steps < max(self.intervals):
            raise ValueError("trial_steps is below the largest interval: no version would end in a trial")
        return self


PublishIntervalConfig = Annotated[FixedIntervalConfig | UcbIntervalConfig, Field(discriminator="kind")]


class Interval(Protocol):
    """Decides how many steps a version holds."""

    @property
    def steps(self) -> int:
        """Steps of the version that is begun now."""
        ...

    def note(self, rewards: Sequence[float]) -> None:
        """Take note of a version's steps: the mean reward of each."""
        ...


@dataclass(frozen=True, slots=True)
class FixedInterval:
    """Implements Interval with one number."""

    steps: int

    def note(self, rewards: Sequence[float]) -> None:
        """Learn nothing."""


@dataclass(slots=True)
class UcbInterval:
    """Implements Interval as the module says; the same rewards make the same choices."""

    config: UcbIntervalConfig
    steps: int = field(init=False)
    """Steps of the version that is begun now."""
    _utilities: dict[int, list[float]] = field(init=False)
    _rewards: list[float] = field(default_factory=list)
    _num_versions: int = 0
    _before: float | None = None
    """Mean reward of the trial before."""

    def __post_init__(self) -> None:
        self._utilities = {interval: [] for interval in self.config.intervals}
        self.steps = self.config.intervals[0]

    def note(self, rewards: Sequence[float]) -> None:
        """Add a version to the trial; where that ends it, choose the next interval."""
        if not rewards:
            return
        self._rewards += rewards
        self._num_versions += 1
        if len(self._rewards) < self.config.trial_steps:
            return
        mean = math.fsum(self._rewards) / len(self._rewards)
        if self._before is not None:
            cost = self.config.price * self._num_versions / len(self._rewards)
            self._utilities[self.steps].append(mean - self._before - cost)
        self._before, self._rewards, self._num_versions = mean, [], 0
        self.steps = self._choose()

    def _choose(self) -> int:
        trials = sum(len(found) for found in self._utilities.values())

        def bound(interval: int) -> float:
            found = self._utilities[interval]
            if not found:
                return math.inf
            width = math.sqrt(2.0 * math.log(trials) / len(found))
            return math.fsum(found) / len(found) + self.config.exploration * width

        # Of equal ones the first, so the order of the configuration is that of the first trials.
        return max(self.config.intervals, key=bound)


def make_interval(config: FixedIntervalConfig | UcbIntervalConfig, *, steps_per_version: int) -> Interval:
    """The decision that a configuration asks for."""
    return UcbInterval(config) if isinstance(config, UcbIntervalConfig) else FixedInterval(steps_per_version)


def largest(config: FixedIntervalConfig | UcbIntervalConfig, *, steps_per_version: int) -> int:
    """Most steps that a version may hold."""
    return max(config.intervals) if isinstance(config, UcbIntervalConfig) else steps_per_version
