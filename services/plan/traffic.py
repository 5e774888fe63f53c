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


def snapshot_bytes(parameters: float, *, ratio: float) -> float:
    """Bytes of all weights, for a sampler that has none of the run."""
    return ELEMENT * parameters / ratio
