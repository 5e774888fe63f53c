"""Runs that another experiment has already."""

import json

import pytest

from heterorl.common.errors import ConfigError
from heterorl_research.lab import run as lab_run
from heterorl_research.lab.cell import list_cells
from heterorl_research.lab.config import AlgorithmConfig, ExperimentConfig, RegimeConfig
from heterorl_research.lab.fast.orders import Means
from heterorl_research.lab.results import failure, identity

SMALL = ExperimentConfig(algorithms=(AlgorithmConfig(name="gepo"), AlgorithmConfig(name="other")), seeds=(0, 1))


def _store(directory, cell, **changes):
    (directory / "runs").mkdir(parents=True, exist_ok=True)
    row = {**failure(cell, problem="", wall_s=1.0), **identity(cell), **changes}
    (directory / "runs" / f"{cell.run_id}.json").write_text(json.dumps(row))


@pytest.fixture
def asked(monkeypatch):
    """Numbers of the cells that would be run."""
    numbers = []

    async def note(cells, missing, **_):
        numbers.extend(missing)
        return True

    monkeypatch.setattr(lab_run, "_run_all", note)
    monkeypatch.setattr("heterorl_research.lab.report.report.write_report", lambda directory: directory / "report.html")
    return numbers


def _run(tmp_path, experiment, reuse=("old", "missing")):
    path = tmp_path / "small.toml"
    path.write_text(
        'algorithms = [{ name = "gepo" }, { name = "other" }]\nseeds = [0, 1]\n'
        f"[regime]\nmax_steps = {experiment.regime.max_steps}\n"
    )
    return lab_run.run_experiment(
        str(path), out=tmp_path / "new", means=Means(jobs=1, reuse=[tmp_path / name for name in reuse])
    )


def test_same_runs_are_taken_over_and_the_others_run(tmp_path, asked):
    cells = list_cells(SMALL)
    _store(tmp_path / "old", cells[0], last=0.25)
    _store(tmp_path / "old", cells[1], failed="RuntimeError: broken")
    _store(tmp_path / "old", cells[2], cell_digest="0" * 64)

    _run(tmp_path, SMALL)

    assert asked == [1, 2, 3]
    rows = json.loads((tmp_path / "new" / "results.json").read_text())["runs"]
    assert [(row["run_id"], row["last"]) for row in rows] == [(cells[0].run_id, 0.25)]


def test_runs_of_another_regime_are_not_taken_over(tmp_path, asked):
    _store(tmp_path / "old", list_cells(SMALL)[0], last=0.25)

    _run(tmp_path, SMALL.model_copy(update={"regime": RegimeConfig(max_steps=7)}))

    assert asked == [0, 1, 2, 3]


def test_own_results_are_kept(tmp_path, asked):
    cell = list_cells(SMALL)[0]
    _store(tmp_path / "old", cell, last=0.25)
    _store(tmp_path / "new", cell, last=0.5)

    _run(tmp_path, SMALL)

    rows = json.loads((tmp_path / "new" / "results.json").read_text())["runs"]
    assert [row["last"] for row in rows] == [0.5]


def test_runs_are_taken_over_from_a_results_file(tmp_path, asked):
    cells = list_cells(SMALL)
    evaluations = [{"step": 0, "accuracy": 0.25, "benchmarks": {}}, {"step": 20, "accuracy": None, "benchmarks": {}}]
    series = {"reward": [number / 7 for number in range(53)]}
    _store(tmp_path / "old", cells[0], last=1 / 3, evaluations=evaluations, series=series, failed=None)
    _store(tmp_path / "old", cells[1], failed="RuntimeError: broken")
    _store(tmp_path / "old", cells[3], engine="fast")
    _run(tmp_path, SMALL)
    first = (tmp_path / "new" / "results.json").read_text()
    (tmp_path / "new").rename(tmp_path / "committed")
    asked.clear()

    _run(tmp_path, SMALL, reuse=["committed/results.json"])

    assert asked == [1, 2, 3]
    assert (tmp_path / "new" / "results.json").read_text() == first


def test_a_file_without_runs_is_refused(tmp_path, asked):
    (tmp_path / "other.json").write_text('{"cases": []}')

    with pytest.raises(ConfigError, match=r"--reuse: .*other\.json is not an experiment's results\.json"):
        _run(tmp_path, SMALL, reuse=["other.json"])


def test_runs_of_one_seed_that_begin_from_other_weights_are_no_pairs(tmp_path, asked, capsys):
    cells = list_cells(SMALL)
    for cell in cells:
        _store(tmp_path / "old", cell, failed=None, warm_start_accuracy=0.25)
    _store(tmp_path / "new", cells[0], failed=None, warm_start_accuracy=0.5)

    assert _run(tmp_path, SMALL) == 1

    said = " ".join(capsys.readouterr().err.split())
    assert "seed 0: runs begin from 2 warm starts, of accuracies 0.2500, 0.5000" in said
    assert "seed 1" not in said
