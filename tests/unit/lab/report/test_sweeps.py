"""A sweep's dotted line is the regime, and not the mean of what other sweeps changed."""

import pytest
from matplotlib.figure import Figure

from heterorl.lab.report.reading import load
from heterorl.lab.report.sweeps import sweeps
from tests.support.lab_results import make_run, write_results

LASTS = {"": 0.7, "G=4": 0.8, "G=32": 0.3, "kl=0.02": 0.6}


@pytest.mark.parametrize(("absent", "default"), [(None, 0.7), ("", 0.6)])
def test_dotted_line(tmp_path, absent, default):
    runs = [
        make_run("gepo", 64, seed, last=last, variant=variant)
        for variant, last in LASTS.items()
        if variant != absent
        for seed in (0, 1)
    ]
    (picture,) = sweeps(load(write_results(tmp_path, runs)))
    grid = Figure().subplots(2, 1)

    picture.draw(list(grid))

    assert list(picture.panels) == ["G; 64 versions", "kl; 64 versions"]
    (dotted,) = [line for line in grid[0].lines if line.get_linestyle() == ":"]
    assert dotted.get_ydata()[0] == pytest.approx(default)
