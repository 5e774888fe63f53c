"""All claims: of the paper (arXiv 2508.17850) and of the project's README, each with the experiment that tests it.

A sentence that several experiments can test stands here once for each of them. `A+B` are two experiments of one regime
whose runs are joined. Experiments that were not run yet stay here: their claims are "not tested".
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from heterorl.lab.claims.claim import ONLINE, Claim, Side, versions
from heterorl.lab.report.data import COLLAPSE_MARGIN

_FAR = versions(64)
_LONG = "stale256+gspo64"
_SECONDS = "lognormal refresh <= 1800 s"


def _paper(claim: str, experiment: str, a: Side, b: Side, **test: Any) -> Claim:
    return Claim(claim=claim, source="paper", experiment=experiment, a=a, b=b, **test)


def _readme(claim: str, experiment: str, a: Side, b: Side, **test: Any) -> Claim:
    return Claim(claim=claim, source="README", experiment=experiment, a=a, b=b, **test)


def _side(algorithm: str, delay: str = _FAR, metric: str = "last") -> Side:
    return Side(algorithm=algorithm, delay=delay, metric=metric)


def _near_online() -> Iterator[Claim]:
    for experiment in ("stale64", "horizon"):
        yield _paper(
            "64 versions behind, GEPO ends at most 3 % below its online result",
            experiment, _side("gepo"), _side("gepo", ONLINE), direction="above", ratio=0.97,
        )  # fmt: skip


def _against_gspo() -> Iterator[Claim]:
    for experiment, delay in (
        ("recommend", _FAR), (_LONG, _FAR), ("horizon", _FAR), ("ladder", versions(256)),
    ):  # fmt: skip
        yield _paper(
            "Under delay GEPO ends above GSPO",
            experiment, _side("gepo", delay), _side("gspo", delay), direction="above",
        )  # fmt: skip
    for experiment in ("recommend", _LONG, "horizon"):
        gaps = _side("gepo", metric="gap"), _side("gspo", metric="gap")
        yield _paper("GEPO's gap between best and last accuracy is below GSPO's", experiment, *gaps, direction="below")
        yield _paper(
            "GEPO's gap between best and last accuracy is 85 % below GSPO's",
            experiment, *gaps, direction="below", ratio=0.15,
        )  # fmt: skip
    for task in ("t21", "t101"):
        yield _paper(
            "Under delay GEPO ends above GSPO, with longer completions",
            "lengths", _side("gepo"), _side("gspo"), direction="above", task=task,
        )  # fmt: skip
    yield _paper(
        "With delays of up to 1800 s GEPO ends above GSPO",
        "latency1800", _side("gepo", _SECONDS), _side("gspo", _SECONDS), direction="above",
    )  # fmt: skip


def _collapse() -> Iterator[Claim]:
    for experiment, task in (("stale64", "add3"), ("horizon", "add3"), ("lengths", "t21")):
        for algorithm, sentence, direction in (
            ("gspo", "Under delay GSPO collapses: it ends more than .05 below its warm start", "below"),
            ("gepo", "Under delay GEPO does not collapse: it ends at most .05 below its warm start", "above"),
        ):
            yield _paper(
                sentence,
                experiment, _side(algorithm), _side(algorithm, metric="warm_start_accuracy"),
                direction=direction, margin=COLLAPSE_MARGIN if direction == "below" else -COLLAPSE_MARGIN, task=task,
            )  # fmt: skip


def _token_level() -> Iterator[Claim]:
    for algorithm, name in (("grpo", "GRPO"), ("dr_grpo", "Dr. GRPO"), ("bnpo", "BNPO")):
        yield _paper(
            f"{name} loses accuracy to a delay of 64 versions",
            "stale64", _side(algorithm), _side(algorithm, ONLINE), direction="below",
        )  # fmt: skip
    yield _paper(
        "GRPO loses accuracy to a delay of 64 versions",
        "horizon", _side("grpo"), _side("grpo", ONLINE), direction="below",
    )  # fmt: skip


def _baselines() -> Iterator[Claim]:
    yield _paper("Under delay GEPO ends above CISPO", "stale64", _side("gepo"), _side("cispo"), direction="above")
    for experiment in ("recommend", "horizon"):
        yield _paper("Under delay GEPO ends above TOPR", experiment, _side("gepo"), _side("topr"), direction="above")


def _mechanism() -> Iterator[Claim]:
    for metric, name in (("kl_mean", "The KL divergence"), ("iw_var_mean", "The variance of the weights")):
        for algorithm in ("gepo", "gspo"):
            yield _paper(
                f"{name} grows with the delay ({algorithm.upper()})",
                "stale64", _side(algorithm, metric=metric), _side(algorithm, versions(8), metric), direction="above",
            )  # fmt: skip
    for experiment in ("stale64", "horizon"):
        yield _paper(
            "GEPO's weights vary less than GSPO's 64 versions behind",
            experiment, _side("gepo", metric="iw_var_mean"), _side("gspo", metric="iw_var_mean"), direction="below",
        )  # fmt: skip
    # The error in older results is in units of each method's own advantages.
    yield _paper(
        "GEPO's weights estimate the expected advantage with less error than GSPO's",
        "horizon", _side("gepo", metric="advantage_error_mean"), _side("gspo", metric="advantage_error_mean"),
        direction="below",
    )  # fmt: skip


def _of_the_readme() -> Iterator[Claim]:
    for algorithm in ("gepo", "gspo"):
        yield _readme(
            f"Methods with one weight per rollout go on learning 64 versions behind ({algorithm.upper()})",
            "stale64", _side(algorithm), _side(algorithm, metric="warm_start_accuracy"), direction="above",
        )  # fmt: skip
    for algorithm in ("grpo", "dapo"):
        yield _readme(
            f"Methods with one weight per token lose about half 64 versions behind ({algorithm.upper()})",
            "stale64", _side(algorithm), _side(algorithm, ONLINE), direction="within", ratio=0.5, margin=0.1,
        )  # fmt: skip
    yield _readme(
        "GEPO is not the best in every setting: TOPR ends above it after 220 steps",
        "recommend", _side("topr"), _side("gepo"), direction="above",
    )  # fmt: skip
    yield _readme("After 220 steps GSPO ends above GEPO", "recommend", _side("gspo"), _side("gepo"), direction="above")
    yield _readme("After 400 steps GSPO ends below GEPO", _LONG, _side("gspo"), _side("gepo"), direction="below")
    yield _readme(
        "256 versions behind, GEPO with TOPR's treatment of good rollouts ends above GEPO",
        "stale256", _side("gepo-topr", versions(256)), _side("gepo", versions(256)), direction="above",
    )  # fmt: skip
    yield _readme(
        "256 versions behind, GEPO with TOPR's treatment of good rollouts ends above GEPO",
        "ladder", _side("gepo-topr", versions(256)), _side("gepo", versions(256)), direction="above",
    )  # fmt: skip


CLAIMS: tuple[Claim, ...] = (
    *_near_online(),
    *_against_gspo(),
    *_collapse(),
    *_token_level(),
    *_baselines(),
    *_mechanism(),
    *_of_the_readme(),
)
"""The table, in the order in which it is shown."""
