"""What a site accepts of a run that it joins: the section [join] of a sampler's file."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field, ValidationInfo, field_validator

from heterorl.common.process.config import Config
from heterorl.common.tasks.rewards.config import from_file

_FILES = ("jsonl:", "parquet:")


def _entry(value: str) -> str:
    kind, _, rest = value.partition(":")
    if f"{kind}:" in _FILES and rest and not rest.startswith("~"):
        return value
    if (kind in ("hf", "environment") and rest) or (kind == "reward" and ":" in rest):
        return value
    known = "jsonl:DIRECTORY, parquet:DIRECTORY, hf:NAME, hf:/DIRECTORY, reward:MODULE:FUNCTION, environment:NAME"
    raise ValueError(f"{value!r} is none of {known}")


class JoinConfig(Config):
    """What is taken of the run's task, sampling, group size, adapters and template where this file leaves them out."""

    accept: tuple[Annotated[str, AfterValidator(_entry)], ...] = Field(default=(), max_length=64)
    """What the run's task may name here beside built-in tasks: `jsonl:DIRECTORY` and `parquet:DIRECTORY` for files
    below it, relative to where the process is started as in task.name; `hf:NAME` for branches and tags of a data set of
    the hub, `hf:NAME@REVISION` for a commit or a pull request of it, `hf:/DIRECTORY` for one on this machine,
    `reward:MODULE:FUNCTION` for your own code, `environment:NAME` for an environment as task.environment names it.
    Rewards of other kinds are never adopted: state task.rewards in this file."""
    reward_path: str = ""
    """Directory of accepted rewards and environments, taken from the configuration file's directory on; empty is that
    directory."""
    max_group_size: int = Field(default=64, ge=2)
    """Largest group_size that is adopted."""
    max_new_tokens: int = Field(default=16384, ge=1)
    """Largest sampling.max_new_tokens that is adopted."""
    max_prompts: int = Field(default=1_000_000, ge=1)
    """Largest task.size and task.evaluation_size that are adopted."""
    max_lora_rank: int = Field(default=256, ge=0)
    """Largest lora.rank that is adopted."""

    @field_validator("reward_path")
    @classmethod
    def _make_absolute(cls, value: str, info: ValidationInfo) -> str:
        return from_file(value, info)
