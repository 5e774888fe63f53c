"""A forest has a row for each setting and a dot for each other rule, from seeds that both rules have."""

import pytest
from matplotlib.figure import Figure

from heterorl_research.lab.report.forest import forest
from heterorl_research.lab.report.reading import load
from research.tests.support.lab_results import make_run, write_results


def test_rows_stand_from_the_top_and_dots_are_paired_differences(tmp_path):
    runs = [
        make_run(name, delay, seed, last=base + gain, run_id=f"{name}-{delay}-{seed}")
        for delay, gains in ((0, {"gepo": 0.0, "topr": 0.02}), (64, {"gepo": 0.0, "topr": -0.03}))
        for seed, base in enumerate((0.3, 0.5, 0.6))
        for name, gain in gains.items()
        # A seed that one rule alone has is in no difference.
        if not (name == "gepo" and seed == 2)
    ]
    results = load(write_results(tmp_path, runs))
    settings = {
        "no delay": [run for run in results.runs if run.delay == 0],
        "64 versions": [run for run in results.runs if run.delay == 64],
    }

    picture = forest(settings, "gepo")
    axes = Figure().subplots()
    picture.draw([axes])

    (bars,) = axes.containers
    assert list(bars.lines[0].get_xdata()) == pytest.approx([0.02, -0.03])
    assert [text.get_text() for text in axes.get_yticklabels()] == ["no delay", "64 versions"]
    assert axes.yaxis_inverted()
    assert [arm.algorithm for arm in picture.legend] == ["topr"]
