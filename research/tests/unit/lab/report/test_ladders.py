"""Ladders join equal seeds on each rung, and rungs stand where their delays and tokens are."""

import pytest
from matplotlib.figure import Figure

from heterorl_research.lab.report import ladders
from heterorl_research.lab.report.drawing.palette import looks
from heterorl_research.lab.report.reading import load
from research.tests.support.lab_results import make_run, write_results


def drawn(picture):
    grid = Figure().subplots(1, len(picture.panels), squeeze=False).ravel()
    picture.draw(list(grid))
    return grid


@pytest.mark.parametrize(
    ("axis", "rungs"), [("delay", [("t5", 0), ("t5", 8), ("t5", 64)]), ("task", [("t5", 8), ("t21", 8), ("t101", 8)])]
)
def test_ladder_has_a_rung_of_paired_differences_for_each_delay_and_each_task(tmp_path, axis, rungs):
    runs = [
        make_run(name, delay, seed, last=base + gain, task=task, run_id=f"{task}-{name}-{delay}-{seed}")
        for number, (task, delay) in enumerate(rungs)
        for seed, base in enumerate((0.3, 0.5))
        for name, gain in (("gepo", 0.0), ("topr", 0.01 * number))
    ]
    results = load(write_results(tmp_path, runs))

    (picture,) = ladders.ladders(results, looks(results.arms))
    (axes,) = drawn(picture)

    (bars,) = axes.containers
    assert picture.name == f"ladder_{axis}"
    # 101 tokens are more than 21, and 21 more than 5.
    assert list(bars.lines[0].get_ydata()) == pytest.approx([0.01 * number for number in range(len(rungs))])


def test_delays_stand_by_powers_of_two_and_no_delay_below_them(tmp_path):
    runs = [make_run(name, delay, 0) for name in ("gepo", "topr") for delay in (0, 8, 64, 256)]
    results = load(write_results(tmp_path, runs))

    (picture,) = ladders.ladders(results, looks(results.arms))
    (axes,) = drawn(picture)

    assert list(axes.get_xticks()) == [0.5, 3.0, 6.0, 8.0]
    assert [text.get_text() for text in axes.get_xticklabels()][:2] == ["no delay", "8 versions"]


def test_delays_of_several_kinds_stand_one_after_another(tmp_path):
    runs = [
        make_run(name, 8, 0, delay_kind=kind, run_id=f"{name}-{kind}")
        for name in ("gepo", "topr")
        for kind in ("fixed", "uniform", "lognormal")
    ]
    results = load(write_results(tmp_path, runs))

    (picture,) = ladders.ladders(results, looks(results.arms))
    (axes,) = drawn(picture)

    assert list(axes.get_xticks()) == [0.0, 1.0, 2.0]


def test_tokens_stand_on_a_logarithmic_axis_and_a_second_rate_beside_them(tmp_path):
    # Warm start 0.3; seed 1 ends 0.1 above seed 0 throughout.
    ends = {"t5": (0.5, 0.6), "t101": (0.2, 0.5), "t101-slow": (0.25, 0.4)}
    runs = [
        make_run(name, 64, seed, last=last + seed / 10, task=task, lr=rate, run_id=f"{task}-{name}-{seed}")
        for task, rate in (("t5", 7e-4), ("t101", 1e-4), ("t101-slow", 3e-5))
        for name, last in zip(("gepo", "topr"), ends[task], strict=True)
        for seed in (0, 1)
    ]
    results = load(write_results(tmp_path, runs))

    picture = ladders.by_tokens(results, looks(results.arms), {"t5": 5, "t101": 101, "t101-slow": 101})
    gain, beside = drawn(picture)

    assert gain.get_xscale() == "log"
    assert [text.get_text() for text in gain.get_xticklabels()] == ["5", "101", "101 at\n3e-5"]
    lines = [list(container.lines[0].get_ydata()) for container in gain.containers]
    # Of each algorithm first what a line joins, then the hollow dot.
    assert lines == [pytest.approx(values) for values in ([0.25, -0.05], [0.0], [0.35, 0.25], [0.15])]
    lines = [list(container.lines[0].get_ydata()) for container in beside.containers]
    assert lines == [[], [], pytest.approx([0.1, 0.3]), pytest.approx([0.15])]
    assert [sign.mark for sign in picture.signs] == ["bar", "hollow"]
