"""Comparisons join equal seeds and say no more than the numbers show."""

import pytest

from heterorl_research.lab.report.paired import DIFFERS, DIFFERS_ALONE, NOT_SHOWN, TOO_FEW, comparisons
from heterorl_research.lab.report.reading import load
from research.tests.support.lab_results import make_run, write_results

# Seeds differ far more than algorithms: only pairs can tell.
BASE = [0.30, 0.45, 0.60, 0.75, 0.90]


def compare(tmp_path, runs, measure="last"):
    found = comparisons(load(write_results(tmp_path, runs)))
    return [comparison for comparison in found if comparison.measure == measure]


def arms(name, shifts, delay=8):
    return [
        make_run(name, delay, seed, last=base + shift)
        for seed, (base, shift) in enumerate(zip(BASE, shifts, strict=True))
    ]


def test_difference_is_paired_by_seed_and_judged(tmp_path):
    runs = [*arms("gepo", [0] * 5), *arms("grpo", [-0.1, -0.11, -0.09, -0.1, -0.1]), *arms("tis", [0.1, -0.1, 0, 0, 0])]

    tis, grpo = compare(tmp_path, runs)

    assert (grpo.arm.algorithm, grpo.difference.num, grpo.verdict) == ("grpo", 5, DIFFERS)
    assert grpo.difference.mean == pytest.approx(-0.1)
    # s = sqrt(0.0002 / 4), s / sqrt(5) = sqrt(1e-5), times 2.776445.
    assert grpo.difference.half == pytest.approx(2.77644510520 * 1e-5**0.5)
    assert (tis.verdict, tis.t_p) == (NOT_SHOWN, 1.0)
    assert grpo.adjusted_p == pytest.approx(2 * grpo.t_p)


def test_difference_that_many_comparisons_explain_is_said_to_be_alone(tmp_path):
    # t = 3 sqrt(5) / sqrt(2.5) = 4.24 with 4 degrees of freedom: p = 0.0132; times 4 is above 0.05.
    runs = [*arms("gepo", [0] * 5), *arms("grpo", [-0.01, -0.02, -0.03, -0.04, -0.05])]
    runs += [run for name in ("a", "b", "c") for run in arms(name, [0.01, -0.01, 0.0, 0.01, -0.01])]

    worst = compare(tmp_path, runs)[-1]

    assert worst.t_p == pytest.approx(0.0132, abs=5e-5)
    assert worst.verdict == DIFFERS_ALONE


def test_failed_and_unmatched_seeds_are_left_out_and_one_pair_is_no_test(tmp_path):
    runs = arms("gepo", [0] * 5)
    runs[0]["failed"] = "nan"
    other = arms("grpo", [0.1] * 5)[:2]

    (only,) = compare(tmp_path, [*runs, *other])

    assert (only.difference.num, only.difference.half, only.verdict) == (1, None, TOO_FEW)


def test_other_tasks_delays_and_variants_are_never_joined(tmp_path):
    gepo = make_run("gepo", 8, 0)
    others = [
        make_run("grpo", 64, 0),
        make_run("grpo", 8, 0, task="other", run_id="x"),
        make_run("grpo", 8, 0, variant="lr=1"),
        make_run("grpo", 8, 1),
        make_run("grpo", 8, 0, delay_unit="seconds", run_id="y"),
        make_run("grpo", 8, 0, delay_kind="weibull", run_id="z"),
    ]

    assert compare(tmp_path, [gepo, *others]) == []


def test_last_three_is_the_mean_of_the_last_three_evaluations(tmp_path):
    runs = [make_run("gepo", 8, seed, last=0.5) for seed in (0, 1)] + [
        make_run("grpo", 8, seed, last=0.8) for seed in (0, 1)
    ]

    (found,) = compare(tmp_path, runs, "last_three")

    # (0.35 + 0.6 + 0.8) / 3 - (0.35 + 0.6 + 0.5) / 3
    assert found.difference.mean == pytest.approx(0.1)
