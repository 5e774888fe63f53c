"""Figures show what was measured: nothing is lost on an axis, and failed runs are not drawn."""

import base64

import pytest
from matplotlib.figure import Figure

from heterorl_research.lab.report import curves, figures
from heterorl_research.lab.report.drawing import canvas
from heterorl_research.lab.report.drawing.canvas import scale
from heterorl_research.lab.report.drawing.palette import looks
from heterorl_research.lab.report.reading import load
from research.tests.support.lab_results import make_run, write_results


def drawn(picture):
    """The axes of a picture, drawn without a file."""
    grid = Figure().subplots(1, len(picture.panels), squeeze=False).ravel()
    picture.draw(list(grid))
    return grid


def picture_of(make, results, name):
    return next(picture for picture in make(results, looks(results.arms)) if picture.name == name)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1.0, 2.0, 49.0], "linear"),
        ([0.01, 0.1, 1.0], "log"),
        # A logarithmic axis would drop the zero and the negative value.
        ([0.0, 0.01, 0.1, 1.0], "symlog"),
        ([-0.01, 0.1, 1.0], "symlog"),
        ([0.0, 0.0], "linear"),
        ([], "linear"),
    ],
)
def test_scale_keeps_every_value_visible(values, expected):
    axes = Figure().subplots()
    axes.plot(values, "o")

    scale(axes, values)

    assert axes.get_yscale() == expected
    low, high = axes.get_ylim()
    assert all(low <= value <= high for value in values)


def test_accuracy_starts_at_the_warm_start_and_shows_mean_and_worst_seed(tmp_path):
    runs = [make_run("gepo", 8, seed, last=last) for seed, last in enumerate((0.4, 0.8))]
    results = load(write_results(tmp_path, runs))

    (axes,) = drawn(picture_of(curves.accuracy, results, "accuracy"))

    assert [sign.mark for sign in picture_of(curves.accuracy, results, "accuracy").signs] == ["thick", "thin", "band"]
    average, worst = axes.lines
    assert list(average.get_xdata()) == [0, 1, 2, 3]
    assert list(average.get_ydata()) == pytest.approx([0.3, 0.35, 0.6, 0.6])
    assert list(worst.get_ydata()) == [0.3, 0.35, 0.6, 0.4]
    assert len(axes.collections) == 1


def test_accuracy_of_one_seed_has_neither_band_nor_worst_line(tmp_path):
    results = load(write_results(tmp_path, [make_run("gepo", 8, 0)]))

    (axes,) = drawn(picture_of(curves.accuracy, results, "accuracy"))

    assert len(axes.lines) == 1
    assert not axes.collections


def test_figures_leave_failed_runs_out(tmp_path):
    runs = [make_run("gepo", 8, 0, last=0.5), make_run("gspo", 8, 0, last=0.7, failed="nan")]
    results = load(write_results(tmp_path, runs))

    (axes,) = drawn(picture_of(figures.against_delay, results, "last"))

    assert {float(value) for line in axes.lines[:-1] for value in line.get_ydata()} == {0.5}


def test_bars_are_the_interval_over_seeds(tmp_path):
    runs = [make_run("gepo", 8, seed, last=last) for seed, last in enumerate((0.5, 0.6))]
    results = load(write_results(tmp_path, runs))

    (axes,) = drawn(picture_of(figures.against_delay, results, "last"))

    (bar,) = axes.containers
    (segment,) = bar.lines[2][0].get_segments()
    # Two seeds, 0.1 apart: 12.7062 * 0.05 on each side of 0.55.
    assert segment[:, 1] == pytest.approx([0.55 - 0.63531, 0.55 + 0.63531], abs=1e-4)


def test_correlation_is_of_runs_that_have_both_numbers(tmp_path):
    # KL 1, 2, 3 against variance 1, 3, 2: r = 1 / 2.
    runs = [
        make_run("gepo", 8, seed, kl_mean=kl, iw_var_mean=var)
        for seed, (kl, var) in enumerate(((1, 1), (2, 3), (3, 2)))
    ]
    runs.append(make_run("gepo", 8, 9, kl_mean=None))
    results = load(write_results(tmp_path, runs))

    picture = picture_of(figures.correlations, results, "correlations")

    assert picture.panels[0] == "r = 0.50, of ranks 0.50, n = 3"


def test_saved_picture_is_the_embedded_one(tmp_path):
    results = load(write_results(tmp_path, [make_run("gepo", 8, 0)]))

    data = canvas.save(picture_of(figures.against_delay, results, "kl"), tmp_path)

    assert base64.b64decode(data) == (tmp_path / "kl.png").read_bytes()


def test_bands_of_accuracy_are_cut_off_nowhere_and_panels_are_of_one_height(tmp_path):
    runs = [make_run("gepo", 8, seed, last=last, task=task, run_id=f"{task}-{seed}")
            for task, ends in (("t5", (0.4, 0.45)), ("t21", (0.2, 0.21))) for seed, last in enumerate(ends)]  # fmt: skip
    results = load(write_results(tmp_path, runs))

    picture = curves.across_tasks(results, looks(results.arms), {"t21": "21 tokens", "t5": "5 tokens"})
    first, second = drawn(picture)

    assert list(picture.panels) == ["21 tokens", "5 tokens"]
    assert first.get_ylim() == second.get_ylim()
    # The interval of the second panel: 0.425 +- 12.7062 * 0.025.
    assert 0.743 < first.get_ylim()[1] < 0.8
    assert list(first.lines[0].get_ydata())[-1] == pytest.approx(0.205)
