"""A sweep's dotted line is the regime, and not the mean of what other sweeps changed; differences are of equal seeds."""

import pytest
from matplotlib.figure import Figure

from heterorl_research.lab.report.reading import load
from heterorl_research.lab.report.sweeps import Paired, differences, paired, sweeps
from research.tests.support.lab_results import make_run, write_results

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


def drawn(picture):
    grid = Figure().subplots(1, len(picture.panels), squeeze=False).ravel()
    picture.draw(list(grid))
    return grid


def means(axes):
    """What each algorithm's line says, by the order of the legend."""
    return [list(container.lines[0].get_ydata()) for container in axes.containers]


def test_settings_are_beside_the_regime_of_their_own_algorithm_on_equal_seeds(tmp_path):
    # Seed 1 is 0.1 better throughout; seed 2 was run at the regime alone.
    runs = [
        make_run(name, 64, seed, last=last - loss + seed / 10, variant=variant)
        for name, loss in (("gepo", 0.0), ("gspo", 0.05))
        for variant, last in LASTS.items()
        for seed in (0, 1)
    ]
    runs.append(make_run("gepo", 64, 2, last=0.1, variant=""))
    results = load(write_results(tmp_path, runs))

    size, kl = drawn(paired(results, Paired(regime={"G": "8"})))

    assert [text.get_text() for text in size.get_xticklabels()] == ["4", "8", "32"]
    assert [size.get_xlabel(), kl.get_xlabel()] == ["group size", "KL coefficient"]
    assert means(size) == [pytest.approx([0.1, 0.0, -0.4])] * 2
    assert [text.get_text() for text in kl.get_xticklabels()] == ["0.02", "regime"]
    assert size.get_ylim() == kl.get_ylim()


def test_rules_are_beside_the_baseline_at_the_same_value_and_far_ones_are_arrows(tmp_path):
    lasts = {"gepo": (0.5, 0.6), "gepo-1s": (0.7, 0.7), "reinforce": (0.1, 0.6)}
    runs = [
        make_run(name, 64, seed, last=last + seed / 10, variant=f"lr={rate}")
        for name, ends in lasts.items()
        for rate, last in zip(("0.0003", "0.0015"), ends, strict=True)
        for seed in (0, 1)
    ]
    picture = paired(load(write_results(tmp_path, runs)), Paired(baseline="gepo-1s", floor=-0.3))

    (axes,) = drawn(picture)

    assert [arm.algorithm for arm in picture.legend] == ["gepo", "reinforce"]
    assert [text.get_text() for text in axes.get_xticklabels()] == ["3e-4", "1.5e-3"]
    assert means(axes) == [pytest.approx([-0.2, -0.1]), pytest.approx([-0.6, -0.1])]
    assert [text.get_text() for text in axes.texts] == ["-0.60"]
    assert axes.get_ylim()[0] == -0.3


@pytest.mark.parametrize(
    ("algorithms", "variants", "titles"),
    [
        (("gepo", "gspo"), ("", "G=4"), ["Sweeps, minus the regime on equal seeds; addition; 64 versions"]),
        (("gepo", "gspo"), ("G=8", "G=4"), ["Sweeps, minus gepo on equal seeds; addition; 64 versions"]),
        (("gspo", "topr"), ("G=8", "G=4"), []),
        (("gepo", "gspo"), ("",), []),
    ],
)
def test_report_has_differences_where_there_is_something_to_subtract(tmp_path, algorithms, variants, titles):
    runs = [make_run(name, 64, 0, variant=variant) for name in algorithms for variant in variants]

    assert [picture.title for picture in differences(load(write_results(tmp_path, runs)))] == titles
