"""Whether ranks that two agents of torchrun start train what the torch backend trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from heterorl.learner.backends.torch_backend import TorchBackend
from heterorl.learner.learner_config import LearnerConfig
from tests.support.rank_jobs import run_job
from tests.support.rank_processes import Ranks
from tests.support.training import tiny_model

NUM_STEPS = 3


def assert_parity(directory: Path, backends: list[dict[str, Any]]) -> None:
    """Train, save, train; restore and train again, on two nodes with a rank each, for each backend."""
    tiny_model().save_pretrained(directory / "model")

    def config(**backend: Any) -> LearnerConfig:
        return LearnerConfig.model_validate(
            {
                "model_dir": str(directory / "model"),
                "sampling": {"max_new_tokens": 16},
                "backend": {
                    "lr": 1e-3, "micro_batch_tokens": 64, "published_dtype": "fp32", "threads": 1,
                    "weight_decay": 0.01, **backend,
                },
            }
        )  # fmt: skip

    def operations(name: str) -> list[list[Any]]:
        saved, first, again = (str(directory / f"{name}-{word}") for word in ("saved", "first.npy", "again.npy"))
        last = ["train", NUM_STEPS]
        steps = [["train", step] for step in range(NUM_STEPS)]
        return [*steps, ["save", saved], last, ["store", first], ["restore", saved], last, ["store", again]]

    def weights(name: str, word: str) -> Any:
        return np.load(directory / f"{name}-{word}.npy").view(np.float32)

    alone = config(kind="torch")
    sampling = alone.sampling.semantics()
    backend = TorchBackend(model_dir=alone.model_dir, config=alone.backend, loss=alone.loss, sampling=sampling)
    expected = run_job(backend, operations("torch"))

    ranks = Ranks(2, num_nodes=2)
    try:
        for number, options in enumerate(backends):
            found = ranks.ask(config(**options), operations(str(number)))

            for one, other in zip(found, expected, strict=True):
                if isinstance(other, dict):
                    assert one["loss"] == pytest.approx(other["loss"], abs=1e-6)
            np.testing.assert_allclose(weights(str(number), "first"), weights("torch", "first"), atol=2e-6)
            assert (weights(str(number), "first") == weights(str(number), "again")).all()
    finally:
        code = ranks.close()
    assert code == 0
