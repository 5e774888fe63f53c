"""Whether an experiment keeps its protocol: long enough, on enough prompts, every arm with its learning rate."""

from __future__ import annotations

import math
from collections.abc import Sequence

from heterorl.common.errors import ConfigError
from heterorl.common.tasks.registry import build_task
from heterorl.lab.cell import Cell
from heterorl.lab.config import ExperimentConfig, ProtocolConfig
from heterorl.lab.pace import reach_versions


def check(experiment: ExperimentConfig, cells: Sequence[Cell]) -> None:
    """Refuse an experiment that breaks its own protocol; one without a protocol may do what it likes.

    Raises:
        ConfigError: names the key and what the protocol wants of it.
    """
    if experiment.protocol is None:
        return
    swept = {variant.name for variant in experiment.variants if "lr" in variant.set}
    for cell in cells:
        _check_cell(cell, experiment.protocol)
        if experiment.protocol.tune and cell.variant not in swept and cell.arm_id not in experiment.protocol.chosen:
            raise ConfigError(
                "protocol.tune",
                f"no learning rate is chosen for {cell.arm_id}",
                action=f"heterorl lab tune {experiment.name}, or --set protocol.tune=false for one rate of all arms",
            )


def _check_cell(cell: Cell, protocol: ProtocolConfig) -> None:
    regime = cell.regime
    least_steps = math.ceil(protocol.steps_per_lag * reach_versions(cell) * regime.steps_per_version)
    if regime.max_steps < least_steps:
        raise ConfigError("regime.max_steps", f"{cell.arm_id} needs {least_steps} steps by protocol.steps_per_lag")
    if min(regime.num_evaluation, _held_out(cell)) < protocol.least_prompts:
        raise ConfigError("regime.num_evaluation", f"fewer than protocol.least_prompts, {protocol.least_prompts}")
    if regime.last_evaluations < protocol.least_evaluations:
        raise ConfigError(
            "regime.last_evaluations", f"is below protocol.least_evaluations, {protocol.least_evaluations}"
        )
    if regime.max_steps % regime.evaluate_every:
        raise ConfigError("regime.evaluate_every", "does not divide max_steps, so the end is not evaluated")


def _held_out(cell: Cell) -> float:
    """Held-out prompts of a task; those of other tasks are in files, which are not read for this."""
    if cell.task.task.name.partition(":")[0] not in {"arithmetic", "progression"}:
        return math.inf
    return build_task(cell.task.task).num_evaluation_prompts
