"""All claims: of the paper (arXiv 2508.17850), of the project's README and of the project's own proposals.

Each states the question that it answers and the experiment that tests it. A sentence that several experiments can test
stands here once for each of them. `A+B` are experiments of one regime whose runs are joined. Experiments that were not
run yet stay here: their claims are "not tested". What results have suggested names the experiment they are of.

A fixed delay of 64 versions is not what the paper calls 64: its log shows a saw-tooth of 0 to 57, on average 26.5,
which `sawtooth` runs. Fixed delays are harsher, by more than a factor of two.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from heterorl.lab.claims.claim import ONLINE, Claim, Side, versions
from heterorl.lab.report.data import COLLAPSE_MARGIN

_NEAR, _FAR, _FARTHEST = versions(8), versions(64), versions(256)
_SAW = "sawtooth <= 57 versions"
_LONG = "stale256+gspo64"
_SECONDS = {
    "lognormal": "lognormal refresh less 60 <= 1920 s",
    "Weibull": "weibull refresh less 60 <= 1920 s",
    "exponential": "exponential refresh less 60 <= 1920 s",
}
_LENGTHS = {"t5": "5 tokens", "t21": "21 tokens", "t101": "101 tokens", "t101-slow": "101 tokens at 3e-5"}
_SEEN: dict[str, tuple[str, ...]] = {"t5": ("lengths",), "t21": ("lengths",)}  # before it was stated
CONFIRMED = "gepo-1s"
"""The candidate that experiment `confirm` tests."""

_DELAY = "Does GEPO bear a delay?"
_GSPO = "GEPO or GSPO under delay?"
_GAP = "How far does the last accuracy fall below the best?"
_COLLAPSE = "Who collapses?"
_TOKEN = "Do methods with one weight per token fail under delay?"
_OTHERS = "GEPO or another method under delay?"
_WHY = "Why: divergence, variance, error"
_CLIP = "Which half of the clip acts?"
_BETTER = "Is there a better rule than GEPO?"


def _claim(question: str, claim: str, experiment: str, a: Side, b: Side | None, **test: Any) -> Claim:
    return Claim(**{"source": "paper", **test}, question=question, claim=claim, experiment=experiment, a=a, b=b)


def _readme(question: str, claim: str, experiment: str, a: Side, b: Side | None, **test: Any) -> Claim:
    # What the README says it has read off this very experiment.
    seen = {"source": "README", "suggested_by": tuple(experiment.split("+"))}
    return _claim(question, claim, experiment, a, b, **{**seen, **test})


def _side(algorithm: str, delay: str = _FAR, metric: str = "last", variant: str | None = "") -> Side:
    return Side(algorithm=algorithm, delay=delay, metric=metric, variant=variant)


def _near_online() -> Iterator[Claim]:
    for experiment in ("stale64", "horizon"):
        yield _claim(
            _DELAY, "64 versions behind throughout, harsher than the paper's 64, GEPO ends at most 3 % below its online"
            " result",
            experiment, _side("gepo"), _side("gepo", ONLINE), direction="above", ratio=0.97,
        )  # fmt: skip
    yield _claim(
        _DELAY, "At what the paper calls 64 versions, a saw-tooth of 0 to 57, GEPO ends at most 3 % below its online"
        " result",
        "horizon+sawtooth", _side("gepo", _SAW), _side("gepo", ONLINE), direction="above", ratio=0.97,
    )  # fmt: skip


def _against_gspo() -> Iterator[Claim]:
    for experiment, delay in (
        ("recommend", _FAR), (_LONG, _FAR), ("horizon", _FAR), ("sawtooth", _SAW), ("ladder", _NEAR),
        ("ladder", _FAR), ("candidates_ends", _FARTHEST),
    ):  # fmt: skip
        yield _claim(
            _GSPO, "Under delay GEPO ends above GSPO",
            experiment, _side("gepo", delay), _side("gspo", delay), direction="above",
        )  # fmt: skip
    for task, tokens in _LENGTHS.items():
        yield _claim(
            _GSPO, f"64 versions behind, GEPO ends above GSPO with completions of {tokens}",
            "lengths", _side("gepo"), _side("gspo"), direction="above", task=task,
            suggested_by=("lengths",) if task == "t5" else (),
        )  # fmt: skip
    for law, delay in _SECONDS.items():
        yield _claim(
            _GSPO, f"With {law} delays of up to 1920 s GEPO ends above GSPO",
            "s6_latency", _side("gepo", delay), _side("gspo", delay), direction="above",
        )  # fmt: skip
    early = ("recommend", "stale64", "stale256")
    yield _claim(
        _GSPO, "GEPO is behind GSPO early, at step 220",
        "horizon", _side("gepo", metric="at:220"), _side("gspo", metric="at:220"), direction="below",
        source="README", suggested_by=early,
    )  # fmt: skip
    yield _claim(
        _GSPO, "From step 220 to the end GEPO gains on GSPO",
        "horizon", _side("gepo", metric="after:220"), _side("gspo", metric="after:220"), direction="above",
        source="README", suggested_by=early,
    )  # fmt: skip
    yield _readme(
        _GSPO, "After 220 steps GSPO ends above GEPO", "recommend", _side("gspo"), _side("gepo"), direction="above"
    )
    yield _readme(_GSPO, "After 400 steps GSPO ends below GEPO", _LONG, _side("gspo"), _side("gepo"), direction="below")


def _gap() -> Iterator[Claim]:
    for experiment, delay in (("recommend", _FAR), (_LONG, _FAR), ("horizon", _FAR), ("sawtooth", _SAW)):
        gaps = _side("gepo", delay, "gap"), _side("gspo", delay, "gap")
        yield _claim(_GAP, "GEPO's gap is below GSPO's", experiment, *gaps, direction="below")
        yield _claim(_GAP, "GEPO's gap is 85 % below GSPO's", experiment, *gaps, direction="below", ratio=0.15)


def _collapse() -> Iterator[Claim]:
    margin = f"{COLLAPSE_MARGIN:g}".removeprefix("0")
    for experiment, task, delay in (
        ("stale64", "add3", _FAR), ("horizon", "add3", _FAR), ("sawtooth", "add3", _SAW), ("lengths", "t21", _FAR),
        ("lengths", "t101", _FAR), ("s6_latency", "add3", _SECONDS["lognormal"]),
    ):  # fmt: skip
        for algorithm, sentence, direction, share in (
            ("gspo", f"Under delay GSPO collapses: most seeds end over {margin} below their warm start", "above", 0.5),
            ("gepo", "Under delay GEPO does not collapse: fewer than one seed of four does", "below", 0.25),
        ):  # fmt: skip
            yield _claim(
                _COLLAPSE, sentence, experiment, _side(algorithm, delay, "has_collapsed"), None,
                direction=direction, margin=share, task=task,
            )  # fmt: skip
        yield _claim(
            _COLLAPSE, "Under delay GSPO collapses in more seeds than GEPO", experiment,
            _side("gspo", delay, "has_collapsed"), _side("gepo", delay, "has_collapsed"), direction="above", task=task,
        )  # fmt: skip


def _token_level() -> Iterator[Claim]:
    for algorithm, name in (("grpo", "GRPO"), ("dr_grpo", "Dr. GRPO"), ("bnpo", "BNPO")):
        yield _claim(
            _TOKEN, f"{name} loses accuracy to a delay of 64 versions",
            "stale64", _side(algorithm), _side(algorithm, ONLINE), direction="below",
        )  # fmt: skip
    yield _claim(
        _TOKEN, "GRPO loses accuracy to a delay of 64 versions",
        "horizon", _side("grpo"), _side("grpo", ONLINE), direction="below",
    )  # fmt: skip
    yield _claim(
        _TOKEN, "GRPO loses accuracy to a saw-tooth of 0 to 57 versions",
        "horizon+sawtooth", _side("grpo", _SAW), _side("grpo", ONLINE), direction="below",
    )  # fmt: skip
    for law, delay in _SECONDS.items():
        yield _claim(
            _TOKEN, f"With {law} delays of up to 1920 s GEPO ends above GRPO",
            "s6_latency", _side("gepo", delay), _side("grpo", delay), direction="above",
        )  # fmt: skip
    yield _claim(
        _TOKEN, "GRPO loses accuracy to a delay of 8 versions",
        "ladder", _side("grpo", _NEAR), _side("grpo", ONLINE), direction="below",
    )  # fmt: skip
    for task, tokens in _LENGTHS.items():
        yield _claim(
            _TOKEN, f"64 versions behind, GEPO ends above GRPO with completions of {tokens}",
            "lengths", _side("gepo"), _side("grpo"), direction="above", task=task, suggested_by=_SEEN.get(task, ()),
        )  # fmt: skip
    yield _claim(
        _TOKEN, "A dual clip gives GRPO back some of that loss: it ends above GRPO",
        "arms", _side("grpo-dual"), _side("grpo"), direction="above", source="project",
    )  # fmt: skip
    for algorithm in ("gepo", "gspo"):
        yield _readme(
            _TOKEN, f"Methods with one weight per rollout go on learning 64 versions behind ({algorithm.upper()})",
            "stale64", _side(algorithm), _side(algorithm, metric="warm_start_accuracy"), direction="above",
        )  # fmt: skip
    for algorithm in ("grpo", "dapo"):
        yield _readme(
            _TOKEN, f"Methods with one weight per token lose about half 64 versions behind ({algorithm.upper()})",
            "stale64", _side(algorithm), _side(algorithm, ONLINE), direction="within", ratio=0.5, margin=0.1,
        )  # fmt: skip


def _others() -> Iterator[Claim]:
    yield _claim(
        _OTHERS, "Under delay GEPO ends above CISPO", "stale64", _side("gepo"), _side("cispo"), direction="above"
    )
    for experiment in ("recommend", "horizon"):
        yield _claim(
            _OTHERS, "Under delay GEPO ends above TOPR", experiment, _side("gepo"), _side("topr"), direction="above"
        )
    yield _readme(
        _OTHERS, "GEPO is not the best in every setting: TOPR ends above it after 220 steps",
        "recommend", _side("topr"), _side("gepo"), direction="above",
    )  # fmt: skip
    for task, tokens in _LENGTHS.items():
        yield _claim(
            _OTHERS, f"64 versions behind, GEPO ends above TOPR with completions of {tokens}",
            "lengths", _side("gepo"), _side("topr"), direction="above", task=task, suggested_by=_SEEN.get(task, ()),
        )  # fmt: skip
    for algorithm, name in (
        ("reinforce", "no correction at all"), ("impala", "V-trace"), ("vcpo", "VCPO"),
        ("mois", "the mixture over staleness of its authors' program"),
    ):  # fmt: skip
        yield _claim(
            _OTHERS, f"Under delay GEPO ends above {name}", "arms", _side("gepo"), _side(algorithm),
            direction="above", source="project",
        )  # fmt: skip


def _mechanism() -> Iterator[Claim]:
    for metric, name in (("kl_mean", "The KL divergence"), ("iw_var_mean", "The variance of its own weights")):
        for algorithm in ("gepo", "gspo"):
            for experiment, near in (("stale64", versions(8)), ("horizon", ONLINE)):
                yield _claim(
                    _WHY, f"{name} grows with the delay ({algorithm.upper()})", experiment,
                    _side(algorithm, metric=metric), _side(algorithm, near, metric), direction="above",
                )  # fmt: skip
    for algorithm in ("gepo", "gspo"):
        yield _claim(
            _WHY, f"On the rollouts that {algorithm.upper()} trained on, GEPO's weights vary less than GSPO's",
            "horizon", _side(algorithm, metric="series:iw_var_gepo"), _side(algorithm, metric="series:iw_var_gspo"),
            direction="below",
        )  # fmt: skip
    # The error in older results is in units of each method's own advantages.
    yield _claim(
        _WHY, "GEPO's weights estimate the expected advantage with less error than GSPO's",
        "horizon", _side("gepo", metric="advantage_error_mean"), _side("gspo", metric="advantage_error_mean"),
        direction="below",
    )  # fmt: skip


def _clip_halves() -> Iterator[Claim]:
    pilot = ("stale256", "recommend")
    for experiment, delay in (("clips", _FAR), ("clips256", _FARTHEST)):
        for weight, name in (("gepo", "GEPO"), ("gspo", "GSPO")):
            seen: dict[str, Any] = {"source": "project", "suggested_by": pilot}
            yield _claim(
                _CLIP, f"The upper half of {name}'s clip costs accuracy: without it the rule ends higher", experiment,
                _side(f"{weight}-lower", delay), _side(weight, delay), direction="above", **seen,
            )  # fmt: skip
            yield _claim(
                _CLIP, f"The lower half of {name}'s clip is needed: without it the rule ends lower", experiment,
                _side(f"{weight}-upper", delay), _side(weight, delay), direction="below", **seen,
            )  # fmt: skip
        yield _claim(
            _CLIP, "How good rollouts are weighted hardly matters: with a weight of 1 GEPO without its upper clip ends"
            " within .03", experiment,
            _side("gepo-one-lower", delay), _side("gepo-lower", delay), direction="within", margin=0.03, **seen,
        )  # fmt: skip


def _better() -> Iterator[Claim]:
    pilot = ("stale256", "recommend")
    for algorithm, name in (("gepo-1s", "GEPO-1s"), ("gepo-topr", "GEPO with TOPR's treatment of good rollouts")):
        yield _claim(
            _BETTER, f"64 versions behind, {name} ends above GEPO", "horizon", _side(algorithm), _side("gepo"),
            direction="above", source="project", suggested_by=pilot,
        )  # fmt: skip
    yield _readme(
        _BETTER, "256 versions behind, GEPO with TOPR's treatment of good rollouts ends above GEPO",
        "stale256", _side("gepo-topr", _FARTHEST), _side("gepo", _FARTHEST), direction="above",
    )  # fmt: skip
    yield _claim(
        _BETTER, "256 versions behind, GEPO with TOPR's treatment of good rollouts ends above GEPO",
        "clips256", _side("gepo-one-lower", _FARTHEST), _side("gepo", _FARTHEST), direction="above",
        source="README", suggested_by=pilot,
    )  # fmt: skip
    for task, tokens in _LENGTHS.items():
        yield _claim(
            _BETTER, f"64 versions behind, gepo-1s ends above GEPO with completions of {tokens}",
            "lengths", _side("gepo-1s"), _side("gepo"), direction="above",
            task=task, source="project", suggested_by=(*pilot, *_SEEN.get(task, ())),
        )  # fmt: skip
    for algorithm in ("gepo-1s", "gepo-product", "gepo-quantile", "gepo-tempered"):
        yield _claim(
            _BETTER, f"64 versions behind, {algorithm} ends above GEPO in the mean over three learning rates",
            "candidates", _side(algorithm, variant=None), _side("gepo", variant=None), direction="above",
            source="project", suggested_by=pilot,
        )  # fmt: skip
        yield _claim(
            _BETTER, f"256 versions behind, {algorithm} ends above GEPO", "candidates_ends",
            _side(algorithm, _FARTHEST), _side("gepo", _FARTHEST), direction="above",
            source="project", suggested_by=pilot,
        )  # fmt: skip
    for baseline in ("gepo", "topr", "gspo", "gspo-opsm"):
        yield _claim(
            _BETTER, f"On seeds that chose nothing, {CONFIRMED} ends above {baseline} in the mean over learning rates",
            "confirm", _side(CONFIRMED, variant=None), _side(baseline, variant=None), direction="above",
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
)
"""The table, in the order in which it is shown."""
