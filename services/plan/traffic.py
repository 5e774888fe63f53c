"""Bytes on the WAN: what a version costs its learner to publish, and a site to pull.

A delta has one entry for each changed element: its position, which costs the binary entropy of the share that changes,
and its step, in units in the last place.
"""

from __future__ import annotations

import math

ELEMENT = 2
"""Bytes of a published weight, bf16."""


def delta_bytes(parameters: float, *, changed: float, step_bits: float) -> float:
    """Bytes of a delta: parameters * (H(changed) + changed * step_bits) / 8, at most those of all weights.

    H(f) = -f log2 f - (1 - f) log2 (1 - f) bits, Shannon 1948.

    Args:
        parameters: elements of the model.
        changed: share of them that differ from the version before, in [0, 1].
        step_bits: of a changed element, beside its position.
    """
    entropy = sum(-share * math.log2(share) for share in (changed, 1.0 - changed) if share > 0.0)
    return min(parameters * (entropy + changed * step_bits) / 8.0, ELEMENT * parameters)


MEASURED = ((1e-6, 0.01369), (3e-6, 0.03466), (1e-5, 0.09055), (1e-4, 0.43195))
"""Step size of AdamW, and the share of the bf16 elements that a version changed: benchmarks/results/weights.json."""


def changed_by(lr: float) -> float:
    """The share that a version changes at a step size: power laws through what was measured, at most all elements."""
    above = next((index for index, (known, _) in enumerate(MEASURED) if lr <= known), len(MEASURED))
    first = min(max(above - 1, 0), len(MEASURED) - 2)
    (low, least), (high, most) = MEASURED[first : first + 2]
    power = math.log(most / least) / math.log(high / low)
    return min(1.0, least * math.pow(lr / low, power))


def snapshot_bytes(parameters: float, *, ratio: float) -> float:
    """Bytes of all weights, for a sampler that has none of the run."""
    return ELEMENT * parameters / ratio
