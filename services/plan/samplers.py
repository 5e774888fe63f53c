"""GPUs of samplers: how fast one draws tokens, and how many of them keep a learner busy.

A decoding step reads the weights once, and the keys and values of every sequence in it; its products are smaller. A
sequence has half of its tokens on average. Weights that do not fit on one GPU are divided among several.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from heterorl.plan.assumptions import Assumptions
from heterorl.plan.shape import ModelShape

ELEMENT = 2
"""Bytes of weights, keys and values: bf16."""
ROOM = 0.9
"""Share of the memory that an engine uses."""
_GIGA = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """One engine: its GPUs, the sequences that it decodes at once, and the seconds of one decoding step."""

    gpus: int
    sequences: int
    step_s: float

    @property
    def tokens_per_gpu_s(self) -> float:
        """Tokens that a GPU draws in a second."""
        return self.sequences / self.step_s / self.gpus


def drawing(shape: ModelShape, parameters: float, *, given: Assumptions) -> Drawing:
    """An engine of a model on GPUs such as the learner's."""
    weights = ELEMENT * parameters
    # A quarter of the room at least is for keys and values.
    gpus = max(1, math.ceil(weights / (0.75 * ROOM * given.hbm_gb * _GIGA)))
    cache = 2 * ELEMENT * shape.layers * shape.kv_heads * shape.head_dim * given.sequence_tokens / 2
    room = gpus * ROOM * given.hbm_gb * _GIGA - weights
    sequences = max(1, min(int(given.sampler_sequences), int(room / cache)))
    read_s = (weights + sequences * cache) / (gpus * given.hbm_gb_s * given.decode_share * _GIGA)
    product_s = 2.0 * parameters * sequences / (gpus * given.gpu_tflops * 1e12 * given.mfu)
    return Drawing(gpus=gpus, sequences=sequences, step_s=max(read_s, product_s))


def num_gpus(found: Drawing, *, tokens: float, step_s: float) -> int:
    """GPUs that draw the tokens of a step while one is computed, in whole engines."""
    engines = math.ceil(tokens / step_s / (found.tokens_per_gpu_s * found.gpus))
    return engines * found.gpus
