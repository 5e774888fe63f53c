"""Rows of runs: the last accuracy, and the short form that is committed."""

import json
from types import SimpleNamespace

import pytest

from heterorl_research.lab.cell import list_cells
from heterorl_research.lab.config import ExperimentConfig
from heterorl_research.lab.report.data import Run
from heterorl_research.lab.results import identity, kept, summarise


def summary(accuracies, *, steps=400, diverged_at=None, **regime):
    (cell,) = list_cells(ExperimentConfig(regime=regime))
    outcome = SimpleNamespace(
        steps=[{"step": float(step), "kl": step / 7, "reward": None} for step in range(steps)],
        evaluations=[
            {"step": 20 * number, "accuracy": value, "benchmarks": {}} for number, value in enumerate(accuracies)
        ],
        status=SimpleNamespace(ledger=SimpleNamespace(acked=7)),
        ledger_balanced=True,
        diverged_at=diverged_at,
    )
    return summarise(cell, outcome, wall_s=1.0)


def test_last_is_the_mean_of_as_many_evaluations_as_the_regime_says():
    accuracies = [0.3, 0.9, 0.5, 0.6, 0.7]

    assert summary(accuracies)["last"] == 0.7
    assert summary(accuracies)["gap"] == pytest.approx(0.2)
    smooth = summary(accuracies, last_evaluations=3)
    assert (smooth["last"], smooth["gap"], smooth["best"]) == (pytest.approx(0.6), pytest.approx(0.3), 0.9)
    assert smooth["warm_start_accuracy"] == 0.3
    assert summary([0.3], last_evaluations=3)["last"] == 0.3
    assert summary([])["last"] is summary([])["gap"] is None


def test_a_run_that_diverged_has_collapsed_and_ended_at_0():
    # Evaluations at 0, 20, 40 and, of weights that stayed as they were, 60 and 80; step 41 was not finite.
    row = summary([0.3, 0.5, 0.6, 0.6, 0.6], steps=80, diverged_at=41, max_steps=80, evaluate_every=20)

    assert [found["accuracy"] for found in row["evaluations"]] == [0.3, 0.5, 0.6, 0.0, 0.0]
    assert (row["last"], row["best"], row["gap"], row["failed"], row["diverged_at"]) == (0.0, 0.6, 0.6, None, 41)
    assert (row["steps"], row["series"]["step"][-1]) == (41, 40.0)
    assert Run.model_validate_json(json.dumps(kept(row))).has_collapsed
    # The services end at that step.
    short = summary([0.3, 0.5, 0.6], steps=40, diverged_at=41, max_steps=80, evaluate_every=20)
    assert short["evaluations"] == row["evaluations"]


def test_row_says_at_which_learning_rate(monkeypatch):
    assert summary([0.3], lr=0.25)["lr"] == 0.25


@pytest.mark.parametrize(
    ("kind", "weights"), [("gepo", "rollout"), ("gspo", "rollout"), ("gspo_token", "rollout"), ("grpo", "token")]
)
def test_row_says_what_has_a_weight(kind, weights):
    (cell,) = list_cells(ExperimentConfig(algorithms=({"name": "a", "loss": {"kind": kind}},)))

    assert identity(cell)["weights"] == weights


def test_short_form_keeps_every_evaluation_and_means_of_the_series():
    row = summary([0.123456789, 0.25], steps=400)

    short = kept(row)
    read = Run.model_validate_json(json.dumps(short))

    assert short["evaluations"] == {"step": [0, 20], "accuracy": [0.1235, 0.25]}
    assert read.curve == {0: 0.1235, 20: 0.25}
    assert short["series"]["step"][:2] == [19.5, 59.5]
    assert short["series"]["kl"][0] == pytest.approx(19.5 / 7, rel=5e-3)
    assert short["series"]["reward"] == [None] * 10
    assert read.number("series:kl") == pytest.approx(row["kl_mean"], rel=5e-3)
    assert short["kl_mean"] == pytest.approx(row["kl_mean"], rel=1e-5)
    assert {**short, "series": 0, "evaluations": 0, "kl_mean": 0} == {
        **row, "series": 0, "evaluations": 0, "kl_mean": 0, "best": 0.25, "warm_start_accuracy": 0.123457,
    }  # fmt: skip


@pytest.mark.parametrize(("steps", "points"), [(1, 1), (7, 7), (10, 10), (11, 6), (401, 10)])
def test_series_become_at_most_ten_points(steps, points):
    assert len(kept(summary([0.3], steps=steps))["series"]["step"]) == points


def test_a_short_run_is_small():
    row = summary([0.123456] * 41, steps=800)
    row["series"] |= {f"series_{number}": [0.0123456 * step for step in range(800)] for number in range(12)}

    assert len(json.dumps(kept(row), separators=(",", ":"))) < 2500


def test_columns_of_unequal_length_are_refused():
    short = {**kept(summary([0.3, 0.4])), "evaluations": {"step": [0], "accuracy": [0.3, 0.4]}}

    with pytest.raises(ValueError, match="two columns"):
        Run.model_validate(short)
