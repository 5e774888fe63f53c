"""Claims about the length of a completion, in tokens: the ladder of `lengths` and what `long` asks of its last rung."""

from __future__ import annotations

from collections.abc import Iterator

from heterorl_research.lab.claims.claim import ONLINE, Claim
from heterorl_research.lab.claims.terms import (
    BETTER,
    FAR,
    GSPO,
    LENGTH,
    OTHERS,
    PILOT,
    TOKEN,
    WHEN,
    declare,
    read_off,
    side,
)

_LENGTHS = {"t5": "5 tokens", "t21": "21 tokens", "t101": "101 tokens", "t101-slow": "101 tokens at 3e-5"}
_SEEN: dict[str, tuple[str, ...]] = {"t5": ("lengths",), "t21": ("lengths",)}  # before it was stated
_SEEN_PRODUCT = {"t5": ("candidates_ends", "long"), "t21": ("candidates_ends", "long")}
"""Experiments on seeds of `lengths` that suggested gepo-product."""
_AS_ONLINE = 0.03


def by_length() -> Iterator[Claim]:
    """All of them."""
    yield from _ladder()
    yield from _last_rung()


def _ladder() -> Iterator[Claim]:
    for task, tokens in _LENGTHS.items():
        yield declare(
            GSPO, f"{WHEN[FAR]} GEPO ends above GSPO with completions of {tokens}",
            "lengths", side("gepo"), side("gspo"), direction="above", task=task,
            suggested_by=("lengths",) if task == "t5" else (),
        )  # fmt: skip
    for question, name in ((TOKEN, "grpo"), (OTHERS, "topr")):
        for task, tokens in _LENGTHS.items():
            yield declare(
                question, f"{WHEN[FAR]} GEPO ends above {name.upper()} with completions of {tokens}",
                "lengths", side("gepo"), side(name), direction="above", task=task, suggested_by=_SEEN.get(task, ()),
            )  # fmt: skip
    for task, tokens in _LENGTHS.items():
        yield declare(
            BETTER, f"{WHEN[FAR]} gepo-1s ends above GEPO with completions of {tokens}",
            "lengths", side("gepo-1s"), side("gepo"), direction="above",
            task=task, source="project", suggested_by=(*PILOT, *_SEEN.get(task, ())),
        )  # fmt: skip
    for task, tokens in _LENGTHS.items():
        yield declare(
            BETTER, f"{WHEN[FAR]} gepo-product ends above GEPO with completions of {tokens}",
            "lengths", side("gepo-product"), side("gepo"), direction="above",
            task=task, source="project", suggested_by=_SEEN_PRODUCT.get(task, ("long",)),
        )  # fmt: skip
    for task in ("t5", "t21"):
        yield read_off(
            BETTER, f"{WHEN[FAR]} gepo-product ends above gepo-1s with completions of {_LENGTHS[task]}",
            "lengths", side("gepo-product"), side("gepo-1s"), direction="above", task=task, source="project",
        )  # fmt: skip


def _last_rung() -> Iterator[Claim]:
    tokens = "with completions of 101 tokens"
    for algorithm in ("gepo", "gspo"):
        name = algorithm.upper()
        yield declare(
            LENGTH, f"{WHEN[ONLINE]} {name} ends above its warm start {tokens}", "long", side(algorithm, ONLINE),
            side(algorithm, ONLINE, "warm_start_accuracy"), direction="above", task="t101", source="project",
        )  # fmt: skip
        yield declare(
            LENGTH, f"{WHEN[FAR]} {name} ends below {name} without delay {tokens}", "long", side(algorithm),
            side(algorithm, ONLINE), direction="below", task="t101", source="project",
        )  # fmt: skip
        for experiment, task in (("long", "t101"), ("lengths", "t101-slow")):
            yield read_off(
                LENGTH, f"{WHEN[FAR]} {name} ends below its warm start with completions of {_LENGTHS[task]}",
                experiment, side(algorithm), side(algorithm, metric="warm_start_accuracy"), direction="below",
                task=task, source="project",
            )  # fmt: skip
    yield declare(
        LENGTH, f"{WHEN[FAR]} gepo-product (bad rollouts by products over their tokens) ends above GEPO {tokens}",
        "long", side("gepo-product"), side("gepo"), direction="above", task="t101", source="project",
    )  # fmt: skip
    yield read_off(
        LENGTH, f"{WHEN[FAR]} gepo-product ends within {_AS_ONLINE:g} of its own result without delay {tokens}",
        "long", side("gepo-product"), side("gepo-product", ONLINE), direction="within", margin=_AS_ONLINE,
        task="t101", source="project",
    )  # fmt: skip
