"""Claims about the length of a completion, in tokens: the ladder of `lengths` and what `long` asks of its last rung."""

from __future__ import annotations

from collections.abc import Iterator

from heterorl.lab.claims.claim import ONLINE, Claim
from heterorl.lab.claims.terms import BETTER, GSPO, LENGTH, OTHERS, TOKEN, declare, side

_LENGTHS = {"t5": "5 tokens", "t21": "21 tokens", "t101": "101 tokens", "t101-slow": "101 tokens at 3e-5"}
_SEEN: dict[str, tuple[str, ...]] = {"t5": ("lengths",), "t21": ("lengths",)}  # before it was stated
PILOT = ("stale256", "recommend")
"""What suggested that GEPO's upper clip should go."""


def by_length() -> Iterator[Claim]:
    """All of them."""
    for task, tokens in _LENGTHS.items():
        yield declare(
            GSPO, f"64 versions behind, GEPO ends above GSPO with completions of {tokens}",
            "lengths", side("gepo"), side("gspo"), direction="above", task=task,
            suggested_by=("lengths",) if task == "t5" else (),
        )  # fmt: skip
    for task, tokens in _LENGTHS.items():
        yield declare(
            TOKEN, f"64 versions behind, GEPO ends above GRPO with completions of {tokens}",
            "lengths", side("gepo"), side("grpo"), direction="above", task=task, suggested_by=_SEEN.get(task, ()),
        )  # fmt: skip
    for task, tokens in _LENGTHS.items():
        yield declare(
            OTHERS, f"64 versions behind, GEPO ends above TOPR with completions of {tokens}",
            "lengths", side("gepo"), side("topr"), direction="above", task=task, suggested_by=_SEEN.get(task, ()),
        )  # fmt: skip
    for task, tokens in _LENGTHS.items():
        yield declare(
            BETTER, f"64 versions behind, gepo-1s ends above GEPO with completions of {tokens}",
            "lengths", side("gepo-1s"), side("gepo"), direction="above",
            task=task, source="project", suggested_by=(*PILOT, *_SEEN.get(task, ())),
        )  # fmt: skip
    for task, tokens in _LENGTHS.items():
        yield declare(
            BETTER, f"64 versions behind, gepo-product ends above GEPO with completions of {tokens}",
            "lengths", side("gepo-product"), side("gepo"), direction="above",
            task=task, source="project", suggested_by=("long",) if task.startswith("t101") else (),
        )  # fmt: skip
    for algorithm in ("gepo", "gspo"):
        name = algorithm.upper()
        yield declare(
            LENGTH, f"Without delay {name} ends above its warm start", "long", side(algorithm, ONLINE),
            side(algorithm, ONLINE, "warm_start_accuracy"), direction="above", task="t101", source="project",
        )  # fmt: skip
        yield declare(
            LENGTH, f"64 versions behind, {name} ends below {name} without delay", "long", side(algorithm),
            side(algorithm, ONLINE), direction="below", task="t101", source="project",
        )  # fmt: skip
    yield declare(
        LENGTH, "64 versions behind, gepo-product (bad rollouts by products over their tokens) ends above GEPO",
        "long", side("gepo-product"), side("gepo"), direction="above", task="t101", source="project",
    )  # fmt: skip
