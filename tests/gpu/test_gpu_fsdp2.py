"""FSDP2 with one rank on a GPU, over NCCL, takes the torch backend's steps of the CPU; tokens a second beside TRL's."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from heterorl.learner.backends.torch_backend import TorchBackend
from heterorl.learner.learner_config import LearnerConfig
from tests.gpu.conftest import DEVICE
from tests.support.rank_jobs import run_job
from tests.support.rank_processes import Ranks
from tests.support.training import tiny_model

pytestmark = [pytest.mark.timeout(1500), pytest.mark.filterwarnings("default")]
ROOT = Path(__file__).parents[2]
NUM_STEPS = 4


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    tiny_model().save_pretrained(directory)
    return directory


def _config(model_dir, kind, **backend):
    return LearnerConfig.model_validate(
        {
            "model_dir": str(model_dir),
            "sampling": {"max_new_tokens": 16},
            "loss": {"kind": "grpo"},
            "backend": {
                "kind": kind, "lr": 1e-3, "warmup_steps": 4, "micro_batch_tokens": 64, "published_dtype": "fp32",
                **backend,
            },
        }
    )  # fmt: skip


def _operations(path):
    return [*(["train", step] for step in range(NUM_STEPS)), ["store", str(path)]]


@pytest.fixture(scope="module")
def expected(model_dir, tmp_path_factory):
    """Steps of backend torch on the CPU, in fp32, and the weights after them."""
    path = tmp_path_factory.mktemp("expected") / "weights.npy"
    config = _config(model_dir, "torch")
    sampling = config.sampling.semantics()
    backend = TorchBackend(model_dir=model_dir, config=config.backend, loss=config.loss, sampling=sampling)
    return run_job(backend, _operations(path))[:NUM_STEPS], np.load(path).view(np.float32)


@pytest.fixture(scope="module")
def ranks():
    # What torch compiles by on a GPU needs no compiler of C++; on a CPU graphs alone are made.
    ranks = Ranks(1, compiler="" if DEVICE == "cuda" else "eager")
    yield ranks
    assert ranks.close() == 0


def _assert_near(ranks, model_dir, path, expected, *, tolerance, **backend):
    found = ranks.ask(_config(model_dir, "fsdp2", device=DEVICE, **backend), _operations(path))
    for one, other in zip(found[:NUM_STEPS], expected[0], strict=True):
        assert one["is_applied"]
        assert one["loss"] == pytest.approx(other["loss"], abs=tolerance)
    # AdamW's first steps have the size lr whatever they see, so what is near 0 may go either way.
    differences = np.abs(np.load(path).view(np.float32) - expected[1])
    assert differences.max() <= max(10 * tolerance, 2 * NUM_STEPS * 1e-3 * (tolerance > 1e-4))


@pytest.mark.parametrize(
    "changes",
    [{}, {"batching": "packed", "gradient_checkpointing": True}, {"offload_optimizer": True}, {"compile": True}],
    ids=["plain", "packed", "offloaded", "compiled"],
)
def test_steps_equal_those_of_the_cpu(ranks, model_dir, tmp_path, expected, changes):
    _assert_near(ranks, model_dir, tmp_path / "weights.npy", expected, tolerance=1e-4, **changes)


def test_bf16_steps_stay_near(ranks, model_dir, tmp_path, expected):
    # bf16 keeps 8 bits: log-probs differ by about 1 %.
    path = tmp_path / "weights.npy"
    _assert_near(ranks, model_dir, path, expected, tolerance=0.015, compute_dtype="bf16", published_dtype="fp32")


def test_checkpoint_comes_back_bit_for_bit(ranks, model_dir, tmp_path):
    saved, last = str(tmp_path / "saved"), ["train", 1]
    config = _config(model_dir, "fsdp2", device=DEVICE)

    found = ranks.ask(config, [["train", 0], ["save", saved], last, ["store"], ["restore", saved], last, ["store"]])

    assert found[3] == found[6]


def test_ligers_steps_equal_those_of_the_cpu(cuda, model_dir, tmp_path, expected):
    pytest.importorskip("liger_kernel", reason="liger-kernel is not installed")
    ranks = Ranks(1)

    _assert_near(ranks, model_dir, tmp_path / "weights.npy", expected, tolerance=1e-3, liger=True)

    assert ranks.close() == 0


@pytest.mark.parametrize("changes", [[], ["--compile"], ["--liger"]], ids=lambda words: " ".join(words) or "plain")
def test_tokens_a_second_beside_trl(tmp_path, changes):
    """Half a billion random weights on a GPU; a few on a CPU, where it is seen that this runs."""
    pytest.importorskip("trl", reason="trl is not installed")
    if changes and DEVICE == "cpu":
        pytest.skip("needs a GPU")
    if "--liger" in changes:
        pytest.importorskip("liger_kernel", reason="liger-kernel is not installed")
    sizes = ["--hidden-size", "1280", "--layers", "24", "--groups", "4", "--max-tokens", "1024"]
    if DEVICE == "cpu":
        sizes = ["--hidden-size", "128", "--layers", "1", "--groups", "1", "--max-tokens", "16", "--steps", "1"]
    out = tmp_path / "learner.json"

    subprocess.run(
        [sys.executable, "-m", "benchmarks.learner", "--device", DEVICE, "--systems", "heterorl", "fsdp2", "trl",
         *sizes, *changes, "--out", str(out)],
        cwd=ROOT, check=True, timeout=1200, stdout=subprocess.DEVNULL,
    )  # fmt: skip

    rows = json.loads(out.read_text())["rows"]
    print()
    for row in rows:
        print(f"{row['model']}, {row['system']}{' '.join(changes)} on {row['device']}: "
              f"{row['tokens_per_wall_s']:,.0f} tokens/s, {row['step_memory_mb']:,} MB beside the model")  # fmt: skip
    assert [row["system"] for row in rows] == ["heterorl", "fsdp2", "trl"]
    assert all(row["tokens_per_wall_s"] > 0 for row in rows)
