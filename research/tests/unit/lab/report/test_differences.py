"""Curves of differences join equal seeds at equal steps, and no others."""

import json

import pytest
from matplotlib.figure import Figure

from heterorl_research.lab.report.differences import as_json, difference_curves, pictures
from heterorl_research.lab.report.drawing.palette import looks
from heterorl_research.lab.report.reading import load
from research.tests.support.lab_results import make_run, write_results


def run_of(algorithm, delay, seed, accuracies, **changes):
    evaluations = [{"step": 20 * number, "accuracy": value} for number, value in enumerate(accuracies)]
    return make_run(algorithm, delay, seed, evaluations=evaluations, last=accuracies[-1], **changes)


RUNS = [
    run_of("gepo", 8, 0, [0.3, 0.4, 0.5]),
    run_of("gepo", 8, 1, [0.2, 0.2, 0.2]),
    run_of("gspo", 8, 0, [0.3, 0.5, 0.5]),
    run_of("gspo", 8, 1, [0.2, 0.4, 0.1]),
    run_of("gspo", 8, 2, [0.9, 0.9, 0.9]),
    run_of("gspo", 0, 0, [0.3, 0.6, 0.9]),
    run_of("grpo", 8, 0, [0.3, 0.9, 0.9], failed="nan"),
]


def by_reference(tmp_path, runs=RUNS):
    return {curve.reference: curve for curve in difference_curves(load(write_results(tmp_path, runs)))}


def test_differences_are_of_equal_seeds_and_steps(tmp_path):
    found = by_reference(tmp_path)

    against = found["gepo"]
    assert (against.arm.algorithm, against.delay.label, against.steps) == ("gspo", "8 versions", (0, 20, 40))
    assert [point.mean for point in against.points] == pytest.approx([0.0, 0.15, -0.05])
    # Two seeds, 0.1 apart: half = 12.7062 * 0.05.
    assert against.points[1].half == pytest.approx(0.63531, abs=1e-5)
    online = found["online"]
    assert [point.mean for point in online.points] == pytest.approx([0.0, -0.1, -0.4])
    assert [point.half for point in online.points] == [None] * 3
    assert set(found) == {"gepo", "online"}


def test_steps_that_one_side_lacks_are_left_out(tmp_path):
    runs = [run_of("gepo", 8, 0, [0.3, 0.4]), run_of("gspo", 8, 0, [0.3, 0.5, 0.5]), run_of("topr", 8, 1, [0.3, 0.4])]

    (curve,) = difference_curves(load(write_results(tmp_path, runs)))

    assert (curve.arm.algorithm, curve.steps) == ("gspo", (0, 20))


def test_variants_and_tasks_have_references_of_their_own(tmp_path):
    runs = [
        run_of("gepo", 8, 0, [0.3, 0.4], variant="lr=1"),
        run_of("gspo", 8, 0, [0.3, 0.5], variant="lr=1"),
        run_of("gspo", 8, 0, [0.3, 0.8]),
        run_of("gspo", 8, 0, [0.3, 0.8], task="other", run_id="other"),
    ]

    (curve,) = difference_curves(load(write_results(tmp_path, runs)))

    assert curve.arm.label == "gspo [lr=1]"
    assert curve.points[-1].mean == pytest.approx(0.1)


def test_data_are_columns_of_equal_length(tmp_path):
    rows = as_json(difference_curves(load(write_results(tmp_path, RUNS))))

    assert [(row["algorithm"], row["minus"], row["delay"]) for row in rows] == [
        ("gspo", "gepo", "8 versions"), ("gspo", "online", "8 versions"),
    ]  # fmt: skip
    assert all(len(row[name]) == 3 for row in rows for name in ("step", "difference", "low", "high", "seeds"))
    assert rows[0]["seeds"] == [2, 2, 2]
    assert rows[1]["low"] == [None] * 3
    json.dumps(rows, allow_nan=False)


def test_picture_has_the_line_its_band_and_zero(tmp_path):
    results = load(write_results(tmp_path, RUNS))
    gepo, online = pictures(results, looks(results.arms))

    axes = Figure().subplots()
    gepo.draw([axes])

    assert (gepo.name, online.name, list(gepo.panels)) == ("difference_gepo", "difference_online", ["8 versions"])
    assert [list(line.get_ydata()) for line in axes.lines] == [[0.0, 0.0], pytest.approx([0.0, 0.15, -0.05])]
    assert len(axes.collections) == 1


def test_panels_have_one_range(tmp_path):
    runs = [run_of("gepo", delay, 0, [0.3, 0.3]) for delay in (0, 8)]
    runs += [run_of("gspo", 0, 0, [0.3, 0.4]), run_of("gspo", 8, 0, [0.3, 0.9])]
    results = load(write_results(tmp_path, runs))
    gepo, _ = pictures(results, looks(results.arms))

    first, second = Figure().subplots(1, 2)
    gepo.draw([first, second])

    assert first.get_ylim() == second.get_ylim()
    assert first.get_ylim()[1] > 0.6
