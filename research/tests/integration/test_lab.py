"""The lab: the services' own code on virtual time, run by real worker processes."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from heterorl.common.generation.tiny_model import write_tiny_model
from heterorl.common.process.threads import own_command
from heterorl_research.lab import pace, world
from heterorl_research.lab.cell import list_cells
from heterorl_research.lab.config import ExperimentConfig
from heterorl_research.lab.results import summarise
from heterorl_research.lab.world import run_cell
from tests.support import foreign

pytestmark = pytest.mark.slow

TASK = {"name": "add1", "task": {"name": "arithmetic", "digits": 1}, "max_new_tokens": 3, "hidden_size": 16}
REGIME = {"max_steps": 8, "groups_per_step": 4, "group_size": 4, "evaluate_every": 4, "num_evaluation": 16}


def cell_of(delay, *, loss=None, **regime):
    experiment = ExperimentConfig(
        algorithms=({"name": "x", "loss": loss or {"kind": "gepo"}},),
        delays=(delay,),
        tasks=(TASK,),
        seeds=(3,),
        regime={**REGIME, "probe_every": 4, **regime},
    )
    return list_cells(experiment)[0]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("model"), seed=3, hidden_size=16, num_layers=1)


def run(cell, model_dir, directory):
    directory.mkdir()
    return summarise(cell, run_cell(cell, model_dir=model_dir, directory=directory), wall_s=0.0)


VERSIONS = {"kind": "fixed", "unit": "versions", "value": 3}
SECONDS = {"kind": "lognormal", "low": 60, "high": 200}


@pytest.mark.parametrize("delay", [VERSIONS, SECONDS], ids=["versions", "seconds"])
def test_a_run_repeats_bit_for_bit(delay, model_dir, tmp_path):
    cell = cell_of(delay)
    first, second = (run(cell, model_dir, tmp_path / name) for name in ("one", "two"))

    assert json.dumps(first) == json.dumps(second)
    assert first["steps"] == 8
    assert first["ledger_balanced"]
    assert first["failed"] is None
    assert [row["step"] for row in first["evaluations"]] == [0, 4, 8]
    assert any(value is not None for value in first["series"]["advantage_error"])


def test_another_seed_is_another_run(model_dir, tmp_path):
    cell = cell_of(VERSIONS)
    other = list_cells(
        ExperimentConfig(algorithms=(cell.algorithm,), delays=(cell.delay,), tasks=(cell.task,), seeds=(4,),
                         regime=cell.regime)
    )[0]  # fmt: skip

    assert run(cell, model_dir, tmp_path / "a")["series"] != run(other, model_dir, tmp_path / "b")["series"]


@pytest.mark.parametrize(("delay", "expected"), [({"kind": "none"}, 0), (VERSIONS, 3)], ids=["none", "three"])
def test_staleness_is_exactly_the_delay_once_there_are_so_many_versions(delay, expected, model_dir, tmp_path):
    staleness = run(cell_of(delay), model_dir, tmp_path / "run")["series"]["staleness"]

    assert staleness == [min(step, expected) for step in range(8)]


LAGGED = [
    {"kind": "sawtooth", "high": 4},
    {"kind": "uniform_lag", "high": 4},
    {"kind": "uniform", "unit": "versions", "low": 1, "high": 5},
    {"kind": "fixed", "unit": "versions", "semantics": "refresh_interval", "value": 3},
]


@pytest.mark.parametrize("num_samplers", [1, 2])
@pytest.mark.parametrize("delay", LAGGED, ids=lambda delay: delay["kind"])
def test_staleness_is_exactly_the_lag_that_was_drawn(delay, num_samplers, model_dir, tmp_path):
    cell = cell_of(delay, max_steps=16, evaluate_every=16, probe_every=0, num_samplers=num_samplers)
    found = run(cell, model_dir, tmp_path / "run")

    # Half of a step's groups are of each site.
    of_sites = [pace.lags(cell, number) for number in range(num_samplers)]
    expected = [sum(lags) / num_samplers for lags in zip(*of_sites, strict=True)]
    assert found["series"]["staleness"] == expected[:16]
    assert found["ledger_balanced"]


def test_truncated_sampling_is_another_run_that_is_evaluated_alike(model_dir, tmp_path):
    plain, top = (
        run(cell_of(VERSIONS, **regime), model_dir, tmp_path / name)
        for name, regime in (("plain", {}), ("top", {"top_k": 2}))
    )

    assert plain["evaluations"][0] == top["evaluations"][0]
    # Other tokens are drawn, of which the learner's entropy is another.
    assert plain["series"]["entropy"] != top["series"]["entropy"]


def test_newest_first_is_an_order_of_the_lab(model_dir, tmp_path):
    def staleness(order):
        queue = {"sampler_speed": 4.0, "versions_in_flight": 10, "lease_order": order}
        cell = cell_of(REFRESHED, max_steps=32, evaluate_every=32, probe_every=0, num_samplers=2, **queue)
        found = run(cell, model_dir, tmp_path / order)
        assert found["ledger_balanced"]
        assert found["steps"] == 32
        late = found["series"]["staleness"][16:]
        return sum(late) / len(late), min(late)

    # Where samplers outrun the learner, oldest first waits out the whole queue; newest first has new groups soon.
    (newest, least), (oldest, _) = staleness("newest"), staleness("oldest")
    assert (newest, least) < (oldest, 0), (newest, oldest, least)


def test_a_version_of_several_steps_is_that_much_newer(model_dir, tmp_path):
    found = run(cell_of(VERSIONS, max_steps=16, steps_per_version=2), model_dir, tmp_path / "run")

    # Two steps a version: the delay of three versions is reached after six steps.
    assert found["series"]["staleness"] == [min(step // 2, 3) for step in range(16)]
    assert [row["step"] for row in found["evaluations"]] == [0, 4, 8]


def test_delays_in_seconds_become_versions_by_the_length_of_a_step(model_dir, tmp_path):
    near = run(cell_of(SECONDS, seconds_per_step=1000.0), model_dir, tmp_path / "near")
    far = run(cell_of(SECONDS, seconds_per_step=28.0), model_dir, tmp_path / "far")

    # Weights and groups each take at least 60 s: two steps of 28 s.
    assert far["staleness_max"] >= 4 > near["staleness_max"]


REFRESHED = {"kind": "lognormal", "semantics": "refresh_interval", "low": 60, "high": 600}


def test_staleness_of_refreshed_sites_comes_from_the_delay_and_not_from_a_queue(model_dir, tmp_path):
    cell = cell_of(REFRESHED, max_steps=60, evaluate_every=60, probe_every=0, num_samplers=2)
    staleness = run(cell, model_dir, tmp_path / "run")["series"]["staleness"]

    # Weights are on average E[T^2] / (2 E[T]) = 122 s old, 4.4 steps of 28 s; a queue of the bound's length adds 40.
    late = staleness[20:]
    assert sum(late) / len(late) < 12
    assert max(late) <= 600 / 28 + 3


def test_every_temperature_is_evaluated_alike(model_dir, monkeypatch):
    drawn = []
    real = world.HfEngine

    def noted(**settings):
        sampling = settings["sampling"]
        drawn.append((sampling.temperature, sampling.top_p, sampling.top_k))
        return real(**settings)

    monkeypatch.setattr(world, "HfEngine", noted)
    cell = cell_of(VERSIONS, temperature=0.3, top_p=0.9, top_k=5)
    world._probe(cell, model_dir)
    world._evaluator(cell, model_dir)

    # Fresh rollouts of the policy in training are drawn as samplers draw; accuracies are compared between runs.
    assert drawn == [(0.3, 0.9, 5), (1.0, 1.0, 0)]


def test_a_lossy_link_changes_nothing_that_is_learned_from(model_dir, tmp_path):
    lossy = run(cell_of(VERSIONS, link_loss=0.05), model_dir, tmp_path / "lossy")

    assert lossy["steps"] == 8
    assert lossy["ledger_balanced"]


EXPERIMENT = f"""
name = "small"
seeds = [0]
algorithms = [{{ name = "gepo" }}, {{ name = "grpo", loss = {{ kind = "grpo" }} }}]
[[tasks]]
name = "add1"
task = {{ name = "arithmetic", digits = 1 }}
max_new_tokens = 3
hidden_size = 16
num_layers = 1
warm_start_target = 0.01
[regime]
{chr(10).join(f"{key} = {value}" for key, value in REGIME.items())}
"""


def start(directory: Path, *arguments: str) -> subprocess.Popen:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "heterorl", "lab", "run", "small.toml", "--jobs", "1", *arguments]
    return subprocess.Popen(command, cwd=directory, env=environment, stderr=subprocess.PIPE, text=True)


@pytest.mark.timeout(600)
def test_an_interrupted_experiment_goes_on_where_it_stopped(tmp_path):
    (tmp_path / "small.toml").write_text(EXPERIMENT)
    results = tmp_path / "runs/lab/small"
    process = start(tmp_path)
    try:
        while not list(results.glob("runs/*.json")):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=0.1)
            assert process.returncode is None, process.stderr.read()
        process.send_signal(signal.SIGINT)
        _, heard = process.communicate()
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130, heard
    assert "the same command goes on from here" in heard

    before = {path.name: path.stat().st_mtime_ns for path in results.glob("runs/*.json")}
    again = start(tmp_path)
    try:
        _, heard = again.communicate()
    finally:
        again.kill()

    assert again.returncode == 0, heard
    assert f"2 runs, {2 - len(before)} to do" in heard
    assert all((results / "runs" / name).stat().st_mtime_ns == at for name, at in before.items())
    rows = json.loads((results / "results.json").read_text())["runs"]
    assert {row["algorithm"] for row in rows} == {"gepo", "grpo"}
    needed = "algorithm delay delay_kind seed task best last gap kl_mean iw_var_mean ess_mean clip_fraction_mean"
    assert all(row[name] is not None for row in rows for name in [*needed.split(), "grad_norm_p95", "wall_s"])
    assert all(row["evaluations"]["step"] == [0, 4, 8] for row in rows)
    assert all(len(row["series"]["kl"]) == 8 for row in rows)
    assert (results / "report.html").stat().st_size > 10_000


ONE_RUN = """
name = "small"
seeds = [0]
algorithms = [{ name = "gepo" }]
[[tasks]]
name = "add1"
task = { name = "arithmetic", digits = 1 }
max_new_tokens = 3
hidden_size = 16
num_layers = 1
warm_start_target = 0.01
[regime]
max_steps = 2
groups_per_step = 2
group_size = 2
evaluate_every = 2
num_evaluation = 8
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_worker_runs_a_cell_beside_foreign_services(tmp_path, monkeypatch):
    with foreign.foreign_project(tmp_path, monkeypatch) as project:
        (project / "small.toml").write_text(ONE_RUN)

        foreign.run(*own_command("heterorl", "lab", "run", "small.toml", "--jobs", "1"), timeout_s=250)

    (row,) = (project / "runs/lab/small/runs").glob("*.json")
    assert json.loads(row.read_text())["failed"] is None
