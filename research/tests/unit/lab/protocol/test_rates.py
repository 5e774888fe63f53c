"""Learning rates are chosen on the tuning seeds alone, kept in a file, and refused for another experiment."""

import json
from pathlib import Path

import pytest

from heterorl.common.errors import ConfigError
from heterorl_research.lab.cell import list_cells
from heterorl_research.lab.config import ExperimentConfig
from heterorl_research.lab.protocol.rates import FILE, choose, statement, trials, with_chosen, write

RATES = (1e-4, 3e-4, 1e-3)


def experiment_of(**changes):
    return ExperimentConfig.model_validate(
        {
            "algorithms": ({"name": "gepo"}, {"name": "gspo", "loss": {"kind": "gspo"}}),
            "delays": ({"kind": "none"}, {"kind": "fixed", "unit": "versions", "value": 8}),
            "seeds": (0, 1),
            "protocol": {"least_seeds": 2, "learning_rates": RATES, "tuning_seeds": (7, 8)},
            **changes,
        }
    )


def rows_of(cells, last):
    return [{"run_id": cell.run_id, "failed": None, "last": last(cell)} for cell in cells]


def write_all(experiment, directory, last):
    cells = list_cells(trials(experiment))
    return write(choose(cells, rows_of(cells, last)), directory, engine="fast", device="cpu")


def best_at(cell):
    """GEPO is best at 3e-4 online, GSPO at 1e-3; every delay wants the smallest."""
    wanted = 1e-4 if cell.delay_value else 3e-4 if cell.algorithm.name == "gepo" else 1e-3
    return 0.5 + 0.1 * (cell.regime.lr == wanted) + 0.01 * cell.seed


def test_every_arm_is_tried_with_every_rate_on_the_tuning_seeds_alone():
    cells = list_cells(trials(experiment_of()))

    assert len(cells) == 2 * 2 * 3 * 2
    assert {cell.seed for cell in cells} == {7, 8}
    assert {cell.regime.lr for cell in cells} == set(RATES)


def test_the_best_rate_of_each_arm_is_chosen_and_reaches_its_runs(tmp_path):
    experiment = experiment_of()

    write_all(experiment, tmp_path, best_at)
    tuned = list_cells(with_chosen(experiment, tmp_path))

    assert {(cell.arm_id, cell.regime.lr) for cell in tuned} == {
        ("add3-gepo-none0v", 3e-4), ("add3-gspo-none0v", 1e-3),
        ("add3-gepo-fixed8v", 1e-4), ("add3-gspo-fixed8v", 1e-4),
    }  # fmt: skip
    table = json.loads((tmp_path / FILE).read_text())
    rows = {row["arm"]: row for row in table["arms"]}
    assert (table["engine"], table["device"]) == ("fast", "cpu")
    assert [row["is_at_edge"] for row in rows.values()] == [False, True, True, True]
    assert rows["add3-gepo-none0v"]["scores"][1] == {"lr": 3e-4, "last": pytest.approx(0.675), "seeds": 2}
    assert statement(experiment, tmp_path)["at_edge"] == [
        "add3-gepo-fixed8v", "add3-gspo-fixed8v", "add3-gspo-none0v",
    ]  # fmt: skip


def test_trials_look_at_other_prompts_and_may_be_shorter():
    plain = trials(experiment_of()).regime
    short = trials(experiment_of(protocol={"least_seeds": 2, "tuning_steps": 60})).regime

    assert (plain.evaluation_offset, plain.num_evaluation, plain.max_steps) == (256, 256, 300)
    assert short.max_steps == 60
    with pytest.raises(ConfigError, match=r"protocol\.tuning_steps"):
        trials(experiment_of(protocol={"least_seeds": 2, "tuning_steps": 70}))
    assert statement(experiment_of(), Path("/nowhere")) is None


def test_an_algorithm_takes_the_rate_of_another_at_the_same_delay(tmp_path):
    experiment = experiment_of(
        algorithms=({"name": "gepo"}, {"name": "part", "loss": {"kind": "gepo", "clip": "none"}}),
        protocol={
            "least_seeds": 2, "learning_rates": RATES, "tuning_seeds": (7, 8), "tune_as": {"part": "gepo"},
        },
    )  # fmt: skip

    assert {cell.algorithm.name for cell in list_cells(trials(experiment))} == {"gepo"}
    write_all(experiment, tmp_path, best_at)
    rates = {cell.arm_id: cell.regime.lr for cell in list_cells(with_chosen(experiment, tmp_path))}
    assert rates["add3-part-none0v"] == rates["add3-gepo-none0v"] == 3e-4
    assert rates["add3-part-fixed8v"] == rates["add3-gepo-fixed8v"] == 1e-4
    assert statement(experiment, tmp_path)["at_edge"] == ["add3-gepo-fixed8v", "add3-part-fixed8v"]


def test_variants_are_tuned_apart_and_those_that_set_the_rate_not_at_all(tmp_path):
    experiment = experiment_of(
        variants=({"name": ""}, {"name": "G=4", "set": {"group_size": 4}}, {"name": "lr=0.5", "set": {"lr": 0.5}})
    )

    write_all(experiment, tmp_path, lambda cell: -cell.regime.lr)
    rates = {(cell.variant, cell.regime.lr) for cell in list_cells(with_chosen(experiment, tmp_path))}

    assert rates == {("", 1e-4), ("G=4", 1e-4), ("lr=0.5", 0.5)}


def test_rates_of_other_trials_are_refused_and_those_of_more_arms_are_taken(tmp_path):
    experiment = experiment_of()
    write_all(experiment, tmp_path, best_at)

    fewer = with_chosen(experiment_of(delays=({"kind": "none"},), seeds=(3, 4)), tmp_path)

    assert set(fewer.protocol.chosen) == {"add3-gepo-none0v", "add3-gspo-none0v"}
    with pytest.raises(ConfigError, match="was tuned for another configuration"):
        with_chosen(experiment_of(regime={"max_steps": 40}), tmp_path)


def test_no_file_no_protocol_or_no_tuning_leaves_an_experiment_as_it_is(tmp_path):
    assert with_chosen(experiment_of(), tmp_path).protocol.chosen == {}
    (tmp_path / FILE).write_text("[]")
    with pytest.raises(ConfigError, match="is not a table of learning rates"):
        with_chosen(experiment_of(), tmp_path)
    assert with_chosen(ExperimentConfig(), tmp_path) == ExperimentConfig()
    with pytest.raises(ConfigError, match=r"protocol\.tune"):
        trials(ExperimentConfig())
