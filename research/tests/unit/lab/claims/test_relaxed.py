"""A comparison names each rule of the house that its runs keep in a weaker form, and no other."""

import pytest

from heterorl_research.lab.claims.relaxed import HOUSE, relaxed
from heterorl_research.lab.report.data import Run
from research.tests.support.lab_results import make_run


def runs(*, seeds=16, delay=64, steps=400, lr=(7e-4,), algorithms=("gepo", "gspo")):
    return [
        Run.model_validate(make_run(name, delay, seed, steps=steps, lr=rate, variant=f"lr={rate:g}"))
        for name in algorithms for seed in range(seeds) for rate in lr
    ]  # fmt: skip


def protocol(**changes):
    return {**HOUSE.model_dump(), **changes}


@pytest.mark.parametrize(
    ("changes", "made", "expected"),
    [
        ({}, {}, []),
        ({"least_seeds": 8}, {"seeds": 8}, ["8 seeds"]),
        # What counts is how many there are, not how many the file asks for.
        ({"least_seeds": 8}, {"seeds": 16}, []),
        ({"steps_per_lag": 2.0}, {"delay": 256, "steps": 512}, ["2 x delay"]),
        ({"steps_per_lag": 2.0}, {"delay": 64, "steps": 512}, []),
        ({"steps_per_lag": 2.0}, {"delay": 0, "steps": 512}, []),
        ({"least_prompts": 400}, {}, ["400 prompts"]),
        ({"least_evaluations": 1}, {}, ["1 evaluation"]),
        ({"tune": False}, {}, ["one rate"]),
        ({"tune": False}, {"lr": (3e-4, 7e-4)}, []),
        ({"tune_as": {"gepo-lower": "gepo"}}, {"algorithms": ("gepo-lower", "gepo")}, ["rate of gepo"]),
        ({"tune_as": {"gepo-lower": "gepo"}}, {}, []),
        (
            {"tune": False, "steps_per_lag": 2.0, "least_seeds": 8, "least_prompts": 400},
            {"seeds": 8, "delay": 256, "steps": 512},
            ["8 seeds", "2 x delay", "400 prompts", "one rate"],
        ),
    ],
)
def test_what_is_relaxed(changes, made, expected):
    assert relaxed(protocol(**changes), runs(**made)) == expected


def test_a_key_that_results_lack_is_at_its_default():
    assert relaxed({}, runs()) == []
    assert relaxed({"tune": False}, runs()) == ["one rate"]


def test_delays_in_seconds_have_no_steps_to_fall_short_of():
    seconds = [run.model_copy(update={"delay_unit": "seconds", "delay": 1920.0}) for run in runs()]

    assert relaxed(protocol(steps_per_lag=2.0), seconds) == []
