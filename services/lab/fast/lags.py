"""Which version's rollouts each step trains on: the delay of the cell, asked of the sampler's own model of it."""

from __future__ import annotations

from heterorl.common.errors import ConfigError
from heterorl.lab.cell import Cell
from heterorl.sampler.policy.delay import Visibility
from heterorl.sampler.policy.delay_models import FixedDelay, NoDelay


def sources(cell: Cell) -> list[int]:
    """The version that draws the rollouts of each step; step s, from 0, builds on version s.

    Work for a version is handed out when the version before it is published, and is done before the next: a sampler
    draws for step s with the newest version that its delay lets through while s is the head.

    Raises:
        ConfigError: the delay counts seconds, or is drawn by several samplers.
    """
    delay = cell.delay
    if not isinstance(delay, NoDelay) and delay.unit == "seconds":
        raise ConfigError("delays.unit", "seconds need the services' clocks", action="choose the engine services")
    if not isinstance(delay, NoDelay | FixedDelay) and cell.regime.num_samplers > 1:
        raise ConfigError("regime.num_samplers", "one sampler alone has a random delay in the engine fast")
    visibility = Visibility(delay, seed=1000 * cell.seed)
    found: list[int] = []
    current = -1
    for head in range(cell.regime.max_steps):
        visibility.see(head, float(head))
        current, _ = visibility.target(float(head), current=current)
        found.append(current)
    return found


def served(found: list[int]) -> dict[int, list[int]]:
    """The steps that each version draws rollouts for."""
    steps: dict[int, list[int]] = {}
    for step, version in enumerate(found):
        steps.setdefault(version, []).append(step)
    return steps
