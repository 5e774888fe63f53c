"""Committed results of the lab -> tables: accuracies over seeds, and differences on equal seeds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from docs.markdown import table
from heterorl_research.lab.report.data import Results, Run
from heterorl_research.lab.report.plane import planes
from heterorl_research.lab.report.reading import load_table
from heterorl_research.lab.statistics.intervals import interval

RESULTS = Path(__file__).parents[1] / "results"
_LEADING = ("gepo", "gspo", "topr", "gmpo", "dapo", "grpo", "dr_grpo", "cispo")
_STALE = ("gepo", "gepo-topr", "topr", "seq_tis_ess", "tis", "m2po", "decoupled_ppo")
_SHORT = ("gepo", "gepo-1s", "topr", "gspo", "grpo")
_HORIZON = (0.0, 64.0)
_ENDS = (0.0, 256.0)
_FAR_ENDS = (64.0, 256.0)
_LADDER = (0.0, 8.0, 64.0, 256.0)
_PLANE = (0.0, 8.0, 64.0, 192.0)
_LENGTHS = {"t5": "5 tokens", "t21": "21 tokens", "t101": "101 tokens", "t101-slow": "101 tokens, 3e-5"}
_WHOLE_LENGTHS = {task: _LENGTHS[task] for task in ("t21", "t101")}
_LARGE_TOKENS = 101
# Results hold each series as the means of ten stretches, here of 20 steps.
_LARGE_STRETCHES = {4: "KL a token, steps 81 to 100", 6: "121 to 140", 9: "181 to 200"}
_CLIFF = {"exact": "3e-5", "noise": "3e-5, engines apart", "exact-1e-4": "1e-4"}
_CLIFF_GATES = (
    ("301 tokens, steps 109 to 120", "cliff301", "exact", 9),
    ("301, engines apart, steps 1 to 12", "cliff301", "noise", 0),
    ("1,001, steps 37 to 40", "cliff1001", "exact", 9),
    ("1,001, engines apart, steps 37 to 40", "cliff1001", "noise", 9),
)
"""Title, experiment, variant and stretch of a column: results hold a series as the means of ten stretches."""
_ARMS = {"fixed": "64 versions", "uniform_lag": "every lag of 0 to 64"}
_CLIPS = {"-none": "none", "-lower": "lower half", "-upper": "upper half", "": "both"}
_COLUMNS = {
    0.0: "no delay",
    8.0: "8 versions",
    57.0: "saw-tooth of 0 to 57",
    64.0: "64 versions",
    128.0: "128 versions",
    192.0: "192 versions",
    256.0: "256 versions",
}
_LAWS = {
    ("lognormal refresh less 60", 1920.0): "lognormal, 60 to 1,920 s",
    ("weibull refresh less 60", 1920.0): "Weibull, 60 to 1,920 s",
    ("exponential refresh less 60", 1920.0): "exponential, 60 to 1,920 s",
    ("lognormal refresh less 400", 3600.0): "lognormal, 400 to 3,600 s",
}


def cell(runs: Sequence[Run]) -> str:
    """Last accuracy over seeds: mean, half of the 95 % t-interval, worst seed; and how many runs failed."""
    failed = sum(bool(run.failed) for run in runs)
    found = interval([run.last for run in runs if not run.failed and run.last is not None])
    if found is None:
        text = "-"
    else:
        half = "" if found.half is None else f" +- {found.half:.3f}"
        text = f"{found.mean:.3f}{half}, worst {found.lowest:.3f}"
    return f"{text}, {failed} failed" if failed else text


def _mean(runs: Sequence[Run]) -> str:
    """Last accuracy over seeds, without the worst seed."""
    return cell(runs).partition(", worst")[0]


def accuracies(
    results: Results,
    delays: Sequence[float],
    algorithms: Sequence[str] = (),
    shown: Callable[[Sequence[Run]], str] = cell,
) -> str:
    """A row for each algorithm, a column for each delay; without `algorithms` all: gepo first, then by name."""
    names = algorithms or sorted({run.algorithm for run in results.runs}, key=lambda name: (name != "gepo", name))
    return table(
        ["algorithm", *(_COLUMNS[delay] for delay in delays)],
        [
            [name, *(shown([r for r in results.runs if (r.algorithm, r.delay) == (name, delay)]) for delay in delays)]
            for name in names
        ],
    )


def paired(
    algorithm: str,
    baseline: str,
    runs: Iterable[Run],
    delay: float,
    of: Callable[[Run], float | None] = lambda run: run.last,
) -> str:
    """Last accuracy minus the baseline's on equal seeds: mean, half interval, worst seed, seeds above the baseline."""
    last = {
        (run.algorithm, run.seed): found
        for run in runs
        if run.delay == delay and not run.failed and (found := of(run)) is not None
    }
    seeds = sorted(seed for name, seed in last if name == algorithm and (baseline, seed) in last)
    differences = [last[algorithm, seed] - last[baseline, seed] for seed in seeds]
    found = interval(differences)
    if found is None or found.half is None:
        return "-"
    above = sum(difference > 0 for difference in differences)
    return f"{found.mean:+.3f} +- {found.half:.3f}, worst {found.lowest:+.3f}, {above} of {found.num}"


