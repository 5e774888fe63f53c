"""A loss that is a Python function of the user's own."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, JsonValue, ValidationInfo, field_validator, model_validator

from heterorl.common.tasks.rewards.config import from_file
from heterorl.learner.loss.options import LossOptions


class CustomLossConfig(LossOptions):
    """A Python function of your own, docs/own-losses.md: advantages, averages, masks and penalties stay ours."""

    kind: Literal["custom"] = "custom"
    function: str
    """`package.module:function`: f(batch, **options) -> LossOutput; with a parameter `step` it is given all rollouts of
    the step too, for a forward pass more."""
    directory: str = ""
    """Directory of its package or module, taken from the configuration file's directory on; empty is that directory
    itself. What is installed keeps its names. Every rank of the learner imports it."""
    options: dict[str, JsonValue] = Field(default_factory=dict)
    """Keyword arguments of the function; it needs a parameter for each."""
    reads_reference: bool = False
    """Whether it reads log-probs of the reference model, `batch.reference_BT`. Backends torch and fsdp2."""

    @field_validator("directory")
    @classmethod
    def _make_absolute(cls, value: str, info: ValidationInfo) -> str:
        return from_file(value, info)

    @model_validator(mode="after")
    def _check_mask(self) -> CustomLossConfig:
        if self.m2_budget:
            raise ValueError("m2_budget with kind custom: leave tokens out in the function, by the parameter `step`")
        return self
