"""How a cell's delay is served by the lab: how fast groups are made, how many are under way, and to which policy.

Where a delay counts versions, work is handed out to the policy alone that the delay lets through at the head. Without
that a site that has not heard of the newest version yet would answer with the policy before, which is too old by one.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from typing import Any, cast

from heterorl.common.api import CoordinatorApi
from heterorl.common.types.rollout import WorkGrant
from heterorl.sampler.delay import DelayConfig, FixedDelay, NoDelay, Visibility
from heterorl_research.lab.cell import Cell

STEP_S = 1.0
"""Virtual seconds of a learner step."""
ASK_AGAIN_S = 0.01
"""Virtual seconds after which a site that was refused by the gate asks again."""


def counts_versions(cell: Cell) -> bool:
    """Whether the delay is one in versions; none is 0 versions."""
    return isinstance(cell.delay, NoDelay) or cell.delay.unit == "versions"


def reach_versions(cell: Cell) -> int:
    """Versions that the delay, there and back where messages travel, can be behind."""
    if counts_versions(cell):
        return math.ceil(cell.delay_value)
    ways = 1 if cell.is_refreshed else 2
    return math.ceil(ways * cell.delay_value / cell.regime.seconds_per_step)


def group_s(cell: Cell) -> float:
    """Virtual seconds to generate a group.

    Delays in seconds: all samplers together are exactly as fast as the learner unless `sampler_speed` says otherwise,
    because a faster site fills the queue and groups grow old there. Delays in versions: a little faster, to be ready in
    time.
    """
    pace = 0.8 if counts_versions(cell) else 1.0 / cell.regime.sampler_speed
    return pace * STEP_S * cell.regime.num_samplers / cell.regime.groups_per_step


def versions_in_flight(cell: Cell) -> int:
    """Versions whose groups may be under way: one more than the delay of a message takes."""
    if counts_versions(cell):
        return 1
    if cell.regime.versions_in_flight:
        return cell.regime.versions_in_flight
    # A site that refreshes late answers at once: its groups are old, not long under way.
    return 2 if cell.is_refreshed else reach_versions(cell) + 2


def groups_per_version(cell: Cell) -> int:
    """Groups that are made for a version."""
    return cell.regime.groups_per_step * cell.regime.steps_per_version


def delay_seed(cell: Cell, number: int) -> int:
    """Seed of the delays of a cell's sampler."""
    return 1000 * cell.seed + number


def in_steps(cell: Cell) -> DelayConfig:
    """The delay of a cell on a clock whose second is a step."""
    if isinstance(cell.delay, NoDelay):
        return cell.delay
    return cell.delay.model_copy(update={"time_scale": cell.regime.seconds_per_step / STEP_S})


def lags(cell: Cell, number: int = 0) -> list[int]:
    """How many versions a sampler of a cell is behind at each version, up to the last; the staleness of its groups.

    Raises:
        ValueError: the delay counts seconds.
    """
    if not isinstance(cell.delay, NoDelay) and cell.delay.unit == "seconds":
        raise ValueError("a delay in seconds has no lag in versions of its own")
    visible, current, found = Visibility(cell.delay, seed=delay_seed(cell, number)), -1, []
    for head in range(cell.regime.max_steps + 1):
        visible.see(head, 0.0)
        current, _ = visible.target(0.0, current=current)
        found.append(head - current)
    return found


def needs_gate(cell: Cell) -> bool:
    """Whether the bound on staleness alone does not make a site wait for the policy that it should have."""
    return counts_versions(cell) and not isinstance(cell.delay, NoDelay | FixedDelay)


class PolicyGate:
    """Stands before a coordinator and hands work to one site for the right policy alone."""

    def __init__(self, inner: CoordinatorApi, *, lags: list[int], head: Callable[[], Awaitable[int]]) -> None:
        """Make one.

        Args:
            inner: the coordinator.
            lags: versions behind, at each head.
            head: asks for the newest version.
        """
        self._inner = inner
        self._lags = lags
        self._head = head

    def api(self) -> CoordinatorApi:
        """The coordinator behind it."""
        return cast("CoordinatorApi", self)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def lease_work(self, *, policy_version: int, **asked: Any) -> WorkGrant:
        """Pass the question on where the policy is the one for the head; else say when to ask again."""
        head = await self._head()
        wanted = head - self._lags[min(head, len(self._lags) - 1)]
        if policy_version != wanted:
            return WorkGrant(assignments=(), reason=f"waits for version {wanted}", retry_after_s=ASK_AGAIN_S)
        return await self._inner.lease_work(policy_version=policy_version, **asked)
