"""Rewards by name and weight: what `[[task.rewards]]` may say, one table a reward, told apart by `kind`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator

from heterorl.common.process.config import DIRECTORY, Config

MAX_REWARDS = 16
"""Of one task."""


class RewardBase(Config):
    """What every reward has."""

    name: str = Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")
    """Name of the reward in curves, samples and journals."""
    weight: float = Field(default=1.0, allow_inf_nan=False)
    """What its value is multiplied by in the reward; 0 measures without rewarding, a negative weight punishes."""


class MatchRewardConfig(RewardBase):
    """The task's own score: of jsonl as task.match says, of every other task its verifier."""

    kind: Literal["match"] = "match"
    """The task's own score."""


class FunctionRewardConfig(RewardBase):
    """A Python function; see task.reward."""

    kind: Literal["function"] = "function"
    """A Python function."""
    function: str
    """`package.module:function`: f(prompt, completion, answer) -> float or named parts, which are shown as
    NAME/PART."""
    directory: str = ""
    """Directory of its package or module, taken from the configuration file's directory on; empty is that directory
    itself."""

    @field_validator("directory")
    @classmethod
    def _make_absolute(cls, value: str, info: ValidationInfo) -> str:
        return from_file(value, info)


def from_file(value: str, info: ValidationInfo) -> str:
    """A path that is meant from the configuration file's directory on, made absolute.

    Here, where the file is known: other processes are given the result.
    """
    return str(Path((info.context or {}).get(DIRECTORY, "")).absolute() / value)


RewardConfig = Annotated[MatchRewardConfig | FunctionRewardConfig, Field(discriminator="kind")]