def _lab(name: str, task: str = "") -> Results:
    """Results of an experiment, or of one of its tasks."""
    found = load_table(RESULTS / f"{name}.json")
    return found.model_copy(update={"runs": [run for run in found.runs if task in ("", run.task)]})


def _beside_gepo() -> str:
    short, long = _lab("recommend").runs, [*_lab("stale256").runs, *_lab("gspo64").runs]
    return table(
        ["algorithm", "220 steps, 10 seeds", "400 steps, 5 seeds"],
        [
            [name, *(paired(name, "gepo", runs, 64.0) for runs in (short, long))]
            for name in ("gspo", "topr", "gepo-topr")
        ],
    )


def _gates(name: str, *, beside: str = "gepo-whole", delay: float = 64.0) -> str:
    """Each rule of an experiment: its last accuracy, and minus that of another, sampled and greedy."""
    runs = _lab(name).runs
    rows = []
    for rule in dict.fromkeys(run.algorithm for run in runs):
        own = [run for run in runs if run.algorithm == rule]
        nats = [run.kl_mean for run in own if run.kl_mean is not None]
        rows.append([
            rule, cell(own), paired(rule, beside, runs, delay),
            paired(rule, beside, runs, delay, of=lambda run: run.last_greedy).partition(", worst")[0],
            f"{sum(nats) / len(nats):.2f}",
        ])  # fmt: skip
    return table(["rule", "last", f"minus {beside}", "the same, greedy", "nats a completion"], rows)


def _warmup() -> str:
    """Rules with a warm-up of 100 steps, minus their runs of `gates21` with 20, and minus gepo-whole."""
    own = _lab("warmup21").runs
    rules = dict.fromkeys(run.algorithm for run in own)
    short = [run.model_copy(update={"algorithm": f"{run.algorithm}, 20 steps"}) for run in _lab("gates21").runs]
    return table(
        ["rule", "last", "minus its runs with 20 steps", "minus gepo-whole"],
        [
            [
                rule,
                cell([run for run in own if run.algorithm == rule]),
                paired(rule, f"{rule}, 20 steps", [*own, *short], 64.0),
                paired(rule, "gepo-whole", own, 64.0),
            ]
            for rule in rules
        ],
    )


def _chosen_rates(experiment: str, delays: Sequence[float], task: str = "") -> str:
    rates = {(run.algorithm, run.delay): run.lr for run in _lab(experiment, task).runs}
    names = sorted({name for name, _ in rates}, key=lambda name: (name != "gepo", name))
    return table(
        ["algorithm", *(_COLUMNS[delay] for delay in delays)],
        [[name, *(f"{rates[name, delay]:g}" for delay in delays)] for name in names],
    )


def _clips() -> str:
    runs = _lab("clips").runs
    return table(
        ["weights", *(f"clip: {text}" for text in _CLIPS.values())],
        [
            [name, *(cell([run for run in runs if run.algorithm == name + half]) for half in _CLIPS)]
            for name in ("gepo", "gepo-one", "gspo", "gspo-one")
        ],
    )


