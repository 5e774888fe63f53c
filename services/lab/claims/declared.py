"""All claims: of the paper (arXiv 2508.17850), of the project's README and of the project's own proposals.

Each states the question that it answers and the experiment that tests it. A sentence that several experiments can test
stands here once for each of them. `A+B` are experiments of one regime whose runs are joined. Experiments that were not
run yet stay here: their claims are "not tested". What results have suggested names the experiment they are of.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from heterorl.lab.claims.claim import ONLINE, Claim
from heterorl.lab.claims.length import by_length
from heterorl.lab.claims.terms import (
    BETTER,
    CLIP,
    COLLAPSE,
    CONFIRMED,
    DELAY,
    FAR,
    FARTHEST,
    GAP,
    GSPO,
    NEAR,
    OTHERS,
    SAW,
    SECONDS,
    TOKEN,
    WHY,
    declare,
    read_off,
    side,
)
from heterorl.lab.claims.whole import of_whole
from heterorl.lab.report.data import COLLAPSE_MARGIN

_LONG = "stale256+gspo64"


def _near_online() -> Iterator[Claim]:
    for experiment in ("stale64", "horizon"):
        yield declare(
            DELAY, "64 versions behind throughout, harsher than the paper's 64, GEPO ends at most 3 % below its online"
            " result",
            experiment, side("gepo"), side("gepo", ONLINE), direction="above", ratio=0.97,
        )  # fmt: skip
    yield declare(
        DELAY, "At what the paper calls 64 versions, a saw-tooth of 0 to 57, GEPO ends at most 3 % below its online"
        " result",
        "horizon+sawtooth", side("gepo", SAW), side("gepo", ONLINE), direction="above", ratio=0.97,
    )  # fmt: skip


def _against_gspo() -> Iterator[Claim]:
    for experiment, delay in (
        ("recommend", FAR), (_LONG, FAR), ("horizon", FAR), ("sawtooth", SAW), ("ladder", NEAR),
        ("ladder", FAR), ("candidates_ends", FARTHEST),
    ):  # fmt: skip
        yield declare(
            GSPO, "Under delay GEPO ends above GSPO",
            experiment, side("gepo", delay), side("gspo", delay), direction="above",
        )  # fmt: skip
    for law, delay in SECONDS.items():
        yield declare(
            GSPO, f"With {law} delays of up to 1920 s GEPO ends above GSPO",
            "s6_latency", side("gepo", delay), side("gspo", delay), direction="above",
        )  # fmt: skip
    early = ("recommend", "stale64", "stale256")
    yield declare(
        GSPO, "GEPO is behind GSPO early, at step 220",
        "horizon", side("gepo", metric="at:220"), side("gspo", metric="at:220"), direction="below",
        source="README", suggested_by=early,
    )  # fmt: skip
    yield declare(
        GSPO, "From step 220 to the end GEPO gains on GSPO",
        "horizon", side("gepo", metric="after:220"), side("gspo", metric="after:220"), direction="above",
        source="README", suggested_by=early,
    )  # fmt: skip
    yield read_off(
        GSPO, "After 220 steps GSPO ends above GEPO", "recommend", side("gspo"), side("gepo"), direction="above"
    )
    yield read_off(GSPO, "After 400 steps GSPO ends below GEPO", _LONG, side("gspo"), side("gepo"), direction="below")


def _gap() -> Iterator[Claim]:
    for experiment, delay in (("recommend", FAR), (_LONG, FAR), ("horizon", FAR), ("sawtooth", SAW)):
        gaps = side("gepo", delay, "gap"), side("gspo", delay, "gap")
        yield declare(GAP, "GEPO's gap is below GSPO's", experiment, *gaps, direction="below")
        yield declare(GAP, "GEPO's gap is 85 % below GSPO's", experiment, *gaps, direction="below", ratio=0.15)


def _collapse() -> Iterator[Claim]:
    margin = f"{COLLAPSE_MARGIN:g}".removeprefix("0")
    for experiment, task, delay in (
        ("stale64", "add3", FAR), ("horizon", "add3", FAR), ("sawtooth", "add3", SAW),
        ("lengths", "t21", FAR), ("lengths", "t101", FAR), ("s6_latency", "add3", SECONDS["lognormal"]),
    ):  # fmt: skip
        for algorithm, sentence, direction, share in (
            ("gspo", f"Under delay GSPO collapses: most seeds end over {margin} below their warm start", "above", 0.5),
            ("gepo", "Under delay GEPO does not collapse: fewer than one seed of four does", "below", 0.25),
        ):  # fmt: skip
            yield declare(
                COLLAPSE, sentence, experiment, side(algorithm, delay, "has_collapsed"), None,
                direction=direction, margin=share, task=task,
            )  # fmt: skip
        yield declare(
            COLLAPSE, "Under delay GSPO collapses in more seeds than GEPO", experiment,
            side("gspo", delay, "has_collapsed"), side("gepo", delay, "has_collapsed"), direction="above", task=task,
        )  # fmt: skip


def _token_level() -> Iterator[Claim]:
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
    for law, delay in SECONDS.items():
        yield declare(
            TOKEN, f"With {law} delays of up to 1920 s GEPO ends above GRPO",
            "s6_latency", side("gepo", delay), side("grpo", delay), direction="above",
        )  # fmt: skip
    yield declare(
        TOKEN, "GRPO loses accuracy to a delay of 8 versions",
        "ladder", side("grpo", NEAR), side("grpo", ONLINE), direction="below",
    )  # fmt: skip
    yield declare(
        TOKEN, "A dual clip gives GRPO back some of that loss: it ends above GRPO",
        "arms", side("grpo-dual"), side("grpo"), direction="above", source="project",
    )  # fmt: skip
    for algorithm in ("gepo", "gspo"):
        yield read_off(
            TOKEN, f"Methods with one weight per rollout go on learning 64 versions behind ({algorithm.upper()})",
            "stale64", side(algorithm), side(algorithm, metric="warm_start_accuracy"), direction="above",
        )  # fmt: skip
    for algorithm in ("grpo", "dapo"):
        yield read_off(
            TOKEN, f"Methods with one weight per token lose about half 64 versions behind ({algorithm.upper()})",
            "stale64", side(algorithm), side(algorithm, ONLINE), direction="within", ratio=0.5, margin=0.1,
        )  # fmt: skip


def _others() -> Iterator[Claim]:
    yield declare(
        OTHERS, "Under delay GEPO ends above CISPO", "stale64", side("gepo"), side("cispo"), direction="above"
    )
    for experiment in ("recommend", "horizon"):
        yield declare(
            OTHERS, "Under delay GEPO ends above TOPR", experiment, side("gepo"), side("topr"), direction="above"
        )
    yield read_off(
        OTHERS, "GEPO is not the best in every setting: TOPR ends above it after 220 steps",
        "recommend", side("topr"), side("gepo"), direction="above",
    )  # fmt: skip
    for algorithm, name in (
        ("reinforce", "no correction at all"), ("impala", "V-trace"), ("vcpo", "VCPO"),
        ("mois", "the mixture over staleness of its authors' program"),
    ):  # fmt: skip
        yield declare(
            OTHERS, f"Under delay GEPO ends above {name}", "arms", side("gepo"), side(algorithm),
            direction="above", source="project",
        )  # fmt: skip


def _mechanism() -> Iterator[Claim]:
    for metric, name in (("kl_mean", "The KL divergence"), ("iw_var_mean", "The variance of its own weights")):
        for algorithm in ("gepo", "gspo"):
            for experiment, near in (("stale64", NEAR), ("horizon", ONLINE)):
                yield declare(
                    WHY, f"{name} grows with the delay ({algorithm.upper()})", experiment,
                    side(algorithm, metric=metric), side(algorithm, near, metric), direction="above",
                )  # fmt: skip
    for algorithm in ("gepo", "gspo"):
        yield declare(
            WHY, f"On the rollouts that {algorithm.upper()} trained on, GEPO's weights vary less than GSPO's",
            "horizon", side(algorithm, metric="series:iw_var_gepo"), side(algorithm, metric="series:iw_var_gspo"),
            direction="below",
        )  # fmt: skip
    # The error in older results is in units of each method's own advantages.
    yield declare(
        WHY, "GEPO's weights estimate the expected advantage with less error than GSPO's",
        "horizon", side("gepo", metric="advantage_error_mean"), side("gspo", metric="advantage_error_mean"),
        direction="below",
    )  # fmt: skip


def _clip_halves() -> Iterator[Claim]:
    pilot = ("stale256", "recommend")
    for experiment, delay in (("clips", FAR), ("clips256", FARTHEST)):
        for weight, name in (("gepo", "GEPO"), ("gspo", "GSPO")):
            seen: dict[str, Any] = {"source": "project", "suggested_by": pilot}
            yield declare(
                CLIP, f"The upper half of {name}'s clip costs accuracy: without it the rule ends higher", experiment,
                side(f"{weight}-lower", delay), side(weight, delay), direction="above", **seen,
            )  # fmt: skip
            yield declare(
                CLIP, f"The lower half of {name}'s clip is needed: without it the rule ends lower", experiment,
                side(f"{weight}-upper", delay), side(weight, delay), direction="below", **seen,
            )  # fmt: skip
        yield declare(
            CLIP, "How good rollouts are weighted hardly matters: with a weight of 1 GEPO without its upper clip ends"
            " within .03", experiment,
            side("gepo-one-lower", delay), side("gepo-lower", delay), direction="within", margin=0.03, **seen,
        )  # fmt: skip


def _better() -> Iterator[Claim]:
    pilot = ("stale256", "recommend")
    for algorithm, name in (("gepo-1s", "GEPO-1s"), ("gepo-topr", "GEPO with TOPR's treatment of good rollouts")):
        yield declare(
            BETTER, f"64 versions behind, {name} ends above GEPO", "horizon", side(algorithm), side("gepo"),
            direction="above", source="project", suggested_by=pilot,
        )  # fmt: skip
    yield read_off(
        BETTER, "256 versions behind, GEPO with TOPR's treatment of good rollouts ends above GEPO",
        "stale256", side("gepo-topr", FARTHEST), side("gepo", FARTHEST), direction="above",
    )  # fmt: skip
    yield declare(
        BETTER, "256 versions behind, GEPO with TOPR's treatment of good rollouts ends above GEPO",
        "clips256", side("gepo-one-lower", FARTHEST), side("gepo", FARTHEST), direction="above",
        source="README", suggested_by=pilot,
    )  # fmt: skip
    for algorithm in ("gepo-1s", "gepo-product", "gepo-quantile", "gepo-tempered"):
        yield declare(
            BETTER, f"64 versions behind, {algorithm} ends above GEPO in the mean over three learning rates",
            "candidates", side(algorithm, variant=None), side("gepo", variant=None), direction="above",
            source="project", suggested_by=pilot,
        )  # fmt: skip
        yield declare(
            BETTER, f"256 versions behind, {algorithm} ends above GEPO", "candidates_ends",
            side(algorithm, FARTHEST), side("gepo", FARTHEST), direction="above",
            source="project", suggested_by=pilot,
        )  # fmt: skip
    for baseline in ("gepo", "topr", "gspo", "gspo-opsm"):
        yield declare(
            BETTER, f"On seeds that chose nothing, {CONFIRMED} ends above {baseline} in the mean over learning rates",
            "confirm", side(CONFIRMED, variant=None), side(baseline, variant=None), direction="above",
            source="project", suggested_by=("candidates",),
        )  # fmt: skip


CLAIMS: tuple[Claim, ...] = (
    *_near_online(),
    *_against_gspo(),
    *_gap(),
    *_collapse(),
    *_token_level(),
    *_others(),
    *_mechanism(),
    *_clip_halves(),
    *_better(),
    *by_length(),
    *of_whole(),
)
"""The table, in the order in which it is shown."""
