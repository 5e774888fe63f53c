"""An experiment that breaks its protocol is refused by the key that breaks it."""

import pytest
from pydantic import ValidationError

from heterorl.common.errors import ConfigError
from heterorl_research.lab.cell import list_cells
from heterorl_research.lab.config import ExperimentConfig, ProtocolConfig
from heterorl_research.lab.pace import reach_versions
from heterorl_research.lab.protocol.rules import check

GOOD = {
    "max_steps": 192, "evaluate_every": 24, "num_evaluation": 1024, "last_evaluations": 3,
    "evaluation_noise": "by_version",
}  # fmt: skip
FAR = {"kind": "fixed", "unit": "versions", "value": 64}


def experiment_of(*, seeds=range(16), delay=FAR, task=None, protocol=None, **regime):
    return ExperimentConfig(
        delays=(delay,),
        tasks=({"task": task or {"name": "arithmetic", "digits": 3}},),
        seeds=tuple(seeds),
        regime={**GOOD, **regime},
        protocol={"tune": False, **(protocol or {})},
    )


def checked(**changes):
    experiment = experiment_of(**changes)
    check(experiment, list_cells(experiment))


def test_an_experiment_that_keeps_everything_is_taken():
    checked()


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"max_steps": 168}, r"regime\.max_steps: .* needs 192 steps"),
        ({"num_evaluation": 1000}, r"regime\.num_evaluation: fewer than protocol\.least_prompts, 1024"),
        ({"task": {"name": "progression", "digits": 2}}, r"regime\.num_evaluation"),
        ({"last_evaluations": 2}, r"regime\.last_evaluations"),
        ({"evaluate_every": 20}, r"regime\.evaluate_every: does not divide"),
        ({"evaluation_noise": "same"}, r"regime\.evaluation_noise: must be by_version"),
        (
            {
                "protocol": {"tune": True, "least_prompts": 500},
                "num_evaluation": 500,
                "task": {"name": "progression", "digits": 2},
            },
            r"regime\.num_evaluation: leaves fewer than 64 prompts to tune on",
        ),
        ({"protocol": {"tune_as": {"gepo": "gspo"}}}, r"protocol\.tune_as: gepo or gspo is no algorithm"),
        ({"protocol": {"tune": True}}, r"protocol\.tune: no learning rate is chosen for add3-gepo-fixed64v"),
    ],
)
def test_what_breaks_the_protocol_is_named(changes, problem):
    with pytest.raises(ConfigError, match=problem):
        checked(**changes)


def test_what_is_loosened_in_the_file_is_taken():
    checked(max_steps=168, protocol={"steps_per_lag": 2.5})
    checked(num_evaluation=500, protocol={"least_prompts": 500})
    checked(seeds=(0, 1), protocol={"least_seeds": 2})
    check(ExperimentConfig(), list_cells(ExperimentConfig()))


def test_seeds_are_enough_and_none_is_tuned_on():
    with pytest.raises(ValidationError, match="15 seeds are fewer than"):
        experiment_of(seeds=range(15))
    with pytest.raises(ValidationError, match="15 seeds are fewer than"):
        experiment_of(seeds=[*range(15), 0])
    with pytest.raises(ValidationError, match="seed 101 is both tuned on and reported"):
        experiment_of(seeds=(*range(16), 101))


@pytest.mark.parametrize("rates", [(1e-3, 1e-3), (0.0, 1e-3), (1e-3,)])
def test_a_grid_has_different_positive_rates(rates):
    with pytest.raises(ValidationError):
        ProtocolConfig(learning_rates=rates)


@pytest.mark.parametrize(
    ("delay", "versions"),
    [
        ({"kind": "none"}, 0),
        (FAR, 64),
        # There and back: 2 x 1800 / 28, and one way where weights are refreshed.
        ({"kind": "lognormal", "low": 60, "high": 1800}, 129),
        ({"kind": "lognormal", "low": 60, "high": 1800, "semantics": "refresh_interval"}, 65),
    ],
)
def test_delays_are_counted_in_versions(delay, versions):
    (cell, *_) = list_cells(ExperimentConfig(delays=(delay,)))

    assert reach_versions(cell) == versions


SUGGESTED = {"first": range(200, 216), "other": (305, 400)}


def test_reserved_seeds_are_for_confirmations_alone():
    with pytest.raises(ConfigError, match="300 is kept for confirmations"):
        checked(seeds=[*range(200, 215), 300])
    quick = ExperimentConfig(seeds=(331,))
    with pytest.raises(ConfigError, match="331 is kept for confirmations"):
        check(quick, list_cells(quick))
    free = ExperimentConfig(seeds=(332,))
    check(free, list_cells(free))


@pytest.mark.parametrize(
    ("seeds", "confirms", "problem"),
    [
        (range(300, 316), ["first"], None),
        (range(299, 316), ["first"], "a confirmation runs on seeds 300 to 331, not 299"),
        (range(300, 316), ["first", "other"], "other suggested this on seed 305 already"),
        (range(300, 316), ["third"], "third is no experiment that is known here"),
    ],
)
def test_a_confirmation_sees_no_seed_that_suggested_it(seeds, confirms, problem):
    experiment = experiment_of(seeds=seeds, protocol={"confirms": confirms})
    cells = list_cells(experiment)

    if problem is None:
        check(experiment, cells, suggested_on=SUGGESTED)
        return
    with pytest.raises(ConfigError, match=problem):
        check(experiment, cells, suggested_on=SUGGESTED)


def test_a_rate_is_not_lent_on():
    with pytest.raises(ValidationError, match="tune_as gives b the rate of another"):
        ProtocolConfig(tune_as={"a": "b", "b": "c"})