def _by_rate(name: str, shown: Callable[[str, Sequence[Run]], str]) -> str:
    """A row for each algorithm of an experiment whose axis is the learning rate, best worst mean first."""
    runs = _lab(name).runs
    rates = sorted({run.lr for run in runs})

    def worst(algorithm: str) -> float:
        means = (interval([run.last for run in runs if (run.algorithm, run.lr) == (algorithm, rate)]) for rate in rates)
        return min(found.mean for found in means if found is not None)

    return table(
        ["algorithm", *(f"rate {rate:g}" for rate in rates)],
        [
            [one, *(shown(one, [run for run in runs if run.lr == rate]) for rate in rates)]
            for one in sorted({run.algorithm for run in runs}, key=worst, reverse=True)
        ],
    )


def _rates(name: str) -> str:
    return _by_rate(name, lambda algorithm, runs: cell([run for run in runs if run.algorithm == algorithm]))


def _rates_beside(name: str, baseline: str) -> str:
    return _by_rate(
        name, lambda algorithm, runs: "-" if algorithm == baseline else paired(algorithm, baseline, runs, 64.0)
    )


def _beside(name: str, baseline: str, delays: Sequence[float], task: str = "") -> str:
    runs = _lab(name, task).runs
    names = sorted({run.algorithm for run in runs} - {baseline}, key=lambda one: (one != "gepo", one))
    return table(
        ["algorithm", *(_COLUMNS[delay] for delay in delays)],
        [[one, *(paired(one, baseline, runs, delay) for delay in delays)] for one in names],
    )


def _own(algorithm: str, runs: Sequence[Run]) -> str:
    return cell([run for run in runs if run.algorithm == algorithm])


def _minus_gepo(algorithm: str, runs: Sequence[Run]) -> str:
    return paired(algorithm, "gepo", runs, runs[0].delay) if runs else "-"


def _minus_whole(algorithm: str, runs: Sequence[Run]) -> str:
    return paired(algorithm, "gepo-whole", runs, runs[0].delay) if runs else "-"


def _by_law(shown: Callable[[str, Sequence[Run]], str], *, baseline: str = "") -> str:
    """A row for each algorithm but the baseline, a column for each law of delays in seconds."""
    runs = _lab("s6_latency").runs
    columns = [[run for run in runs if (run.delay_kind, run.delay) == law] for law in _LAWS]
    names = sorted({run.algorithm for run in runs} - {baseline}, key=lambda one: (one != "gepo", one))
    return table(["algorithm", *_LAWS.values()], [[one, *(shown(one, column) for column in columns)] for one in names])


def _by(
    name: str,
    columns: dict[str, str],
    of: Callable[[Run], str],
    shown: Callable[[str, Sequence[Run]], str],
    *,
    less: str,
) -> str:
    """A row for each algorithm but `less`, a column for each value of a run's task or kind of delay."""
    runs = _lab(name).runs
    parts = [[run for run in runs if of(run) == value] for value in columns]
    names = sorted({run.algorithm for run in runs} - {less}, key=lambda one: (one != "gepo", one))
    return table(["algorithm", *columns.values()], [[one, *(shown(one, part) for part in parts)] for one in names])


def _by_value(variant: str) -> tuple[str, float]:
    key, _, value = variant.partition("=")
    return key, float(value or 0)


def _variants(name: str) -> str:
    """A row for each variant of an experiment, a column for each algorithm, and their difference."""
    runs = _lab(name).runs
    names = sorted({run.algorithm for run in runs})
    rows = []
    for variant in sorted({run.variant for run in runs}, key=_by_value):
        part = [run for run in runs if run.variant == variant]
        row = [variant or "the regime itself", *(_own(one, part) for one in names)]
        rows.append([*row, paired(names[0], names[1], part, part[0].delay)])
    return table(["what changes", *names, f"{names[0]} minus {names[1]}"], rows)


