"""Which version's rollouts each step trains on: the delay of the cell, asked of the sampler's own model of it."""

from __future__ import annotations

from heterorl.sampler.delay import Visibility
from heterorl_research.lab.cell import Cell
from heterorl_research.lab.pace import delay_seed, in_steps


def sources(cell: Cell) -> list[int]:
    """The version that draws the rollouts of each step; step s, from 0, builds on version s.

    Work for a version is handed out when the version before it is published, and is done before the next: a sampler
    draws for step s with the newest version that its delay lets through while s is the head. Refresh intervals in
    seconds pass while steps of `seconds_per_step` do.

    Args:
        cell: within the scope of this engine.
    """
    visibility = Visibility(in_steps(cell), seed=delay_seed(cell, 0))
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
