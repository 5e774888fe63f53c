"""Claims about rules beside GEPO's own: halves of its clip, and the candidates for a better rule."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from heterorl_research.lab.claims.claim import Claim
from heterorl_research.lab.claims.terms import (
    BETTER,
    CLIP,
    CONFIRMED,
    FAR,
    FARTHEST,
    PILOT,
    WHEN,
    declare,
    read_off,
    side,
)

POOLED, POOLED_GSPO = "candidates+confirm+whole", "candidates+confirm"
"""Experiments of one task, delay and grid of rates, on seeds of their own: one test over all of them."""
_RATES = ("0.0003", "0.0007", "0.0015")
_SEEN: dict[str, Any] = {"source": "project", "suggested_by": PILOT}


def clip_halves() -> Iterator[Claim]:
    """What each half of a clip is worth."""
    for experiment, delay in (("clips", FAR), ("clips256", FARTHEST)):
        when = WHEN[delay]
        for weight, name in (("gepo", "GEPO"), ("gspo", "GSPO")):
            yield declare(
                CLIP, f"{when} the upper half of {name}'s clip costs accuracy: without it the rule ends higher",
                experiment, side(f"{weight}-lower", delay), side(weight, delay), direction="above", **_SEEN,
            )  # fmt: skip
            yield declare(
                CLIP, f"{when} the lower half of {name}'s clip is needed: without it the rule ends lower",
                experiment, side(f"{weight}-upper", delay), side(weight, delay), direction="below", **_SEEN,
            )  # fmt: skip
        yield declare(
            CLIP, f"{when} the weight of good rollouts hardly matters: with a weight of 1 GEPO without its upper clip"
            " ends within .03", experiment,
            side("gepo-one-lower", delay), side("gepo-lower", delay), direction="within", margin=0.03, **_SEEN,
        )  # fmt: skip


def better() -> Iterator[Claim]:
    """The candidates, where they were chosen and where they were confirmed."""
    for algorithm, name in (("gepo-1s", "gepo-1s"), ("gepo-topr", "GEPO with TOPR's treatment of good rollouts")):
        yield declare(
            BETTER, f"{WHEN[FAR]} {name} ends above GEPO", "horizon", side(algorithm), side("gepo"),
            direction="above", **_SEEN,
        )  # fmt: skip
    yield read_off(
        BETTER, f"{WHEN[FARTHEST]} GEPO with TOPR's treatment of good rollouts ends above GEPO",
        "stale256", side("gepo-topr", FARTHEST), side("gepo", FARTHEST), direction="above",
    )  # fmt: skip
    yield declare(
        BETTER, f"{WHEN[FARTHEST]} GEPO with TOPR's treatment of good rollouts ends above GEPO",
        "clips256", side("gepo-one-lower", FARTHEST), side("gepo", FARTHEST), direction="above",
        source="README", suggested_by=PILOT,
    )  # fmt: skip
    for algorithm in ("gepo-1s", "gepo-product", "gepo-quantile", "gepo-tempered"):
        yield declare(
            BETTER, f"{WHEN[FAR]} {algorithm} ends above GEPO in the mean over three learning rates",
            "candidates", side(algorithm, variant=None), side("gepo", variant=None), direction="above", **_SEEN,
        )  # fmt: skip
        yield declare(
            BETTER, f"{WHEN[FARTHEST]} {algorithm} ends above GEPO", "candidates_ends",
            side(algorithm, FARTHEST), side("gepo", FARTHEST), direction="above", **_SEEN,
        )  # fmt: skip
    yield declare(
        BETTER, f"{WHEN[FARTHEST]} gepo-1s ends above GEPO", "ladder",
        side("gepo-1s", FARTHEST), side("gepo", FARTHEST), direction="above",
        source="project", suggested_by=(*PILOT, "candidates_ends"),
    )  # fmt: skip
    yield read_off(
        BETTER, f"{WHEN[FARTHEST]} gepo-1s ends above GSPO", "candidates_ends",
        side("gepo-1s", FARTHEST), side("gspo", FARTHEST), direction="above", source="project",
    )  # fmt: skip
    for baseline in ("gepo", "topr", "gspo", "gspo-opsm"):
        yield declare(
            BETTER, f"On held-out seeds, {WHEN[FAR]}, {CONFIRMED} ends above {_name(baseline)} in the mean"
            " over three learning rates",
            "confirm", side(CONFIRMED, variant=None), side(baseline, variant=None), direction="above",
            source="project", suggested_by=("candidates",),
        )  # fmt: skip
    for rule, baseline, experiments in (
        (CONFIRMED, "gepo", POOLED), (CONFIRMED, "topr", POOLED), ("topr", "gepo", POOLED),
        (CONFIRMED, "gspo", POOLED_GSPO), ("gspo", "gepo", POOLED_GSPO), ("topr", "gspo", POOLED_GSPO),
    ):  # fmt: skip
        yield declare(
            BETTER, f"On all seeds, {WHEN[FAR]}, {rule} ends above {baseline} in the mean over three learning rates",
            experiments, side(rule, variant=None), side(baseline, variant=None), direction="above",
            source="project", suggested_by=("candidates",),
        )  # fmt: skip
    for rate in _RATES:
        yield declare(
            BETTER, f"On held-out seeds, {WHEN[FAR]}, {CONFIRMED} ends above GEPO at a rate of {rate}",
            "confirm", side(CONFIRMED, variant=f"lr={rate}"), side("gepo", variant=f"lr={rate}"), direction="above",
            source="project", suggested_by=("candidates",),
        )  # fmt: skip


def _name(algorithm: str) -> str:
    return {"gspo-opsm": "GSPO with OPSM"}.get(algorithm, algorithm.upper())
