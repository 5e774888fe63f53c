"""The phase diagram says where an algorithm learns for sure, and is silent where seeds disagree."""

import pytest
from matplotlib.figure import Figure

from heterorl_research.lab.report.plane import pictures, planes
from heterorl_research.lab.report.reading import load
from research.tests.support.lab_results import make_run, write_results

# Warm start 0.3: what a cell of rate and delay ends at, for two seeds.
ENDS = {(0.001, 0): (0.5, 0.508), (0.001, 8): (0.4, 0.408), (0.002, 0): (0.25, 0.41), (0.002, 8): (0.1, 0.108)}


def runs_of(algorithm="gepo"):
    return [
        make_run(algorithm, delay, seed, last=last, variant=f"lr={rate}")
        for (rate, delay), ends in ENDS.items()
        for seed, last in enumerate(ends)
    ]


def cells_of(tmp_path, runs):
    return planes(load(write_results(tmp_path, runs)), "addition")


def test_cells_learn_or_fall_where_the_whole_interval_says_so(tmp_path):
    cells = {(cell.lr, cell.delay.value): cell for cell in cells_of(tmp_path, runs_of())["gepo"]}

    assert {at for at, cell in cells.items() if cell.learns} == {(0.001, 0), (0.001, 8)}
    assert {at for at, cell in cells.items() if cell.falls} == {(0.002, 8)}
    assert cells[0.002, 0].gain.mean == pytest.approx(0.03)


def test_one_seed_and_no_seed_say_nothing(tmp_path):
    runs = [run for run in runs_of() if run["seed"] == 0 and run["variant"] != "lr=0.002"]
    runs.append(make_run("gepo", 8, 0, last=0.9, variant="lr=0.002"))

    cells = cells_of(tmp_path, runs)["gepo"]

    assert not any(cell.learns or cell.falls for cell in cells)
    assert [cell.gain is None for cell in cells] == [False, True, False, False]


def test_other_sweeps_single_rates_and_single_delays_have_no_plane(tmp_path):
    other = [make_run("gepo", delay, 0, variant=f"lr=0.{rate},G=4") for rate in (1, 2) for delay in (0, 8)]
    words = [make_run("gepo", delay, 0, variant=f"lr={rate}") for rate in ("a", "b") for delay in (0, 8)]
    one_rate = [run for run in runs_of() if run["variant"] == "lr=0.001"]
    one_delay = [run for run in runs_of() if run["delay"] == 8]

    for number, runs in enumerate((other, words, one_rate, one_delay)):
        assert cells_of(tmp_path / str(number), runs) == {}


def test_picture_has_a_panel_per_algorithm_with_signs_and_numbers_that_are_read_on_dark_too(tmp_path):
    runs = [make_run("gspo", run["delay"], run["seed"], last=0.75, variant=run["variant"]) for run in runs_of()]
    (picture,) = pictures(load(write_results(tmp_path, [*runs_of(), *runs])))
    grid = Figure().subplots(1, 2)

    picture.draw(list(grid))

    assert list(picture.panels) == ["gepo", "gspo"]
    assert [text.get_text() for text in grid[0].texts] == ["+\n+0.20", "\n+0.03", "+\n+0.10", "\u2212\n-0.20"]
    assert [sign.mark for sign in picture.signs] == ["plus", "minus"]
    assert {text.get_color() for text in grid[0].texts} == {"black"}
    assert {text.get_color() for text in grid[1].texts} == {"white"}
