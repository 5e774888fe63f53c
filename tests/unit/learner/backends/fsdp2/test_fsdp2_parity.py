"""FSDP2 trains what the torch backend trains, at any number of ranks, and continues its checkpoints.

The ranks of one fixture serve all tests, because importing torch costs more than any of them.
"""

import numpy as np
import pytest
from safetensors.torch import load_file

from benchmarks.load_memory import write_model
from heterorl.common.weights.arena import CHUNK_ELEMENTS
from heterorl.learner.backends.torch import TorchBackend
from heterorl.learner.config import LearnerConfig
from tests.support.rank_jobs import Ranks, run_job
from tests.support.training import tiny_model

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow, pytest.mark.xdist_group("fsdp2")]
STEPS = [["train", seed] for seed in range(4)]
LORA = {"rank": 4, "alpha": 8.0, "target_modules": ["q_proj", "down_proj"]}
NUM_RANKS = [2, pytest.param(1, marks=pytest.mark.nodes), pytest.param(4, marks=pytest.mark.nodes)]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    tiny_model().save_pretrained(directory)
    return directory


@pytest.fixture(scope="module", params=NUM_RANKS, ids=lambda number: f"{number}-ranks")
def ranks(request):
    ranks = Ranks(request.param)
    yield ranks
    assert ranks.close() == 0


@pytest.fixture
def config(model_dir):
    def build(kind="fsdp2", *, loss="gepo", model_dir=model_dir, lora=None, **backend):
        return LearnerConfig.model_validate(
            {
                "model_dir": str(model_dir),
                "sampling": {"max_new_tokens": 16},
                "loss": {"kind": loss},
                "lora": lora or {},
                "backend": {
                    "kind": kind, "lr": 1e-3, "warmup_steps": 4, "micro_batch_tokens": 64, "weight_decay": 0.01,
                    "published_dtype": "fp32", "threads": 1, **backend,
                },
            }
        )  # fmt: skip

    return build


def _torch(config, operations):
    backend = TorchBackend(
        model_dir=config.model_dir,
        config=config.backend,
        loss=config.loss,
        sampling=config.sampling.semantics(),
        lora=config.lora,
    )
    return run_job(backend, operations)


def _weights(path):
    return np.load(path).view(np.float32)


def _assert_close(actual, expected, *, tolerance):
    for one, other in zip(actual, expected, strict=True):
        assert one["is_applied"] == other["is_applied"]
        assert one["loss"] == pytest.approx(other["loss"], abs=tolerance)
        assert one["extra_lr"] == pytest.approx(other["extra_lr"], rel=1e-12)
        # Ten times wider: functions of weights that have gone apart by rounding, AdamW enlarging what is near 0.
        for key in ("grad_norm", "kl", "entropy", "ess_fraction", "clip_fraction"):
            assert one[key] == pytest.approx(other[key], abs=10 * tolerance, rel=10 * tolerance), key


@pytest.mark.parametrize(
    ("changes", "loss"),
    [
        ({}, "gepo"),
        ({"batching": "packed", "gradient_checkpointing": True}, "grpo"),
        pytest.param({}, "eqp", marks=pytest.mark.nodes),
        ({"lora": LORA}, "gepo"),
    ],
    ids=["plain", "packed", "coupled", "lora"],
)
def test_steps_are_those_of_the_torch_backend(config, ranks, tmp_path, changes, loss):
    operations = [*STEPS, ["store", str(tmp_path / "weights.npy")]]
    expected = _torch(config("torch", loss=loss, **changes), operations)
    weights = _weights(tmp_path / "weights.npy")

    actual = ranks.ask(config(loss=loss, **changes), operations)

    _assert_close(actual[:-1], expected[:-1], tolerance=1e-6)
    assert np.abs(_weights(tmp_path / "weights.npy") - weights).max() <= 1e-6
    assert np.abs(weights).max() > 0.1


