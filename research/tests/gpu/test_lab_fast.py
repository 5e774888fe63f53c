"""The vectorised lab on a GPU beside itself on the CPU: the same runs, the same bytes twice, seconds of a large batch."""

import json
import time

import pytest

from heterorl.common.generation.tiny_model import WarmStart, warm_start
from heterorl_research.lab.fast.batch import run_batch
from heterorl_research.lab.results import summarise
from research.tests.support.fast_lab import cell_of

pytestmark = [pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    options = WarmStart(digits=1, seed=3, target=0.1, hidden_size=16, num_layers=2, batch_size=64)
    return warm_start(options, cache=tmp_path_factory.mktemp("models"))[0]


def rows_of(cells, model_dir, device):
    outcomes = run_batch(cells, model_dirs=[model_dir] * len(cells), device=device)
    return [summarise(cell, outcome, wall_s=0.0) for cell, outcome in zip(cells, outcomes, strict=True)]


def test_runs_on_a_gpu_are_those_of_the_cpu(device, model_dir):
    cells = [cell_of(loss={"kind": kind}) for kind in ("gepo", "grpo", "eqp")]
    found, again, expected = (rows_of(cells, model_dir, where) for where in (device, device, "cpu"))

    assert json.dumps(found) == json.dumps(again)
    for row, reference in zip(found, expected, strict=True):
        assert row["series"]["reward"] == reference["series"]["reward"]
        for name, values in reference["series"].items():
            found_there, there = (
                {step: value for step, value in enumerate(some) if value is not None}
                for some in (row["series"][name], values)
            )
            assert found_there == pytest.approx(there, rel=5e-3, abs=5e-5), name


def test_seconds_of_a_step_of_many_runs(cuda, model_dir):
    cells = [cell_of(seed=3, lr=1e-4 * (1 + number), groups_per_step=24, group_size=8) for number in range(256)]
    started = time.perf_counter()
    rows = rows_of(cells, model_dir, cuda)

    print(f"256 runs x 8 steps: {time.perf_counter() - started:.1f} s")
    assert all(row["steps"] == 8 for row in rows)
