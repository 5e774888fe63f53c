"""One run of an experiment: which algorithm, delay, task, variant and seed; and its name."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from heterorl.common.errors import ConfigError
from heterorl.sampler.delay import DelayConfig, NoDelay, upper_end
from heterorl_research.lab.config import AlgorithmConfig, ExperimentConfig, LabTaskConfig, RegimeConfig, VariantConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """Everything that a run depends on."""

    algorithm: AlgorithmConfig
    delay: DelayConfig
    task: LabTaskConfig
    variant: str
    seed: int
    regime: RegimeConfig

    @property
    def delay_value(self) -> float:
        """The largest delay, in its unit."""
        return upper_end(self.delay)

    @property
    def delay_default(self) -> float:
        """What is taken off every drawn delay, in its unit."""
        return float(getattr(self.delay, "default", 0.0))

    @property
    def delay_unit(self) -> str:
        """`versions` or `seconds`."""
        return "versions" if isinstance(self.delay, NoDelay) else self.delay.unit

    @property
    def is_refreshed(self) -> bool:
        """Whether the delay is the time between two refreshes of a site's weights, not the way of a message."""
        return not isinstance(self.delay, NoDelay) and self.delay.semantics == "refresh_interval"

    @property
    def arm_id(self) -> str:
        """Name of what is compared: all of the run but its seed."""
        delay = f"{self.delay.kind}{self.delay_value:g}{self.delay_unit[0]}"
        if self.is_refreshed:
            delay += "r"
        if self.delay_default:
            delay += f"d{self.delay_default:g}"
        variant = f"-{self.variant}" if self.variant else ""
        return f"{self.task.name}-{self.algorithm.name}-{delay}{variant}"

    @property
    def run_id(self) -> str:
        """Name of the run's file."""
        return f"{self.arm_id}-s{self.seed}"


def list_cells(experiment: ExperimentConfig) -> list[Cell]:
    """All runs; seed by seed, so that an unfinished experiment has whole comparisons.

    A run's `regime.lr` is its variant's, else what the protocol has chosen for its arm, else its task's, else the
    regime's.

    Raises:
        ConfigError: a variant sets a key that does not exist, or two runs have one name.
    """
    cells = [
        _with_lr(
            experiment,
            variant,
            Cell(
                algorithm=_varied_algorithm(algorithm, variant),
                delay=delay,
                task=task,
                variant=variant.name,
                seed=seed,
                regime=_varied_regime(experiment.regime, variant),
            ),
        )
        for seed in experiment.seeds
        for task in experiment.tasks
        for variant in experiment.variants
        for delay in experiment.delays
        for algorithm in experiment.algorithms
    ]
    names = [cell.run_id for cell in cells]
    twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    if twice:
        raise ConfigError("algorithms", f"two runs are called {twice[0]}", action="give them different names")
    return cells


def _with_lr(experiment: ExperimentConfig, variant: VariantConfig, cell: Cell) -> Cell:
    chosen = experiment.protocol.chosen if experiment.protocol is not None else {}
    lr = chosen.get(cell.arm_id, cell.task.lr)
    if lr is None or "lr" in variant.set:
        return cell
    return replace(cell, regime=cell.regime.model_copy(update={"lr": lr}))


def _varied_regime(regime: RegimeConfig, variant: VariantConfig) -> RegimeConfig:
    changes = {key: value for key, value in variant.set.items() if not key.startswith("loss.")}
    unknown = sorted(set(changes) - set(RegimeConfig.model_fields))
    if unknown:
        raise ConfigError(f"variants.set.{unknown[0]}", "is no key of regime")
    return RegimeConfig.model_validate({**regime.model_dump(), **changes})


def _varied_algorithm(algorithm: AlgorithmConfig, variant: VariantConfig) -> AlgorithmConfig:
    changes = {key.removeprefix("loss."): value for key, value in variant.set.items() if key.startswith("loss.")}
    if not changes:
        return algorithm
    loss: dict[str, Any] = {**algorithm.loss.model_dump(), **changes}
    return AlgorithmConfig.model_validate({"name": algorithm.name, "loss": loss})
