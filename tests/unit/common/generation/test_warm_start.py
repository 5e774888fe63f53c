"""A warm start samples only where its losses allow the accuracy that it stops at."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from heterorl.common.generation import tiny_model as subject
from heterorl.common.generation.tiny_model import WarmStart, evaluate, warm_start
from heterorl.common.weights.payload import file_digest

OPTIONS = WarmStart(digits=1, seed=3, batch_size=32, hidden_size=32, num_layers=1, target=0.2)


@pytest.fixture(name="evaluations")
def _evaluations(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    found: list[float] = []

    def counted(*args: Any, **options: Any) -> float:
        found.append(evaluate(*args, **options))
        return found[-1]

    monkeypatch.setattr(subject, "evaluate", counted)
    return found


@pytest.mark.slow
def test_it_stops_where_it_would_if_every_evaluation_were_sampled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, evaluations: list[float]
) -> None:
    directory, accuracy = warm_start(OPTIONS, cache=tmp_path / "bounded")
    sampled = len(evaluations)
    loss = subject._loss
    monkeypatch.setattr(subject, "_loss", lambda *args: (loss(*args)[0], 1.0))
    other, same = warm_start(OPTIONS, cache=tmp_path / "sampled")
    assert 0 < sampled < len(evaluations) - sampled
    assert accuracy == same >= OPTIONS.target
    assert file_digest(directory / "model.safetensors") == file_digest(other / "model.safetensors")


def test_one_that_reaches_nothing_is_written_and_sampled_at_its_last_step(
    tmp_path: Path, evaluations: list[float]
) -> None:
    options = WarmStart(digits=1, seed=0, batch_size=2, max_steps=3, hidden_size=32, num_layers=1)
    directory, accuracy = warm_start(options, cache=tmp_path)
    assert evaluations == [accuracy]
    first, _ = warm_start(replace(options, max_steps=1), cache=tmp_path)
    assert file_digest(directory / "model.safetensors") != file_digest(first / "model.safetensors")


def test_the_bound_is_the_mean_share_that_is_right_so_far() -> None:
    losses = -torch.log(torch.tensor([[0.5, 0.5, 1.0], [1.0, 0.25, 0.5]]))
    assert subject.mean_share(losses) == pytest.approx((0.5 + 0.25 + 0.25 + 1.0 + 0.25 + 0.125) / 6)
