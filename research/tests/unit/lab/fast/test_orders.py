"""Which runs are computed together, and which version's rollouts a step trains on."""

import pytest

from heterorl.common.errors import ConfigError
from heterorl_research.lab.cell import list_cells
from heterorl_research.lab.config import ExperimentConfig
from heterorl_research.lab.fast.lags import served, sources
from heterorl_research.lab.fast.orders import batch_key, split
from heterorl_research.lab.fast.scope import check_scope
from research.tests.support.fast_lab import VERSIONS, cell_of

EXPERIMENT = ExperimentConfig.model_validate(
    {
        "algorithms": [{"name": "gepo"}, {"name": "grpo", "loss": {"kind": "grpo"}}],
        "delays": [{"kind": "none"}, VERSIONS],
        "seeds": [0, 1, 2],
        "variants": [{}, {"name": "lr", "set": {"lr": 0.1}}, {"name": "G", "set": {"group_size": 4}}],
    }
)


def test_runs_that_differ_in_algorithm_delay_seed_and_step_size_are_computed_together():
    cells = list_cells(EXPERIMENT)
    batches = split(cells, range(len(cells)), jobs=1, most=100)

    assert [len(numbers) for numbers in batches] == [24, 12]
    assert sorted(number for numbers in batches for number in numbers) == list(range(36))
    assert all(len({batch_key(cells[number]) for number in numbers}) == 1 for numbers in batches)


def test_a_batch_is_small_enough_and_no_process_is_idle():
    cells = list_cells(EXPERIMENT)
    same = [number for number, cell in enumerate(cells) if cell.variant != "G"]

    assert [len(numbers) for numbers in split(cells, same, jobs=1, most=10)] == [8, 8, 8]
    assert [len(numbers) for numbers in split(cells, same, jobs=2, most=100)] == [12, 12]
    assert [len(numbers) for numbers in split(cells, same[:1], jobs=2, most=100)] == [1]
    assert split(cells, [], jobs=2, most=100) == []


def test_a_fixed_delay_starts_with_its_ramp():
    assert sources(cell_of(max_steps=6)) == [0, 0, 0, 0, 1, 2]
    assert sources(cell_of({"kind": "none"}, max_steps=3)) == [0, 1, 2]
    assert served([0, 0, 0, 0, 1, 2]) == {0: [0, 1, 2, 3], 1: [4], 2: [5]}


def test_refreshed_sites_keep_a_version_for_the_whole_interval():
    assert sources(cell_of({**VERSIONS, "semantics": "refresh_interval"}, max_steps=8)) == [0, 0, 0, 3, 3, 3, 6, 6]


def test_refresh_intervals_in_seconds_pass_while_steps_do():
    seconds = {"kind": "fixed", "value": 5, "semantics": "refresh_interval"}
    cell = cell_of(seconds, max_steps=9, seconds_per_step=2.0)
    check_scope(cell)

    # 2.5 steps are over at steps 3, 5 and 8; what was the newest then was published half a step before, or just then.
    assert sources(cell) == [0, 0, 0, 2, 2, 5, 5, 5, 7]


def test_drawn_refresh_intervals_are_those_of_the_services_sampler():
    drawn = {"kind": "lognormal", "low": 60, "high": 1920, "default": 60, "semantics": "refresh_interval"}
    lags = [step - version for step, version in enumerate(sources(cell_of(drawn, max_steps=2000)))]

    # Intervals end at any time, a sampler uses whole steps: 1920 s are 68.6 of them.
    assert max(lags) <= 69
    # A head that is looked at once a step is, in the mean over time, half of E[D^2] / E[D] old, here 279 s.
    assert sum(lags) / len(lags) == pytest.approx(279.0 / 28.0, rel=0.15)


REFUSED = {
    "seconds": ({"kind": "fixed", "value": 60}, {}),
    "sampler_speed": ({"kind": "fixed", "value": 60, "semantics": "refresh_interval"}, {"sampler_speed": 2.0}),
    "link_loss": ({"kind": "fixed", "value": 4, "unit": "versions"}, {"link_loss": 0.1}),
    "num_samplers": ({"kind": "uniform", "low": 0, "high": 4, "unit": "versions"}, {"num_samplers": 2}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_engine_does_not_compute_is_refused(name):
    delay, regime = REFUSED[name]
    with pytest.raises(ConfigError, match=name):
        check_scope(cell_of(delay, **regime))


def test_one_sampler_may_have_a_random_delay():
    cell = cell_of({"kind": "uniform", "low": 0, "high": 4, "unit": "versions"}, max_steps=40)
    check_scope(cell)

    lags = [step - version for step, version in enumerate(sources(cell))]
    assert max(lags) <= 4
    assert len(set(lags)) > 2
