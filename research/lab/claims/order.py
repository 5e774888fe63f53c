"""Claims about who ends above whom on equal seeds: GEPO beside GSPO, beside methods by token, and beside others."""

from __future__ import annotations

from collections.abc import Iterator

from heterorl_research.lab.claims.claim import ONLINE, Claim
from heterorl_research.lab.claims.terms import (
    FAR,
    FARTHER,
    FARTHEST,
    FRESH,
    GSPO,
    HIGHEST,
    NEAR,
    OTHERS,
    SAW,
    SECOND,
    SECONDS,
    STALE,
    TOKEN,
    WHEN,
    declare,
    read_off,
    side,
)

LONG = "stale256+gspo64"
"""400 steps of GEPO and GSPO on the seeds of `stale256`."""
_MEAN = "in the mean over three learning rates"
_MADE_FOR_STALE = {
    "tis": "TIS",
    "m2po": "M2PO",
    "decoupled_ppo": "decoupled PPO",
    "seq_tis_ess": "sequence TIS with ESS steps",
}


def against_gspo() -> Iterator[Claim]:
    """GEPO beside GSPO at every delay."""
    for experiment, delay in (
        ("recommend", FAR), (LONG, FAR), ("horizon", FAR), ("sawtooth", SAW), ("ladder", NEAR),
        ("ladder", FAR), ("ladder", FARTHEST), ("candidates_ends", FARTHEST),
    ):  # fmt: skip
        # The paper has at most 64 versions.
        yield declare(
            GSPO, f"{WHEN[delay]} GEPO ends above GSPO",
            experiment, side("gepo", delay), side("gspo", delay), direction="above",
            source="project" if delay == FARTHEST else "paper",
        )  # fmt: skip
    for experiment, seeds in (("candidates", ""), ("confirm", "On held-out seeds, ")):
        yield declare(
            GSPO, f"{seeds}{WHEN[FAR]}, GEPO ends above GSPO {_MEAN}",
            experiment, side("gepo", variant=None), side("gspo", variant=None), direction="above",
        )  # fmt: skip
    for delay in SECONDS.values():
        yield declare(
            GSPO, f"{WHEN[delay]} GEPO ends above GSPO",
            "s6_latency", side("gepo", delay), side("gspo", delay), direction="above",
        )  # fmt: skip
    early = ("recommend", "stale64", "stale256")
    yield declare(
        GSPO, f"{WHEN[FAR]} GEPO is behind GSPO early, at step 220",
        "horizon", side("gepo", metric="at:220"), side("gspo", metric="at:220"), direction="below",
        source="README", suggested_by=early,
    )  # fmt: skip
    yield declare(
        GSPO, f"{WHEN[FAR]} GEPO gains on GSPO from step 220 to the end",
        "horizon", side("gepo", metric="after:220"), side("gspo", metric="after:220"), direction="above",
        source="README", suggested_by=early,
    )  # fmt: skip
    yield read_off(
        GSPO, f"{WHEN[FAR]} GSPO ends above GEPO after 220 steps",
        "recommend", side("gspo"), side("gepo"), direction="above",
    )  # fmt: skip
    yield read_off(
        GSPO, f"{WHEN[FAR]} GSPO ends below GEPO after 400 steps", LONG, side("gspo"), side("gepo"), direction="below"
    )


def without_delay() -> Iterator[Claim]:
    """The order of fresh data: the paper has GEPO first there too."""
    for experiment, names in (("horizon", ("gspo", "grpo", "topr")), ("ladder", ("gspo",))):
        for name in names:
            yield declare(
                FRESH, f"{WHEN[ONLINE]} GEPO ends above {name.upper()}",
                experiment, side("gepo", ONLINE), side(name, ONLINE), direction="above",
            )  # fmt: skip
    for experiment in ("horizon", "candidates_ends"):
        for name in ("gspo", "topr"):
            yield read_off(
                FRESH, f"{WHEN[ONLINE]} {name.upper()} ends above gepo-1s",
                experiment, side(name, ONLINE), side("gepo-1s", ONLINE), direction="above", source="project",
            )  # fmt: skip


def highest() -> Iterator[Claim]:
    """The best accuracy of a run in place of its last."""
    for experiment, delay, names in (
        ("horizon", ONLINE, ("gspo", "grpo", "topr")), ("horizon", FAR, ("gspo", "grpo", "topr")),
        ("sawtooth", SAW, ("gspo", "grpo")),
    ):  # fmt: skip
        for name in names:
            yield declare(
                HIGHEST, f"{WHEN[delay]} GEPO's best accuracy is above {name.upper()}'s",
                experiment, side("gepo", delay, "best"), side(name, delay, "best"), direction="above",
            )  # fmt: skip


