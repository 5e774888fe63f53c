"""Which supervised warm start a cell asks for."""

from pathlib import Path

import pytest

from heterorl_research.lab import warm_starts
from heterorl_research.lab.cell import list_cells
from heterorl_research.lab.config import ExperimentConfig


def test_a_warm_start_is_the_tasks(monkeypatch):
    asked = []
    monkeypatch.setattr(
        warm_starts, "warm_start", lambda options, *, cache, device: asked.append(options) or (cache, 0.3)
    )
    task = {
        "task": {"name": "progression", "digits": 1, "terms": 7}, "warm_start_target": 0.4, "warm_start_batch": 16,
        "warm_start_lr": 3e-4, "hidden_size": 96, "num_layers": 3,
    }  # fmt: skip

    warm_starts.prepare(list_cells(ExperimentConfig(tasks=(task,), seeds=(9,)))[0], cache=Path())

    [options] = asked
    assert (options.task, options.digits, options.terms, options.seed) == ("progression", 1, 7, 9)
    assert (options.target, options.batch_size, options.learning_rate) == (0.4, 16, 3e-4)
    assert (options.hidden_size, options.num_layers) == (96, 3)


@pytest.mark.parametrize("accuracy", [0.24, 0.25])
def test_a_run_does_not_begin_from_a_warm_start_that_missed_its_target(monkeypatch, accuracy):
    monkeypatch.setattr(warm_starts, "warm_start", lambda _, *, cache, device: (cache, accuracy))
    cell = list_cells(ExperimentConfig(seeds=(9,)))[0]

    if accuracy < 0.25:
        with pytest.raises(warm_starts.MissedTarget, match=r"seed 9 ended at 0.24, and warm_start_target is 0.25"):
            warm_starts.start_of(cell, cache=Path("x"))
    else:
        assert warm_starts.start_of(cell, cache=Path("x")) == Path("x")