def _plane() -> str:
    """A row for each algorithm and learning rate, a column for each delay: what was gained on the warm start."""
    found = [(name, cell) for name, cells in planes(_lab("plane"), "add3").items() for cell in cells]
    gains = {(name, cell.lr, cell.delay.value): cell.gain for name, cell in found}
    return table(
        ["algorithm", "learning rate", *(_COLUMNS[delay] for delay in _PLANE)],
        [
            [
                name,
                f"{rate:g}",
                *("-" if gain is None else f"{gain.mean:+.3f}, worst {gain.lowest:+.3f}" for gain in row),
            ]
            for name, rate in dict.fromkeys((name, rate) for name, rate, _ in gains)
            for row in [[gains.get((name, rate, delay)) for delay in _PLANE]]
        ],
    )


def _large() -> str:
    """A row for each algorithm of one seed: accuracies, and how far it moves from its samplers for each token."""
    rows = []
    for run in sorted(_lab("large").finished, key=lambda run: (run.algorithm != "gepo", run.algorithm)):
        nats = [value or 0.0 for value in run.series["kl"]]
        rows.append(
            [
                run.algorithm,
                *("-" if value is None else f"{value:.3f}" for value in (run.warm_start_accuracy, run.best, run.last)),
                *(f"{nats[stretch] / _LARGE_TOKENS:.3f}" for stretch in _LARGE_STRETCHES),
            ]
        )
    return table(["algorithm", "warm start", "best", "last", *_LARGE_STRETCHES.values()], rows)


def _cliff_gates() -> str:
    """Share of the bad rollouts that train, and nats of a completion of 301 tokens at the end."""

    def mean_of(series: str, name: str, experiment: str, variant: str, stretch: int) -> str:
        runs = [run for run in _lab(experiment).runs if (run.algorithm, run.variant) == (name, variant)]
        values = [value for run in runs if (value := run.series[series][stretch]) is not None]
        return f"{sum(values) / len(values):.2f}" if values else "-"

    names = sorted({run.algorithm for run in _lab("cliff301").runs})
    return table(
        ["algorithm", "nats, steps 109 to 120", *(title for title, *_ in _CLIFF_GATES)],
        [
            [
                name,
                mean_of("kl", name, "cliff301", "exact", 9),
                *(mean_of("bad_trained", name, *place) for _, *place in _CLIFF_GATES),
            ]
            for name in names
        ],
    )


def _horizon_short() -> str:
    """The short table for users: each algorithm by its `loss.kind`, each delay as a staleness."""
    runs = _lab("horizon").runs
    return table(
        ["`loss.kind`", *(f"{delay:g} versions behind" for delay in _HORIZON)],
        [
            [
                f"`{name.replace('-', '_')}`",
                *(_mean([run for run in runs if (run.algorithm, run.delay) == (name, delay)]) for delay in _HORIZON),
            ]
            for name in _SHORT
        ],
    )


def _law_ages() -> str:
    runs = _lab("s6_latency").runs
    rows = []
    for law, title in _LAWS.items():
        found = [run for run in runs if (run.delay_kind, run.delay) == law and run.algorithm == "gepo"]
        ages = [run.staleness_mean for run in found if run.staleness_mean is not None]
        most = [run.staleness_max for run in found if run.staleness_max is not None]
        rows.append([title, f"{sum(ages) / len(ages):.1f}", f"{max(most):g}"])
    return table(["delay", "mean age, versions", "greatest age, versions"], rows)


