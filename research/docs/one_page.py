"""Pooled differences and gates of the one page (docs/results.md): what its pictures draw and its first table holds."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from docs.markdown import table
from heterorl_research.lab.report.data import Run, mean
from heterorl_research.lab.report.reading import load_table
from heterorl_research.lab.statistics.intervals import Interval, interval
from research.docs.lab_tables import RESULTS

BASELINE = "gepo"
LAGS = (0, 8, 64, 256)
LENGTHS = (5, 21, 101, 301)
_DELAYS: dict[int, tuple[str, ...]] = {
    0: ("candidates_ends", "whole_ends", "ladder"),
    8: ("ladder",),
    64: ("candidates", "confirm", "whole", "arms"),
    256: ("candidates_ends", "whole_ends", "ladder"),
}
"""Experiments with five tokens of addition at each lag: a seed counts once, from the first that has it."""
_TOKENS: dict[int, tuple[tuple[str, str, str], ...]] = {
    5: (("lengths", "t5", ""),),
    21: (("lengths", "t21", ""), ("whole_lengths", "t21", "")),
    101: (("lengths", "t101", ""), ("whole_lengths", "t101", "")),
    301: (("cliff301", "t301", "exact"),),
}
"""Experiment, task and variant of the completions of each length, one learning rate for all rules of a length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A rule minus GEPO on equal seeds, and the mean KL of a completion over training, nats."""

    difference: Interval
    nats: float | None


def _finished(name: str) -> list[Run]:
    return load_table(RESULTS / f"{name}.json").finished


def _by_seed(runs: Iterable[Run], value: Callable[[Run], float | None]) -> dict[int, float]:
    """The mean of a seed's runs: of its learning rates, where there are several."""
    found: dict[int, list[float]] = defaultdict(list)
    for run in runs:
        number = value(run)
        if number is not None:
            found[run.seed].append(number)
    return {seed: sum(numbers) / len(numbers) for seed, numbers in found.items()}


def _differences(tables: Iterable[Sequence[Run]]) -> dict[str, dict[int, float]]:
    """Of each rule the difference to GEPO by seed; a seed counts once, from the first table that has it."""
    found: dict[str, dict[int, float]] = defaultdict(dict)
    for runs in tables:
        own = _by_seed((run for run in runs if run.algorithm == BASELINE), lambda run: run.last)
        for name in {run.algorithm for run in runs} - {BASELINE}:
            last = _by_seed((run for run in runs if run.algorithm == name), lambda run: run.last)
            for seed in sorted(last.keys() & own.keys() - found[name].keys()):
                found[name][seed] = last[seed] - own[seed]
    return found


def by_lag() -> dict[str, dict[int, Interval]]:
    """Rules at five tokens of addition minus GEPO, by lag: at 64 versions the mean of three rates where three ran."""
    points: dict[str, dict[int, Interval]] = defaultdict(dict)
    for lag, names in _DELAYS.items():
        tables = (
            [run for run in _finished(name) if run.delay == lag and run.delay_kind in ("none", "fixed")]
            for name in names
        )
        for rule, differences in _differences(tables).items():
            found = interval(list(differences.values()))
            if found is not None:
                points[rule][lag] = found
    return points


def own_rates() -> dict[str, dict[int, Interval]]:
    """The same where each rule has a rate that was chosen for it: `horizon`."""
    points: dict[str, dict[int, Interval]] = defaultdict(dict)
    runs = _finished("horizon")
    for lag in (0, 64):
        for rule, differences in _differences([[run for run in runs if run.delay == lag]]).items():
            found = interval(list(differences.values()))
            if found is not None:
                points[rule][lag] = found
    return points


def _of_length(tokens: int) -> list[list[Run]]:
    return [
        [run for run in _finished(name) if (run.task, run.variant) == (task, variant)]
        for name, task, variant in _TOKENS[tokens]
    ]


def by_length() -> dict[str, dict[int, Point]]:
    """Sums in a row, 64 versions behind: rules minus GEPO by the tokens of a completion; GEPO itself is at 0."""
    points: dict[str, dict[int, Point]] = defaultdict(dict)
    for tokens in LENGTHS:
        tables = _of_length(tokens)
        runs = [run for table in tables for run in table]
        differences = _differences(tables)
        nats = {rule: mean([run.kl_mean for run in runs if run.algorithm == rule]) for rule in (BASELINE, *differences)}
        points[BASELINE][tokens] = Point(
            difference=Interval(mean=0.0, half=None, lowest=0.0, highest=0.0, num=len({run.seed for run in runs})),
            nats=nats[BASELINE],
        )
        for rule, values in differences.items():
            found = interval(list(values.values()))
            if found is not None:
                points[rule][tokens] = Point(difference=found, nats=nats[rule])
    return points


