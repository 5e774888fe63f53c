"""The reward of word sums: the right number, a near one, and nothing beside the number.

Named parts in place of one number, so that one sees which of them rises. Partial credit matters: a group whose answers
all get the same reward teaches nothing.
"""

from __future__ import annotations

import re


def score(prompt: str, completion: str, answer: str) -> dict[str, float]:  # noqa: ARG001
    """The sum of the parts is the reward: 1 for the right number and nothing else."""
    number = re.search(r"\d+", completion)
    off = abs(int(number[0]) - int(answer)) if number and len(number[0]) < 9 else None
    return {
        "right": 0.7 if off == 0 else 0.0,
        "near": 0.2 * max(0.0, 1.0 - off / 10) if off is not None else 0.0,
        "brief": 0.1 if re.fullmatch(r"\s*\d+\s*", completion) else 0.0,
    }
