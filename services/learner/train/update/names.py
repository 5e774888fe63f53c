"""Names of optimizers; without torch, for whoever reads a configuration."""

from __future__ import annotations

from typing import Literal

OptimizerName = Literal["adamw", "adafactor"]