def gates(rules: Sequence[str]) -> Iterator[tuple[str, float, float]]:
    """Rule, nats of a completion and share of the bad rollouts that train: means over seeds of a tenth of the steps."""
    for name in ("cliff301", "cliff1001"):
        runs = [run for run in _finished(name) if run.algorithm in rules]
        for rule, variant in sorted({(run.algorithm, run.variant) for run in runs}):
            series = [run.series for run in runs if (run.algorithm, run.variant) == (rule, variant)]
            for stretch in range(len(series[0]["kl"])):
                nats, share = (mean([one[key][stretch] for one in series]) for key in ("kl", "bad_trained"))
                if nats is not None and share is not None:
                    yield rule, nats, share


_RULES = {
    "gepo-1s": "`gepo_1s`",
    "gepo-1s-d0": "`gepo_1s`, limit",
    "gepo-whole": "`gepo_whole`",
    "topr": "`topr`",
    "gspo": "`gspo`",
    "grpo": "`grpo`",
    "grpo-dual": "`grpo`, `dual_clip = 3`",
    "reinforce": "`reinforce`",
}
_PAPER = (
    ('"only a 3 % performance drop from online"', "last accuracy minus 0.97 x online", "horizon+sawtooth",
     "GEPO ends at most 3 % below its online result"),
    ('"reduces the best-to-last gap by 85 %"', "gap minus 0.15 x GSPO's gap", "sawtooth",
     "GEPO's gap is 85 % below GSPO's"),
    ('"the highest scores", delayed', "best less GSPO's", "sawtooth", "best accuracy is above GSPO's"),
    ('"the highest scores", online', "best less GSPO's", "horizon",
     "Without delay GEPO's best accuracy is above GSPO's"),
    ("GSPO collapses", "seeds that lose half of their gain", "sawtooth", "GSPO collapses:"),
    ("GEPO ends above GRPO", "last less GRPO's", "sawtooth", "GEPO ends above GRPO"),
    ('"latency significantly increases KL"', "nats less online", "horizon",
     "The KL divergence is higher 64 versions behind than without delay (GEPO)"),
    ('"exponentially reduce the variance"', "variance less GSPO's", "horizon",
     "on the rollouts that GEPO trained on, GEPO's weights vary less"),
)  # fmt: skip
"""What the paper prints (arXiv 2508.17850v9; without quotes: in sense), the nearest test, and its row of the claims."""


def _cell(found: Interval | None) -> str:
    return "-" if found is None or found.half is None else f"{found.mean:+.3f} +- {found.half:.3f}"


def rules() -> str:
    """A row for each rule: its last accuracy minus GEPO's, by lag and by tokens."""
    lags, lengths = by_lag(), by_length()
    shown = [lag for lag in LAGS if lag != 8]
    head = [*(f"5, {lag}" for lag in shown), *(f"{one}, 64" for one in LENGTHS[1:])]
    rows = []
    for rule, title in _RULES.items():
        points = [lengths.get(rule, {}).get(tokens) for tokens in LENGTHS[1:]]
        cells = [
            *(lags.get(rule, {}).get(lag) for lag in shown),
            *(None if point is None else point.difference for point in points),
        ]
        rows.append([title, *map(_cell, cells)])
    return table(["tokens, lag:", *head], rows)


def paper() -> str:
    """A row for each sentence of the paper: the nearest test, and what it says."""
    found = json.loads((RESULTS / "claims.json").read_bytes())
    rows = []
    for printed, test, experiment, words in _PAPER:
        (row,) = (row for row in found if row["experiment"] == experiment and words in row["claim"])
        half = (row["high"] - row["low"]) / 2
        value = f"{row['difference']:+.3f} +- {half:.3f}"
        if words.startswith("GSPO collapses"):
            # The middle of Wilson's interval is not the share.
            value = f"{row['difference'] * row['seeds']:.0f} of {row['seeds']}"
        regime = "lag" if "sawtooth" in experiment else "no"
        rows.append([printed, test, regime, value, row["verdict"]])
    return table(["the paper", "nearest test", "regime", "result", "verdict"], rows)


ONE_PAGE: dict[str, Callable[[], str]] = {"rules": rules, "paper": paper}
"""What a marker may name, and what is written there."""
