"""Configuration of evaluation sets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

from pydantic import Field, model_validator

from heterorl.common.process.config_file import Config
from heterorl.common.tasks.task_config import TaskConfig
from heterorl.common.types.evaluation import MAX_HELD_OUT, MAX_SAMPLES, EvaluationDraws


class DrawsConfig(Config):
    """Prompts and sampling of a set."""

    name: str = Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")
    """Name of the set, equal at coordinator and sites."""
    num_prompts: int = Field(default=64, ge=1, le=MAX_HELD_OUT)
    """Held-out prompts, from the first on; at most the task's."""
    samples_per_prompt: int = Field(default=1, ge=1, le=MAX_SAMPLES)
    """Completions of each prompt, n: avg@n is their mean; pass@k has k = 1, 2, 4, ... and n."""
    temperature: float = Field(default=0.0, ge=0)
    """Softmax temperature; 0 is greedy."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus mass; 1: off."""
    max_new_tokens: int = Field(default=512, ge=1, le=1 << 20)
    """Longest completion."""
    seed: int = Field(default=0, ge=0, lt=1 << 63)
    """Seed of the draws, the same for every version."""
    pass_reward: float = Field(default=1.0, allow_inf_nan=False)
    """Smallest reward of a right completion, for pass@k."""

    @model_validator(mode="after")
    def _check_samples(self) -> DrawsConfig:
        if self.temperature == 0 and self.samples_per_prompt > 1:
            raise ValueError("temperature 0 repeats one completion; raise it or set samples_per_prompt to 1")
        return self

    @property
    def draws(self) -> EvaluationDraws:
        own = self.model_dump(include={field.name for field in fields(EvaluationDraws)})
        return EvaluationDraws(num_samples=self.samples_per_prompt, **own)


class PlannedSetConfig(DrawsConfig):
    """A set that sites with its data evaluate a run's versions on."""

    every_versions: int = Field(default=1, ge=1)
    """Versions between evaluations; a run's last version is evaluated too."""
    task_digest: str = Field(default="", pattern=r"^([0-9a-f]{64})?$")
    """Digest of the set's task, from `heterorl evaluate --json`; empty: the first evaluating site's."""


class EvaluationSetConfig(DrawsConfig):
    """A set of this site; its draws count only in `heterorl evaluate`."""

    task: TaskConfig = TaskConfig()
    """Held-out prompts and their reward, equal at every site that evaluates the set."""


def ignored_draws(sets: Sequence[EvaluationSetConfig]) -> str:
    """Words for a site's keys that no run takes, or none."""
    drawn = DrawsConfig.model_fields.keys() - {"name"}
    keys = ", ".join(f"evaluation.{one.name}.{key}" for one in sets for key in sorted(drawn & one.model_fields_set))
    words = "a run draws as the coordinator's [[evaluation]] says; these keys count in `heterorl evaluate` alone"
    return f"{keys}: {words}" if keys else ""


def check_unique_names(sets: Sequence[DrawsConfig]) -> None:
    """Raise ValueError where two sets have one name."""
    names = [one.name for one in sets]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"evaluation has two sets named {twice[0]}; rename one of them")
