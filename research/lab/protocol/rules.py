"""Whether an experiment keeps its protocol: long enough, on enough prompts, every arm with its rate, on unseen seeds.

    seeds          for
    100 to 102     learning rates (`protocol.tuning_seeds`), never reported
    200 to 299     experiments that may suggest something
    300 to 331     confirmations alone: experiments with `protocol.confirms`, which names those that suggested them

A seed is a warm start, prompts and noise. What was found on some seeds and is tested on them again agrees with itself,
so a confirmation runs on seeds that nothing else has seen, and no other experiment may spend them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

from heterorl.common.errors import ConfigError
from heterorl.common.tasks.task_config import build_task
from heterorl_research.lab.cell import Cell
from heterorl_research.lab.config import ExperimentConfig, ProtocolConfig
from heterorl_research.lab.pace import reach_versions
from heterorl_research.lab.protocol.rates import lender_of

CONFIRMATION = range(300, 332)
"""Seeds that are kept for confirmations."""
LEAST_TUNING_PROMPTS = 64
"""Held-out prompts that must be left for the trials of learning rates."""


def check(
    experiment: ExperimentConfig, cells: Sequence[Cell], *, suggested_on: Mapping[str, Collection[int]] | None = None
) -> None:
    """Refuse an experiment that breaks its own protocol; one without a protocol is kept from the reserved seeds alone.

    Args:
        experiment: with the rates that were chosen for it.
        cells: its runs.
        suggested_on: seeds of the experiments in `protocol.confirms`, by name.

    Raises:
        ConfigError: names the key and what the protocol wants of it.
    """
    protocol = experiment.protocol
    _check_seeds(experiment, suggested_on or {})
    if protocol is None:
        return
    swept = {variant.name for variant in experiment.variants if "lr" in variant.set}
    names = {algorithm.name for algorithm in experiment.algorithms}
    for borrower, lender in protocol.tune_as.items():
        if not {borrower, lender} <= names:
            raise ConfigError("protocol.tune_as", f"{borrower} or {lender} is no algorithm of this experiment")
    for cell in cells:
        _check_cell(cell, protocol)
        if protocol.tune and cell.variant not in swept and cell.arm_id not in protocol.chosen:
            raise ConfigError(
                "protocol.tune",
                f"no learning rate is chosen for {lender_of(cell, protocol.tune_as)}",
                action=f"heterorl lab tune {experiment.name}, or --set protocol.tune=false for one rate of all arms",
            )


def _check_seeds(experiment: ExperimentConfig, suggested_on: Mapping[str, Collection[int]]) -> None:
    seeds = set(experiment.seeds)
    confirms = experiment.protocol.confirms if experiment.protocol is not None else ()
    reserved = sorted(seeds & set(CONFIRMATION))
    if reserved and not confirms:
        raise ConfigError(
            "seeds",
            f"{reserved[0]} is kept for confirmations",
            action="name what suggested this experiment in protocol.confirms, or take seeds from 200 on",
        )
    if not confirms:
        return
    others = sorted(seeds - set(CONFIRMATION))
    if others:
        raise ConfigError(
            "seeds", f"a confirmation runs on seeds {CONFIRMATION[0]} to {CONFIRMATION[-1]}, not {others[0]}"
        )
    for name in confirms:
        if name not in suggested_on:
            raise ConfigError("protocol.confirms", f"{name} is no experiment that is known here")
        shared = sorted(seeds & set(suggested_on[name]))
        if shared:
            raise ConfigError("seeds", f"{name} suggested this on seed {shared[0]} already, so it cannot confirm it")


def _check_cell(cell: Cell, protocol: ProtocolConfig) -> None:
    regime = cell.regime
    least_steps = math.ceil(protocol.steps_per_lag * reach_versions(cell) * regime.steps_per_version)
    if regime.max_steps < least_steps:
        raise ConfigError("regime.max_steps", f"{cell.arm_id} needs {least_steps} steps by protocol.steps_per_lag")
    held_out = _held_out(cell) - regime.evaluation_offset
    if min(regime.num_evaluation, held_out) < protocol.least_prompts:
        raise ConfigError("regime.num_evaluation", f"fewer than protocol.least_prompts, {protocol.least_prompts}")
    if protocol.tune and held_out < regime.num_evaluation + LEAST_TUNING_PROMPTS:
        raise ConfigError("regime.num_evaluation", f"leaves fewer than {LEAST_TUNING_PROMPTS} prompts to tune on")
    if regime.evaluation_noise != "by_version":
        raise ConfigError(
            "regime.evaluation_noise", "must be by_version: equal noise makes the mean of several evaluations no better"
        )
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
