"""`tune` runs the trials, writes the rates and survives runs that fail; `run` takes the rates and refuses to go without."""

import json

import pytest

from heterorl.common.errors import ConfigError
from heterorl_research.lab import run as lab_run
from heterorl_research.lab import tune as lab_tune
from heterorl_research.lab.cell import list_cells
from heterorl_research.lab.fast.orders import Means
from heterorl_research.lab.protocol.rates import FILE
from heterorl_research.lab.results import failure, identity

EXPERIMENT = """
name = "small"
seeds = [0, 1]
algorithms = [{ name = "gepo" }]
[regime]
max_steps = 30
evaluate_every = 10
last_evaluations = 3
num_evaluation = 1024
evaluation_noise = "by_version"
[protocol]
least_seeds = 2
tuning_seeds = [5]
learning_rates = [1e-4, 1e-3, 1e-2]
"""


@pytest.fixture
def small(tmp_path):
    path = tmp_path / "small.toml"
    path.write_text(EXPERIMENT)
    return str(path)


@pytest.fixture
def failing():
    """Learning rates whose runs fail."""
    return set()


@pytest.fixture
def ran(monkeypatch, failing):
    """Cells that would be run; each gets a row, best at 1e-3; 1e-2 diverges."""
    cells_run = []

    async def finish(cells, missing, *, orders, directory, jobs):
        for number in missing:
            cell = cells[number]
            cells_run.append(cell)
            row = {**failure(cell, problem="", wall_s=1.0), **identity(cell), "last": cell.regime.lr}
            if cell.regime.lr == 1e-2:
                row |= {"diverged_at": 3, "last": 0.0}
            if cell.regime.lr in failing:
                row |= {"failed": "out of memory", "last": None}
            (directory / "runs" / f"{cell.run_id}.json").write_text(json.dumps(row))
        return True

    monkeypatch.setattr(lab_run, "_run_all", finish)
    monkeypatch.setattr("heterorl_research.lab.report.report.write_report", lambda directory: directory / "report.html")
    return cells_run


def arguments(tmp_path):
    return {"out": tmp_path / "out", "means": Means(jobs=1)}


def test_rates_are_chosen_and_used(tmp_path, small, ran):
    assert lab_tune.tune_experiment(small, **arguments(tmp_path)) == 0
    assert {(cell.seed, cell.regime.lr) for cell in ran} == {(5, 1e-4), (5, 1e-3), (5, 1e-2)}
    assert json.loads((tmp_path / "out" / FILE).read_text())["arms"][0]["lr"] == 1e-3
    assert not (tmp_path / "out" / "tuning" / "report.html").exists()

    ran.clear()
    assert lab_run.run_experiment(small, **arguments(tmp_path)) == 0
    assert [(cell.seed, cell.regime.lr) for cell in ran] == [(0, 1e-3), (1, 1e-3)]
    # What its processes read says it too.
    text = (tmp_path / "out" / "experiment.json").read_text()
    found = list_cells(lab_run.ExperimentConfig.model_validate_json(text))
    assert [cell.regime.lr for cell in found] == [1e-3, 1e-3]
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [row["lr"] for row in results["runs"]] == [1e-3, 1e-3]
    assert results["tuning"] == {"engine": "services", "device": "cpu", "at_edge": []}
    assert results["protocol"]["tuning_seeds"] == [5]


def test_a_failed_trial_is_shown_and_tried_again_and_blames_no_rate(tmp_path, small, ran, failing, capsys):
    failing.add(1e-3)
    assert lab_tune.tune_experiment(small, **arguments(tmp_path)) == 1
    assert json.loads((tmp_path / "out" / FILE).read_text())["arms"] == []
    assert "no learning rate for add3-gepo-none0v: failed add3-gepo-none0v-lr=0.001-s5" in capsys.readouterr().err

    failing.clear()
    ran.clear()
    assert lab_tune.tune_experiment(small, **arguments(tmp_path)) == 0
    assert [cell.regime.lr for cell in ran] == [1e-3]
    assert json.loads((tmp_path / "out" / FILE).read_text())["arms"][0]["lr"] == 1e-3


def test_a_run_without_rates_is_refused(tmp_path, small, ran):
    with pytest.raises(ConfigError, match="no learning rate is chosen for add3-gepo-none0v"):
        lab_run.run_experiment(small, **arguments(tmp_path))

    assert ran == []
    assert not (tmp_path / "out").exists()


def test_an_interrupted_search_chooses_nothing(tmp_path, small, ran, monkeypatch):
    monkeypatch.setattr(lab_tune, "carry_out", lambda *_, **__: lab_run.INTERRUPTED)

    assert lab_tune.tune_experiment(small, **arguments(tmp_path)) == lab_run.INTERRUPTED
    assert not (tmp_path / "out" / FILE).exists()