def test_published_bits_and_passes_over_them_are_those_of_the_torch_backend(config, ranks, tmp_path):
    """From the second step on passes see rounded masters; a checkpoint in between changes nothing."""
    path, saved = str(tmp_path / "published.npy"), str(tmp_path / "saved")
    torch_config = config("torch", published_dtype="bf16")
    expected = _torch(torch_config, [*STEPS[:2], ["store", path]])
    published = np.load(path)

    actual = ranks.ask(config(published_dtype="bf16"), [*STEPS[:2], ["store", path], ["save", saved]])

    _assert_close(actual[:2], expected[:2], tolerance=1e-5)
    # A master that differs by rounding may stand at the border of two values of bf16.
    assert np.mean(np.load(path) != published) <= 1e-3
    onwards = [["restore", saved], STEPS[2], ["store", path]]
    continued = _torch(torch_config, onwards)
    published = np.load(path)
    actual = ranks.ask(config(published_dtype="bf16"), onwards)
    _assert_close(actual[1:2], continued[1:2], tolerance=1e-5)
    assert np.mean(np.load(path) != published) <= 1e-3


@pytest.mark.parametrize("lora", [{}, pytest.param(LORA, marks=pytest.mark.nodes)], ids=["whole", "lora"])
def test_checkpoint_of_torch_comes_back_bit_for_bit_and_continues(config, ranks, tmp_path, lora):
    ours, theirs, path = str(tmp_path / "ours"), str(tmp_path / "theirs"), str(tmp_path / "weights.npy")
    expected = _torch(config("torch", lora=lora), [*STEPS[:2], ["save", theirs], STEPS[2], ["store", path]])
    weights = _weights(path)

    actual = ranks.ask(config(lora=lora), [["restore", theirs], ["save", ours], STEPS[2], ["store", path]])

    for name in ("weights.safetensors", "optimizer.safetensors"):
        mine, yours = load_file(f"{ours}/{name}"), load_file(f"{theirs}/{name}")
        assert mine.keys() == yours.keys()
        assert all(mine[key].equal(yours[key]) for key in mine)
    assert (tmp_path / "ours" / "state.json").read_text() == (tmp_path / "theirs" / "state.json").read_text()
    _assert_close(actual[2:3], expected[3:4], tolerance=1e-6)
    assert np.abs(_weights(path) - weights).max() <= 1e-6


def test_bf16_passes_stay_near_and_bad_steps_change_nothing(config, ranks, tmp_path):
    before, after, last = (str(tmp_path / name) for name in ("before.npy", "after.npy", "last.npy"))
    expected = _torch(config("torch"), [*STEPS, ["store", last]])
    weights = _weights(last)
    operations = [["store", before], ["train_bad", 9], ["store", after], *STEPS, ["store", last], ["load", before]]

    actual = ranks.ask(config(compute_dtype="bf16"), operations)

    assert actual[1] == {"is_applied": False}
    assert np.array_equal(np.load(before), np.load(after))
    # bf16 keeps 8 bits: log-probs differ by about 1 %, and AdamW's first steps have the size lr whatever they see.
    _assert_close(actual[3:-2], expected[:-1], tolerance=0.015)
    assert 0 < np.abs(_weights(last) - weights).max() <= 2 * 4 * 1e-3


@pytest.fixture(scope="module")
def model_of_two_chunks(tmp_path_factory):
    directory = tmp_path_factory.mktemp("two-chunks")
    write_model(directory, hidden_size=32, num_layers=1, vocab_size=CHUNK_ELEMENTS // 32 + 10)
    return directory


@pytest.mark.parametrize("band", [0.0, pytest.param(0.5, marks=pytest.mark.nodes)])
def test_versions_that_all_ranks_make_are_those_of_one_process_bit_for_bit(
    config, ranks, tmp_path, model_of_two_chunks, band
):
    ours = config(model_dir=model_of_two_chunks, published_dtype="bf16", dead_band_ulp=band)
    saved = str(tmp_path / "saved")
    operations = [
        ["publish", str(tmp_path / "0"), True], *STEPS[:1], ["publish", str(tmp_path / "1"), True], ["save", saved],
        ["restore", saved], ["divide", str(tmp_path / "1" / "together" / "v00000005.snapshot")],
    ]  # fmt: skip

    first, _, second, _, _, root = ranks.ask(ours, operations)

    assert first["is_equal"]
    assert second["is_equal"]
    assert (first["files"], second["files"]) == (["v00000005.snapshot"], ["v00000005.delta", "v00000005.snapshot"])
    assert second["num_chunks"] == 2
    assert second["num_changed"] > 0
    assert root == second["root"] != first["root"]
