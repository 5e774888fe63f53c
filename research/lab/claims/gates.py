"""Claims about gates of one size: `gates21` and `gates101`; stated before their arms ran."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from heterorl_research.lab.claims.claim import Claim
from heterorl_research.lab.claims.terms import FAR, GATES, WHEN, declare, side

_WHERE = {"t21": ("gates21", "with 21 tokens"), "t101": ("gates101", "with 101 tokens")}
_LEVEL = {"t21": 0.02, "t101": 0.03}
"""Accuracy by which a rule may end below another one and still count as level with it."""
_WITHIN = 0.02


def of_gates() -> Iterator[Claim]:
    """All of them."""
    for task, level in _LEVEL.items():
        for rule in ("gepo-clip", "gspo-limit"):
            yield _ends(rule, "gepo-whole", task, f"ends at most {level:g} below", direction="above", margin=-level)
    for rule, other, task in (
        ("gspo-limit", "gspo", "t21"), ("grpo-limit", "grpo", "t21"), ("gspo-limit", "grpo-limit", "t21"),
        ("gspo-limit", "gepo", "t101"), ("gepo-clip", "gepo", "t101"),
    ):  # fmt: skip
        yield _ends(rule, other, task, "ends above", direction="above")
    yield _ends("gspo-mean", "gspo", "t21", f"ends within {_WITHIN:g} of", direction="within", margin=_WITHIN)


def _ends(rule: str, other: str, task: str, how: str, **test: Any) -> Claim:
    experiment, tokens = _WHERE[task]
    sentence = f"{WHEN[FAR]} {rule} {how} {other} {tokens}"
    return declare(GATES, sentence, experiment, side(rule), side(other), task=task, source="project", **test)
