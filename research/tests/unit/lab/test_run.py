"""What a run of an experiment takes for its own: rows of its engine, and refusals before anything is computed."""

import asyncio
import json
import sys

import pytest

from heterorl.common.errors import ConfigError
from heterorl_research.lab import run as lab_run
from heterorl_research.lab import worker
from heterorl_research.lab.cell import list_cells
from heterorl_research.lab.config import ExperimentConfig
from heterorl_research.lab.fast.orders import Means, Order
from heterorl_research.lab.results import failure
from heterorl_research.lab.world import Outcome

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
    monkeypatch.setattr("heterorl_research.lab.report.report.write_report", lambda directory: directory / "report.html")


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
    return lab_run.run_experiment(small, out=tmp_path / "out", means=Means(jobs=1, engine=engine))


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


def test_a_batch_that_fails_is_tried_by_halves_down_to_the_run_that_fails_alone(tmp_path, monkeypatch):
    cells = list_cells(ExperimentConfig(seeds=(0, 1, 2, 3, 4)))
    sizes = []

    def run_some(some, *, model_dirs, device, note_step):
        sizes.append(len(some))
        if any(cell.seed == 3 for cell in some):
            raise RuntimeError("out of memory")
        return [Outcome(steps=[], evaluations=[], status=None, ledger_balanced=None) for _ in some]

    (tmp_path / "runs").mkdir()
    monkeypatch.setattr(worker, "start_of", lambda cell, cache: tmp_path)
    monkeypatch.setattr(worker, "run_batch", run_some)
    worker.run_together(cells, out=tmp_path, cache=tmp_path, device="cpu", tell=lambda _: None)

    assert sizes == [5, 2, 3, 1, 2, 1, 1]
    rows = [json.loads((tmp_path / "runs" / f"{cell.run_id}.json").read_text()) for cell in cells]
    assert [row["failed"] for row in rows] == [None, None, None, "RuntimeError: out of memory", None]
    assert {row["engine"] for row in rows} == {"fast"}


def test_what_a_configuration_makes_impossible_is_not_tried_again(tmp_path, monkeypatch):
    cells, calls = list_cells(ExperimentConfig(seeds=(0, 1))), []

    def refuse(some, **_):
        calls.append(len(some))
        raise ConfigError("device", "cannot use cuda")

    (tmp_path / "runs").mkdir()
    monkeypatch.setattr(worker, "start_of", lambda cell, cache: tmp_path)
    monkeypatch.setattr(worker, "run_batch", refuse)
    worker.run_together(cells, out=tmp_path, cache=tmp_path, device="cuda", tell=lambda _: None)

    assert calls == [2]


DIES = """
import json, os, pathlib, sys
for line in sys.stdin:
    order = json.loads(line)
    numbers = order.get("batch") or [0]
    if "batch" in order and 2 in numbers:
        os._exit(9)
    if "batch" in order:
        for number in numbers:
            pathlib.Path(sys.argv[1], f"{number}.done").touch()
    print("{}", flush=True)
"""


@pytest.mark.process
def test_a_process_that_dies_has_its_batch_tried_by_halves(tmp_path, monkeypatch):
    cells = list_cells(ExperimentConfig(seeds=(0, 1, 2, 3)))
    (tmp_path / "runs").mkdir()
    program = tmp_path / "dies.py"
    program.write_text(DIES)
    monkeypatch.setattr(lab_run, "own_command", lambda *_: [sys.executable, str(program), str(tmp_path)])

    orders = [Order(kind="batch", numbers=(0, 1, 2, 3))]
    assert asyncio.run(lab_run._run_all(cells, range(4), orders=orders, directory=tmp_path, jobs=1))

    assert sorted(path.name for path in tmp_path.glob("*.done")) == ["0.done", "1.done", "3.done"]
    (lost,) = (tmp_path / "runs").glob("*.json")
    assert json.loads(lost.read_text())["failed"].startswith("its process ended with code 9")
    assert lost.stem == cells[2].run_id