def token_level() -> Iterator[Claim]:
    """Methods with one weight per token: what they lose to a delay, and where they end beside GEPO."""
    for algorithm, name in (("grpo", "GRPO"), ("dr_grpo", "Dr. GRPO"), ("bnpo", "BNPO")):
        yield declare(
            TOKEN, f"{name} loses accuracy to a delay of 64 versions",
            "stale64", side(algorithm), side(algorithm, ONLINE), direction="below",
        )  # fmt: skip
    yield declare(
        TOKEN, "GRPO loses accuracy to a delay of 64 versions",
        "horizon", side("grpo"), side("grpo", ONLINE), direction="below",
    )  # fmt: skip
    yield declare(
        TOKEN, "GRPO loses accuracy to a saw-tooth of 0 to 57 versions",
        "horizon+sawtooth", side("grpo", SAW), side("grpo", ONLINE), direction="below",
    )  # fmt: skip
    for algorithm, name in (("dr_grpo", "Dr. GRPO"), ("bnpo", "BNPO")):
        yield declare(
            TOKEN, f"{WHEN[FAR]} GEPO ends above {name}", "stale64", side("gepo"), side(algorithm), direction="above"
        )
    for experiment, delay in (
        ("horizon", FAR), ("sawtooth", SAW), *(("s6_latency", delay) for delay in SECONDS.values())
    ):  # fmt: skip
        yield declare(
            TOKEN, f"{WHEN[delay]} GEPO ends above GRPO",
            experiment, side("gepo", delay), side("grpo", delay), direction="above",
        )  # fmt: skip
    yield declare(
        TOKEN, "GRPO loses accuracy to a delay of 8 versions",
        "ladder", side("grpo", NEAR), side("grpo", ONLINE), direction="below",
    )  # fmt: skip
    yield declare(
        TOKEN, f"{WHEN[FAR]} a dual clip gives GRPO back some of that loss: it ends above GRPO",
        "arms", side("grpo-dual"), side("grpo"), direction="above", source="project",
    )  # fmt: skip
    for experiment, names in (("stale64", ("gepo", "gspo")), ("horizon", ("gepo", "gspo", "grpo"))):
        for algorithm in names:
            yield read_off(
                TOKEN, f"{WHEN[FAR]} {algorithm.upper()} goes on learning: it ends above its warm start",
                experiment, side(algorithm), side(algorithm, metric="warm_start_accuracy"), direction="above",
                suggested_by=("stale64",),
            )  # fmt: skip
    for algorithm in ("grpo", "dapo"):
        yield read_off(
            TOKEN, f"{WHEN[FAR]} methods with one weight per token lose about half ({algorithm.upper()})",
            "stale64", side(algorithm), side(algorithm, ONLINE), direction="within", ratio=0.5, margin=0.1,
        )  # fmt: skip


def others() -> Iterator[Claim]:
    """GEPO beside TOPR, CISPO and rules without an experiment of their own."""
    yield declare(
        OTHERS, f"{WHEN[FAR]} GEPO ends above CISPO", "stale64", side("gepo"), side("cispo"), direction="above"
    )
    for experiment, delay in (
        ("recommend", FAR), ("horizon", FAR), ("ladder", FARTHEST),
        *(("s6_latency", delay) for delay in SECONDS.values()),
    ):  # fmt: skip
        yield declare(
            OTHERS, f"{WHEN[delay]} GEPO ends above TOPR",
            experiment, side("gepo", delay), side("topr", delay), direction="above",
            source="project" if delay == FARTHEST else "paper",
        )  # fmt: skip
    for experiment, seeds in (("candidates", ""), ("confirm", "On held-out seeds, ")):
        yield declare(
            OTHERS, f"{seeds}{WHEN[FAR]}, GEPO ends above TOPR {_MEAN}",
            experiment, side("gepo", variant=None), side("topr", variant=None), direction="above",
        )  # fmt: skip
    yield read_off(
        OTHERS, f"{WHEN[FAR]} GEPO is not the best in every setting: TOPR ends above it after 220 steps",
        "recommend", side("topr"), side("gepo"), direction="above",
    )  # fmt: skip
    for algorithm, name in (
        ("reinforce", "no correction at all"), ("impala", "V-trace"), ("vcpo", "VCPO"),
        ("mois", "the mixture over staleness of its authors' program"),
    ):  # fmt: skip
        yield declare(
            OTHERS, f"{WHEN[FAR]} GEPO ends above {name}", "arms", side("gepo"), side(algorithm),
            direction="above", source="project",
        )  # fmt: skip


def with_reference() -> Iterator[Claim]:
    """GRPO held near version 0, and a rule whose target is made of version 0."""
    yield declare(
        SECOND, f"{WHEN[FAR]} a KL of .04 to version 0 gives GRPO back some of its loss: it ends above GRPO",
        "reference", side("grpo-reference"), side("grpo"), direction="above", source="project",
    )  # fmt: skip
    yield declare(
        SECOND, f"{WHEN[FAR]} GEPO ends above trajectory balance (VarGrad)",
        "reference", side("gepo"), side("tba"), direction="above", source="project",
    )  # fmt: skip


def made_for_stale() -> Iterator[Claim]:
    """GEPO beside methods that were made for stale data, at three delays."""
    for delay in (FAR, FARTHER, FARTHEST):
        for algorithm, name in _MADE_FOR_STALE.items():
            yield declare(
                STALE, f"{WHEN[delay]} GEPO ends above {name}",
                "stale256", side("gepo", delay), side(algorithm, delay), direction="above", source="project",
            )  # fmt: skip
