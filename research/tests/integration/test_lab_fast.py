"""The vectorised lab beside the services' lab: the same runs, step by step."""

import dataclasses
import json
import math

import pytest

from heterorl.common.generation.tiny_model import WarmStart, warm_start
from heterorl.learner.backends.torch_backend import TorchBackend
from heterorl.learner.train.backend_config import TorchBackendConfig
from heterorl_research.lab.fast.batch import _Batch, run_batch
from heterorl_research.lab.results import summarise
from heterorl_research.lab.world import run_cell
from research.tests.support.fast_lab import VERSIONS, cell_of

pytestmark = pytest.mark.slow

CELLS = [
    cell_of(),
    cell_of({"kind": "none"}, loss={"kind": "grpo"}),
    cell_of(loss={"kind": "eqp"}, lr=1e-3),
    cell_of({**VERSIONS, "value": 1}, loss={"kind": "topr"}, seed=4),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    cache = tmp_path_factory.mktemp("models")
    return {
        seed: warm_start(
            WarmStart(digits=1, seed=seed, target=0.1, hidden_size=16, num_layers=2, batch_size=64), cache=cache
        )[0]
        for seed in (3, 4)
    }


def run_together(cells, models):
    outcomes = run_batch(cells, model_dirs=[models[cell.seed] for cell in cells])
    return [summarise(cell, outcome, wall_s=0.0) for cell, outcome in zip(cells, outcomes, strict=True)]


EXACT, TOKENS = 2, 2
"""Steps that agree to rounding, and rollouts of the 16 that may come out otherwise later."""


def known(values):
    """Steps with a number, and the numbers; where there are none says at which steps they are missing."""
    return {step: value for step, value in enumerate(values) if value is not None}


@pytest.fixture(scope="module")
def rows(models):
    return run_together(CELLS, models)


def test_two_batches_give_the_same_bytes_whoever_is_in_them(rows, models):
    assert json.dumps(run_together(CELLS, models)) == json.dumps(rows)
    assert json.dumps(run_together(CELLS[:1], models)) == json.dumps(rows[:1])
    assert json.dumps(run_together([CELLS[3], CELLS[1]], models)) == json.dumps([rows[3], rows[1]])


@pytest.mark.parametrize("number", range(len(CELLS)))
def test_a_run_is_that_of_the_services(number, rows, models, tmp_path):
    cell, row = CELLS[number], rows[number]
    theirs = summarise(cell, run_cell(cell, model_dir=models[cell.seed], directory=tmp_path), wall_s=0.0)

    assert row["series"].keys() == theirs["series"].keys()
    assert row.keys() == theirs.keys()
    assert row["series"]["staleness"] == theirs["series"]["staleness"]
    # To the token while the weights are the same. AdamW makes whole steps of gradients that are nothing but rounding, so
    # both runs leave each other slowly, and a token may flip.
    assert row["series"]["reward"][:EXACT] == theirs["series"]["reward"][:EXACT]
    assert row["series"]["reward"] == pytest.approx(theirs["series"]["reward"], abs=TOKENS / 16)
    assert row["evaluations"][0] == theirs["evaluations"][0]
    for found, expected in zip(row["evaluations"], theirs["evaluations"], strict=True):
        assert found["step"] == expected["step"]
        assert found["accuracy"] == pytest.approx(expected["accuracy"], abs=TOKENS / 16)
    for name, values in theirs["series"].items():
        early, late = known(row["series"][name][:EXACT]), known(row["series"][name])
        assert early == pytest.approx(known(values[:EXACT]), rel=5e-3, abs=1e-4), name
        assert late.keys() == known(values).keys()
    assert row["series"]["entropy"] == pytest.approx(theirs["series"]["entropy"], rel=0.05)
    assert row["series"]["kl"] == pytest.approx(theirs["series"]["kl"], rel=0.3, abs=1e-3)
    assert row["groups"] is None
    assert row["ledger_balanced"] is None


def test_a_batch_that_trains_in_parts_gives_the_same_bytes(rows, models, monkeypatch):
    monkeypatch.setattr(_Batch, "_parts", lambda batch: [slice(start, start + 3) for start in range(0, 4, 3)])
    assert json.dumps(run_together(CELLS, models)) == json.dumps(rows)


def test_staleness_is_the_delay_after_its_ramp(rows):
    assert rows[0]["series"]["staleness"] == [0, 1, 2, 3, 3, 3, 3, 3]
    assert rows[1]["series"]["staleness"] == [0] * 8


def is_collapsed(row):
    assert (row["last"], row["failed"], row["steps"]) == (0.0, None, row["diverged_at"] - 1)
    assert [found["step"] for found in row["evaluations"]] == [0, 4, 8]
    return [found["accuracy"] for found in row["evaluations"][1:]] == [0.0, 0.0]


def test_a_run_that_diverges_has_collapsed(models, monkeypatch):
    monkeypatch.setattr(TorchBackendConfig, "rate", lambda *_, **__: 1e30)
    cell = cell_of()
    (row,) = run_together([cell], models)

    assert 1 < row["diverged_at"] <= 4
    assert is_collapsed(row)


def test_a_run_of_the_services_that_diverges_has_collapsed(models, tmp_path, monkeypatch):
    cell = cell_of()
    inner = TorchBackend.train_step

    def diverge(self, groups, *, head_version, step):
        report = inner(self, groups, head_version=head_version, step=step)
        return report if step < 3 else dataclasses.replace(report, loss=math.nan, is_applied=False)

    monkeypatch.setattr(TorchBackend, "train_step", diverge)
    row = summarise(cell, run_cell(cell, model_dir=models[cell.seed], directory=tmp_path), wall_s=0.0)

    assert row["diverged_at"] == 3
    assert is_collapsed(row)


def test_both_engines_evaluate_other_prompts_with_noise_of_the_version(models, tmp_path):
    cell = cell_of(evaluation_noise="by_version", evaluation_offset=3)
    (row,) = run_together([cell], models)
    theirs = summarise(cell, run_cell(cell, model_dir=models[cell.seed], directory=tmp_path), wall_s=0.0)

    assert row["evaluations"][0] == theirs["evaluations"][0]


def test_every_version_is_evaluated_with_its_own_noise_where_that_is_asked(models):
    # Weights that do not move: what differs is the noise.
    still = {"lr": 1e-12, "evaluate_every": 1, "temperature": 1.0}
    (same,) = run_together([cell_of(**still)], models)
    (own,) = run_together([cell_of(**still, evaluation_noise="by_version")], models)

    assert len({found["accuracy"] for found in same["evaluations"]}) == 1
    assert len({found["accuracy"] for found in own["evaluations"]}) > 1


def test_greedy_accuracy_is_that_of_a_temperature_near_zero(models):
    drawn, cold = (run_together([cell_of(evaluation_temperature=t)], models)[0] for t in (1.0, 1e-4))

    assert drawn["last"] != cold["last"]
    assert drawn["last_greedy"] == cold["last_greedy"] == cold["last"]
