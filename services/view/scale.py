"""How tokens are coloured: steps of two scales, and their legends."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from heterorl.common.types.common import Float32Array

RATIO_EDGES = (0.05, 0.2, 0.5, 1.0)
"""Sizes of a log-ratio, nats, at which the next stronger colour begins."""
PROBABILITY_EDGES = (0.9, 0.5, 0.1, 0.01)
"""Probabilities below which the next stronger colour begins."""
_SIGNED = ("n4", "n3", "n2", "n1", "z", "p1", "p2", "p3", "p4")
_CUTS = np.array([*(-edge for edge in reversed(RATIO_EDGES)), *RATIO_EDGES], np.float64)
_LOG_CUTS = np.log(np.array(PROBABILITY_EDGES[::-1], np.float64))
UNKNOWN = "x"


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One colour of a legend: a class of the style sheet and what it means."""

    name: str
    label: str


def ratio_classes(log_ratios: Float32Array) -> list[str]:
    """The class of each log-ratio in nats: n4 (far less likely to the learner than to the sampler) to p4; z: alike."""
    places = np.digitize(log_ratios.astype(np.float64), _CUTS)
    return [_SIGNED[place] if known else UNKNOWN for place, known in _known(places, log_ratios)]


def probability_classes(logprobs: Float32Array) -> list[str]:
    """The class of each log-prob: l0 (sure, at least 0.9) to l4 (below 0.01)."""
    places = len(PROBABILITY_EDGES) - np.digitize(logprobs.astype(np.float64), _LOG_CUTS)
    return [f"l{place}" if known else UNKNOWN for place, known in _known(places, logprobs)]


def _known(places: np.ndarray, values: Float32Array) -> zip[tuple[int, bool]]:
    return zip(places.tolist(), np.isfinite(values).tolist(), strict=True)


def ratio_legend() -> tuple[Step, ...]:
    """The steps of log-ratios, from less to more likely; times are exp of the edges."""
    less = [Step(name=f"n{i + 1}", label=f"-{RATIO_EDGES[i]:g}") for i in reversed(range(len(RATIO_EDGES)))]
    more = [Step(name=f"p{i + 1}", label=f"+{RATIO_EDGES[i]:g}") for i in range(len(RATIO_EDGES))]
    return (*less, Step(name="z", label="0"), *more)


def probability_legend() -> tuple[Step, ...]:
    """The steps of the sampler's probabilities, from sure to surprising."""
    steps = [Step(name=f"l{i + 1}", label=f"<{edge:g}") for i, edge in enumerate(PROBABILITY_EDGES)]
    return (Step(name="l0", label=f"{PROBABILITY_EDGES[0]:g}-1"), *steps)


def probability(logprob: float) -> float:
    """The probability of a log-prob; of what is none, itself."""
    return math.exp(min(logprob, 0.0)) if math.isfinite(logprob) else math.nan
