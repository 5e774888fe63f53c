"""The sets that a site has the data of: their tasks, with rewards in processes that can be killed. Loads data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from heterorl.common.errors import ConfigError
from heterorl.common.evaluation.config import EvaluationSetConfig
from heterorl.common.tasks.registry import TaskConfig, apart, build_task
from heterorl.common.tasks.task import Measure, Task
from heterorl.common.types.evaluation import EvaluationSet

REWARD_WORKERS = 4
"""Where nobody says how many: completions end faster at a sampler than one process scores them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteSet:
    """A set and its task."""

    name: str
    task: Task

    @property
    def stated(self) -> EvaluationSet:
        """What the coordinator is told of it."""
        return EvaluationSet(name=self.name, task_digest=self.task.digest, num_prompts=self.task.num_evaluation_prompts)


def with_workers(config: TaskConfig) -> TaskConfig:
    """A sampler's task: with its own number of processes where none is stated."""
    if "reward_workers" in config.model_fields_set:
        return config
    return config.model_copy(update={"reward_workers": REWARD_WORKERS})


def open_set(config: EvaluationSetConfig, *, measure: Measure | None, notes: Path | None) -> SiteSet:
    """Load a set's task.

    Args:
        config: of the set.
        measure: counts a prompt's tokens, for sets whose prompts are bounded.
        notes: file that keeps which commits branches of the hub stood at; None keeps none.

    Raises:
        ConfigError: its data cannot be read, or holds out nothing.
    """
    settings = with_workers(config.task)
    task = apart(build_task(settings, measure=measure, notes=notes), settings)
    if not task.num_evaluation_prompts:
        raise ConfigError(f"evaluation.{config.name}.task", "has no held-out prompts")
    return SiteSet(name=config.name, task=task)


def open_sets(
    configs: Sequence[EvaluationSetConfig], *, measure: Measure | None, notes: Path | None
) -> tuple[SiteSet, ...]:
    """Load every set's task; see `open_set`."""
    return tuple(open_set(config, measure=measure, notes=notes) for config in configs)