LAB: dict[str, Callable[[], str]] = {
    "horizon-short": _horizon_short,
    "horizon": lambda: accuracies(_lab("horizon"), _HORIZON),
    "horizon-beside-gepo": lambda: _beside("horizon", "gepo", _HORIZON),
    "horizon-rates": lambda: _chosen_rates("horizon", _HORIZON),
    "clips": _clips,
    "candidates": lambda: _rates("candidates"),
    "candidates-beside-1s": lambda: _rates_beside("candidates", "gepo-1s"),
    "candidates-ends": lambda: accuracies(_lab("candidates_ends"), _ENDS),
    "candidates-ends-beside-1s": lambda: _beside("candidates_ends", "gepo-1s", _ENDS),
    "sawtooth": lambda: accuracies(_lab("sawtooth"), (57.0,)),
    "sawtooth-beside-gepo": lambda: _beside("sawtooth", "gepo", (57.0,)),
    "s6-latency": lambda: _by_law(_own),
    "s6-latency-beside-gepo": lambda: _by_law(_minus_gepo, baseline="gepo"),
    "s6-latency-ages": _law_ages,
    "ladder": lambda: accuracies(_lab("ladder"), _LADDER),
    "ladder-beside-gepo": lambda: _beside("ladder", "gepo", _LADDER),
    "lengths": lambda: _by("lengths", _LENGTHS, lambda run: run.task, _own, less=""),
    "lengths-beside-gepo": lambda: _by("lengths", _LENGTHS, lambda run: run.task, _minus_gepo, less="gepo"),
    "long": lambda: accuracies(_lab("long"), (0.0, 64.0)),
    "long-beside-gepo": lambda: _beside("long", "gepo", (0.0, 64.0)),
    "large": _large,
    "cliff": lambda: _by("cliff301", _CLIFF, lambda run: run.variant, _own, less=""),
    "cliff-beside-gepo": lambda: _by("cliff301", _CLIFF, lambda run: run.variant, _minus_gepo, less="gepo"),
    "cliff-gates": _cliff_gates,
    "arms": lambda: _by("arms", _ARMS, lambda run: run.delay_kind, _own, less=""),
    "arms-beside-gepo": lambda: _by("arms", _ARMS, lambda run: run.delay_kind, _minus_gepo, less="gepo"),
    "plane": _plane,
    "s7-sweeps": lambda: _variants("s7_sweeps"),
    "confirm": lambda: _rates("confirm"),
    "confirm-beside-1s": lambda: _rates_beside("confirm", "gepo-1s"),
    "whole": lambda: _rates("whole"),
    "whole-beside": lambda: _rates_beside("whole", "gepo-whole"),
    "whole-ends": lambda: accuracies(_lab("whole_ends"), _ENDS),
    "whole-ends-beside": lambda: _beside("whole_ends", "gepo-whole", _ENDS),
    "whole-lengths": lambda: _by("whole_lengths", _WHOLE_LENGTHS, lambda run: run.task, _own, less=""),
    "gates21": lambda: _gates("gates21"),
    "gates101": lambda: _gates("gates101"),
    "warmup21": _warmup,
    "whole-lengths-beside": lambda: _by(
        "whole_lengths", _WHOLE_LENGTHS, lambda run: run.task, _minus_whole, less="gepo-whole"
    ),
    "stale64-short": lambda: accuracies(_lab("stale64"), (0.0, 8.0, 64.0), _LEADING),
    "stale64": lambda: accuracies(_lab("stale64"), (0.0, 8.0, 64.0)),
    "stale256": lambda: accuracies(_lab("stale256"), (64.0, 128.0, 256.0), _STALE),
    "stale2026": lambda: accuracies(_lab("stale2026", "t5"), _FAR_ENDS),
    "stale2026-beside-gepo": lambda: _beside("stale2026", "gepo", _FAR_ENDS, "t5"),
    "stale2026-21": lambda: accuracies(_lab("stale2026", "t21"), _FAR_ENDS),
    "stale2026-21-beside-gepo": lambda: _beside("stale2026", "gepo", _FAR_ENDS, "t21"),
    "stale2026-21-rates": lambda: _chosen_rates("stale2026", _FAR_ENDS, "t21"),
    "stale2026-t21": lambda: _gates("stale2026_t21", beside="gepo"),
    "stale2026-t101": lambda: _gates("stale2026_t101", beside="gepo"),
    "stale2026-t101-256": lambda: _gates("stale2026_t101_256", beside="gepo", delay=256.0),
    "stale2026-rates": lambda: _chosen_rates("stale2026", _FAR_ENDS, "t5"),
    "beside-gepo": _beside_gepo,
    "recommend": lambda: accuracies(_lab("recommend"), (64.0,)),
}
"""What a marker may name, and what is written there."""
