"""A reward with partial credit: how many digits of a sum are right, and whether it has the right length.

The task writes answers backwards: "12+34=" has the answer "640". Partial credit matters: a group whose rollouts all get
the same reward teaches nothing.
"""

from __future__ import annotations


def score(prompt: str, completion: str, answer: str) -> dict[str, float]:  # noqa: ARG001
    """Named parts; their sum is the reward: 1 for the right answer."""
    text = completion.strip()
    right = sum(ours == theirs for ours, theirs in zip(text, answer, strict=False))
    return {"digits": 0.8 * right / len(answer), "length": 0.2 if len(text) == len(answer) else 0.0}
