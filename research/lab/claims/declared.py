"""All claims: of the paper (arXiv 2508.17850), of the project's README and of the project's own proposals.

Each states the question that it answers and the experiment that tests it. A sentence that several experiments can test
stands here once for each of them. `A+B` are experiments of one regime whose runs are joined. Experiments that were not
run yet stay here: their claims are "not tested". What results have suggested names the experiment they are of. A claim
of the paper is older than every run here, so no run has suggested it.
"""

from __future__ import annotations

from collections.abc import Iterator

from heterorl_research.lab.claims.claim import ONLINE, Claim
from heterorl_research.lab.claims.gates import of_gates
from heterorl_research.lab.claims.length import by_length
from heterorl_research.lab.claims.order import (
    against_gspo,
    highest,
    made_for_stale,
    others,
    token_level,
    with_reference,
    without_delay,
)
from heterorl_research.lab.claims.rules import better, clip_halves
from heterorl_research.lab.claims.terms import COLLAPSE, DELAY, FAR, GAP, NEAR, SAW, SECONDS, WHEN, WHY, declare, side
from heterorl_research.lab.claims.whole import of_whole


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


def _gap() -> Iterator[Claim]:
    for experiment, delay in (("horizon", FAR), ("sawtooth", SAW)):
        gaps = side("gepo", delay, "smooth_gap"), side("gspo", delay, "smooth_gap")
        for sentence, ratio in (("GEPO's gap is below GSPO's", 1.0), ("GEPO's gap is 85 % below GSPO's", 0.15)):
            yield declare(GAP, f"{WHEN[delay]} {sentence}", experiment, *gaps, direction="below", ratio=ratio)


def _collapse() -> Iterator[Claim]:
    for experiment, task, delay in (
        ("stale64", "add3", FAR), ("horizon", "add3", FAR), ("sawtooth", "add3", SAW),
        ("lengths", "t21", FAR), ("lengths", "t101", FAR),
        *(("s6_latency", "add3", delay) for delay in SECONDS.values()),
    ):  # fmt: skip
        tokens = f" with completions of {task.removeprefix('t')} tokens" if task != "add3" else ""
        for algorithm, sentence, direction, share in (
            ("gspo", f"GSPO collapses{tokens}: most seeds lose more than half of their gain", "above", 0.5),
            ("gepo", f"GEPO does not collapse{tokens}: fewer than one seed of four does", "below", 0.25),
        ):  # fmt: skip
            yield declare(
                COLLAPSE, f"{WHEN[delay]} {sentence}", experiment, side(algorithm, delay, "has_collapsed"), None,
                direction=direction, margin=share, task=task,
            )  # fmt: skip
        yield declare(
            COLLAPSE, f"{WHEN[delay]} GSPO collapses in more seeds than GEPO{tokens}", experiment,
            side("gspo", delay, "has_collapsed"), side("gepo", delay, "has_collapsed"), direction="above", task=task,
        )  # fmt: skip


def _mechanism() -> Iterator[Claim]:
    for metric, name in (("kl_mean", "The KL divergence"), ("iw_var_mean", "The variance of its own weights")):
        for algorithm in ("gepo", "gspo"):
            for experiment, near in (("stale64", NEAR), ("horizon", ONLINE)):
                yield declare(
                    WHY, f"{name} is higher 64 versions behind than {_than(near)} ({algorithm.upper()})", experiment,
                    side(algorithm, metric=metric), side(algorithm, near, metric), direction="above",
                )  # fmt: skip
    for algorithm in ("gepo", "gspo"):
        yield declare(
            WHY, f"{WHEN[FAR]}, on the rollouts that {algorithm.upper()} trained on, GEPO's weights vary less than"
            " GSPO's",
            "horizon", side(algorithm, metric="series:iw_var_gepo"), side(algorithm, metric="series:iw_var_gspo"),
            direction="below",
        )  # fmt: skip
    # The error in older results is in units of each method's own advantages.
    yield declare(
        WHY, f"{WHEN[FAR]} GEPO's weights estimate the expected advantage with less error than GSPO's",
        "horizon", side("gepo", metric="advantage_error_mean"), side("gspo", metric="advantage_error_mean"),
        direction="below",
    )  # fmt: skip


def _than(delay: str) -> str:
    return "without delay" if delay == ONLINE else f"{delay} behind"


CLAIMS: tuple[Claim, ...] = (
    *_near_online(),
    *against_gspo(),
    *without_delay(),
    *highest(),
    *_gap(),
    *_collapse(),
    *token_level(),
    *others(),
    *with_reference(),
    *made_for_stale(),
    *_mechanism(),
    *clip_halves(),
    *better(),
    *by_length(),
    *of_whole(),
    *of_gates(),
)
"""The table, in the order in which it is shown."""
