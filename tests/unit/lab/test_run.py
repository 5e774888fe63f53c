"""What a run of an experiment takes for its own: rows of its engine, and refusals before anything is computed."""

import json

import pytest

from heterorl.common.errors import ConfigError
from heterorl.lab import run as lab_run
from heterorl.lab.results import failure

EXPERIMENT = """
name = "small"
seeds = [0, 1]

[[algorithms]]
name = "gepo"
loss = { kind = "gepo" }

[regime]
max_steps = 4
num_samplers = 1
"""


@pytest.fixture
def small(tmp_path):
    path = tmp_path / "small.toml"
    path.write_text(EXPERIMENT)
    return str(path)


@pytest.fixture(autouse=True)
def report(monkeypatch):
    monkeypatch.setattr("heterorl.lab.report.report.write_report", lambda directory: directory / "report.html")


def computed(engine):
    """What stands for the workers: a row of the engine for each run."""

    async def finish(cells, missing, *, orders, directory, jobs):
        for number in missing:
            cell = cells[number]
            row = failure(cell, problem="", wall_s=1.0) | ({"engine": engine} if engine == "fast" else {})
            (directory / "runs" / f"{cell.run_id}.json").write_text(json.dumps({**row, "failed": None}))
        return True

    return finish


def run(small, tmp_path, engine):
    return lab_run.run_experiment(small, out=tmp_path / "out", overrides=(), jobs=1, engine=engine)


def results(tmp_path):
    return json.loads((tmp_path / "out" / "results.json").read_text())["runs"]


def test_results_hold_rows_of_one_engine_alone(small, tmp_path, monkeypatch):
    monkeypatch.setattr(lab_run, "_run_all", computed("services"))
    assert run(small, tmp_path, "services") == 0
    assert len(results(tmp_path)) == 2

    async def interrupted(cells, missing, *, orders, directory, jobs):
        await computed("fast")(cells, missing[:1], orders=orders, directory=directory, jobs=jobs)
        return False

    monkeypatch.setattr(lab_run, "_run_all", interrupted)
    assert run(small, tmp_path, "fast") == lab_run.INTERRUPTED
    assert [row["engine"] for row in results(tmp_path)] == ["fast"]


def test_a_run_that_the_fast_engine_does_not_compute_is_refused_before_any_begins(tmp_path, monkeypatch):
    path = tmp_path / "small.toml"
    path.write_text(f"{EXPERIMENT}\nlink_loss = 0.1\n")
    monkeypatch.setattr(lab_run, "_run_all", None)
    with pytest.raises(ConfigError, match="link_loss"):
        run(str(path), tmp_path, "fast")
    assert not (tmp_path / "out" / "runs").exists()
