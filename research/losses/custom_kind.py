"""A loss of research by its name, and as learners take it."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import JsonValue, model_validator

from heterorl.learner.loss.loss_config import CustomLossConfig, LossOptions


class MovedLoss(LossOptions):
    """A loss that a learner takes as a custom one."""

    OPTIONS: ClassVar[tuple[str, ...]] = ()
    """Keys that its function takes."""
    FUNCTION: ClassVar[str] = ""
    """`module:function` of this folder; empty is `loss` of the module that has the kind's name."""
    LEVEL: ClassVar[Literal["token", "sequence"]] = "sequence"
    """Whether a token or a rollout has a weight."""
    READS_REFERENCE: ClassVar[bool] = False

    @model_validator(mode="after")
    def _check_keys(self) -> MovedLoss:
        common = {"kind", *self.OPTIONS, *CustomLossConfig.model_fields}
        for name, field in type(self).model_fields.items():
            if name not in common and getattr(self, name) != field.default:
                raise ValueError(f"{name} does not vary here: leave it out")
        return self

    def learner_loss(self) -> CustomLossConfig:
        """What a learner takes."""
        values = dict(self)
        options: dict[str, JsonValue] = {name: values[name] for name in self.OPTIONS}
        shared = {name: value for name, value in values.items() if name in LossOptions.model_fields}
        function = f"heterorl_research.losses.{self.FUNCTION or values['kind'] + ':loss'}"
        return CustomLossConfig(function=function, options=options, reads_reference=self.READS_REFERENCE, **shared)
