"""A family with a divided backend beside the torch backend: the same versions and the same step."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from heterorl.learner.backends.torch_backend import TorchBackend
from heterorl.learner.learner_config import LearnerConfig
from tests.support.families import FAMILIES, write_family
from tests.support.rank_jobs import run_job
from tests.support.rank_processes import Ranks


def family_config(name: str, model_dir: Path, kind: str) -> LearnerConfig:
    """One small step at a time, published in bf16."""
    return LearnerConfig.model_validate(
        {
            "model_dir": str(model_dir), "sampling": {"max_new_tokens": 16}, "loss": {"kind": "gepo"},
            "backend": {
                "kind": kind, "lr": 1e-3, "micro_batch_tokens": 64, "threads": 1, "published_dtype": "bf16",
                "attn_implementation": FAMILIES[name].attention,
            },
        }
    )  # fmt: skip


def check_family(ranks: Ranks, name: str, directory: Path, kind: str) -> None:
    """Version 0 bit for bit, a step on rounded weights, and the version after it but for what stands at a border."""
    model_dir, path = write_family(name, directory / "model"), str(directory / "weights.npy")
    operations = [["store"], ["train", 0], ["store", path]]
    config = family_config(name, model_dir, "torch")
    backend = TorchBackend(
        model_dir=model_dir, config=config.backend, loss=config.loss, sampling=config.sampling.semantics()
    )
    expected = run_job(backend, operations)
    published = np.load(path)

    actual = ranks.ask(family_config(name, model_dir, kind), operations)

    assert actual[0] == expected[0]
    for key in ("is_applied", "loss", "grad_norm", "kl", "entropy"):
        assert actual[1][key] == pytest.approx(expected[1][key], rel=1e-4, abs=1e-5), key
    assert np.mean(np.load(path) != published) <= 5e-3
