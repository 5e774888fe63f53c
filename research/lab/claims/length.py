"""Claims about the length of a completion, in tokens: the ladder of `lengths` and what `long` asks of its last rung."""

from __future__ import annotations

from collections.abc import Iterator

from heterorl_research.lab.claims.claim import ONLINE, Claim, Side
from heterorl_research.lab.claims.terms import (
    BETTER,
    CLIFF,
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
    yield from _cliff()


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


_CLIFF = {
    "exact": "with completions of 301 tokens at 3e-5",
    "noise": "with completions of 301 tokens at 3e-5 and samplers .0011 nats a token apart",
    "exact-1e-4": "with completions of 301 tokens at 1e-4",
}
"""Variants of `cliff301`."""
_AS_PLAIN = 0.02


def _cliff() -> Iterator[Claim]:
    """What was registered before the runs, then what they suggested."""

    def of(algorithm: str, variant: str, metric: str = "last") -> Side:
        return side(algorithm, metric=metric, variant=variant)

    for variant in ("exact", "noise"):
        yield declare(
            CLIFF, f"{WHEN[FAR]} GEPO ends within {_AS_PLAIN:g} of reinforce {_CLIFF[variant]}", "cliff301",
            of("gepo", variant), of("reinforce", variant), direction="within", margin=_AS_PLAIN, task="t301",
            source="project",
        )  # fmt: skip
    for variant, words in _CLIFF.items():
        for rule in ("gepo-whole", "topr"):
            yield declare(
                CLIFF, f"{WHEN[FAR]} {rule} ends above GEPO {words}", "cliff301", of(rule, variant),
                of("gepo", variant), direction="above", task="t301", source="project",
            )  # fmt: skip
    for variant, words in _CLIFF.items():
        for rule in ("reinforce", "gepo"):
            yield read_off(
                CLIFF, f"{WHEN[FAR]} {rule} ends below its warm start {words}", "cliff301", of(rule, variant),
                of(rule, variant, "warm_start_accuracy"), direction="below", task="t301", source="project",
            )  # fmt: skip
        for rule, other in (("gepo-1s-d0", "gepo-1s-sqrt"), ("opsm", "gepo"), ("topr", "gepo-1s-d0")):
            yield read_off(
                CLIFF, f"{WHEN[FAR]} {rule} ends above {other} {words}", "cliff301", of(rule, variant),
                of(other, variant), direction="above", task="t301", source="project",
            )  # fmt: skip
