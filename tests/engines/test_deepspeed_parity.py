"""ZeRO at every stage and with one and two ranks trains what the torch backend trains, and continues its checkpoints.

The ranks of one fixture serve all tests, because importing torch and DeepSpeed costs more than any of them.
"""

from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

from heterorl.learner.backends.torch_backend import TorchBackend
from heterorl.learner.learner_config import LearnerConfig
from tests.support.families import write_family
from tests.support.rank_jobs import run_job
from tests.support.rank_processes import Ranks
from tests.support.training import tiny_model

pytestmark = pytest.mark.timeout(600)
STEPS = [["train", 0], ["train", 1], ["train_turns", 2], ["train", 3]]
STAGES = [0, 1, 2, 3]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    tiny_model().save_pretrained(directory)
    return directory


def _ranks(num_ranks):
    ranks = Ranks(num_ranks)
    yield ranks
    assert ranks.close() == 0


@pytest.fixture(scope="module")
def one_rank():
    yield from _ranks(1)


@pytest.fixture(scope="module")
def two_ranks():
    yield from _ranks(2)


@pytest.fixture(scope="module", params=[1, 2], ids=["1-rank", "2-ranks"])
def ranks(request):
    return request.getfixturevalue("one_rank" if request.param == 1 else "two_ranks")


@pytest.fixture
def config(model_dir):
    def build(kind="deepspeed", *, loss="gepo", model_dir=model_dir, **backend):
        return LearnerConfig.model_validate(
            {
                "model_dir": str(model_dir),
                "sampling": {"max_new_tokens": 16},
                "loss": {"kind": loss},
                "backend": {
                    "kind": kind, "lr": 1e-3, "warmup_steps": 4, "micro_batch_tokens": 64, "weight_decay": 0.01,
                    "published_dtype": "fp32", "threads": 1, **backend,
                },
            }
        )  # fmt: skip

    return build


def _torch(config, operations):
    sampling = config.sampling.semantics()
    return run_job(
        TorchBackend(model_dir=config.model_dir, config=config.backend, loss=config.loss, sampling=sampling), operations
    )


def _bits(path):
    return np.load(path)


def _weights(path):
    return np.load(path).view(np.float32)


def _numbers(reports):
    return [{key: value for key, value in report.items() if key != "step_s"} for report in reports]


def _assert_close(actual, expected, *, tolerance):
    for one, other in zip(actual, expected, strict=True):
        assert one["is_applied"] == other["is_applied"]
        assert one["loss"] == pytest.approx(other["loss"], abs=tolerance)
        assert one["lr"] == pytest.approx(other["lr"], rel=1e-12)
        # Ten times wider: functions of weights that have gone apart by rounding, AdamW enlarging what is near 0.
        for key in ("grad_norm", "kl", "entropy", "ess_fraction", "clip_fraction"):
            assert one[key] == pytest.approx(other[key], abs=10 * tolerance, rel=10 * tolerance), key


@pytest.mark.parametrize("loss", ["gepo", "grpo"])
def test_every_stage_takes_the_torch_backends_steps(config, ranks, tmp_path, loss):
    operations = [*STEPS, ["store", str(tmp_path / "weights.npy")]]
    expected = _torch(config("torch", loss=loss), operations)
    weights = _weights(tmp_path / "weights.npy")

    for stage in STAGES:
        actual = ranks.ask(config(stage=stage, loss=loss), operations)

        _assert_close(actual[:-1], expected[:-1], tolerance=1e-6)
        assert np.abs(_weights(tmp_path / "weights.npy") - weights).max() <= 1e-6
    assert np.abs(weights).max() > 0.1


@pytest.mark.parametrize("family", ["gemma4", "hrm", "glm4-moe"])
def test_what_is_published_and_not_trained_is_that_of_the_torch_backend(config, two_ranks, tmp_path, family):
    """A buffer, a parameter that the model's own code freezes, and a router's correction that stays fp32."""
    own, other = (str(write_family(family, tmp_path / str(seed), seed=seed)) for seed in (5, 6))
    first, foreign = str(tmp_path / "first.npy"), str(tmp_path / "foreign.npy")
    operations = [["store", first], STEPS[0], ["load", foreign], ["store", first], STEPS[1]]
    _torch(config("torch", model_dir=other, published_dtype="bf16"), [["store", foreign]])
    expected = _torch(config("torch", model_dir=own, published_dtype="bf16"), operations)

    for stage in STAGES:
        actual = two_ranks.ask(config(model_dir=own, published_dtype="bf16", stage=stage), operations)

        assert [actual[0], actual[3]] == [expected[0], expected[3]]
        _assert_close([actual[1], actual[4]], [expected[1], expected[4]], tolerance=1e-5)


def test_weights_that_a_model_keeps_in_fp32_are_not_held_in_bf16(config, one_rank, tmp_path):
    model_dir = str(write_family("ernie4.5-moe", tmp_path))

    for stage in STAGES:
        [answer] = one_rank.ask(config(model_dir=model_dir, stage=stage, compute_dtype="bf16"), STEPS[:1])

        # In stage 0 the weights are the masters.
        assert answer.get("is_applied", False) is (stage == 0)
        assert (
            stage == 0 or "backend.compute_dtype: bf16 would round model.layers.0.mlp.gate.weight" in answer["message"]
        )


def test_mixture_of_experts_takes_the_torch_backends_step(config, two_ranks, tmp_path):
    model_dir = tmp_path / "experts"
    tiny_model(family="Qwen3Moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16).save_pretrained(
        model_dir
    )
    operations = [STEPS[0], ["store", str(tmp_path / "weights.npy")]]
    first = config("torch", model_dir=str(model_dir))
    expected = _torch(first, operations)
    weights = _weights(tmp_path / "weights.npy")

    actual = two_ranks.ask(config(stage=2, model_dir=str(model_dir)), operations)

    _assert_close(actual[:-1], expected[:-1], tolerance=1e-6)
    assert np.abs(_weights(tmp_path / "weights.npy") - weights).max() <= 1e-6


@pytest.mark.parametrize("loss", ["eqp", "m2po"])
def test_losses_that_couple_groups_are_those_of_the_whole_step(config, two_ranks, tmp_path, loss):
    operations = [*STEPS[:2], ["store", str(tmp_path / "weights.npy")]]
    expected = _torch(config("torch", loss=loss), operations)
    weights = _weights(tmp_path / "weights.npy")

    actual = two_ranks.ask(config(stage=3, loss=loss), operations)

    _assert_close(actual[:-1], expected[:-1], tolerance=1e-6)
    assert np.abs(_weights(tmp_path / "weights.npy") - weights).max() <= 1e-6


@pytest.mark.parametrize(
    "changes", [{"gradient_checkpointing": True}, {"offload_optimizer": True}, {"batching": "packed"}]
)
def test_options_that_save_memory_change_no_step(config, two_ranks, tmp_path, changes):
    operations = [*STEPS[:2], ["store", str(tmp_path / "weights.npy")]]
    expected = _torch(config("torch"), operations)
    weights = _weights(tmp_path / "weights.npy")

    for stage in (2, 3):
        actual = two_ranks.ask(config(stage=stage, **changes), operations)

        _assert_close(actual[:-1], expected[:-1], tolerance=2e-6)
        assert np.abs(_weights(tmp_path / "weights.npy") - weights).max() <= 2e-6


def test_bf16_products_stay_near_and_masters_start_exact(config, two_ranks, tmp_path):
    first, last = str(tmp_path / "first.npy"), str(tmp_path / "last.npy")
    operations = [["store", first], *STEPS, ["store", last]]
    expected = _torch(config("torch"), operations)
    start, weights = _bits(first), _weights(last)

    for stage in STAGES:
        actual = two_ranks.ask(config(stage=stage, compute_dtype="bf16"), operations)

        assert np.array_equal(_bits(first), start)
        # bf16 keeps 8 bits: log-probs differ by about 1 %, and AdamW's first steps have the size lr whatever they see.
        _assert_close(actual[1:-1], expected[1:-1], tolerance=0.015)
        assert 0 < np.abs(_weights(last) - weights).max() <= 2 * 4 * 1e-3


def test_passes_see_what_is_published_also_after_a_restart_and_masters_stay_exact(config, two_ranks, tmp_path):
    """Step 0 begins with the same bits everywhere, and so do those after `restore` and `load`."""
    saved, arena = str(tmp_path / "saved"), str(tmp_path / "published.npy")
    _torch(config("torch", published_dtype="bf16"), [*STEPS, ["save", saved], ["store", arena]])

    def operations(name):
        masters = str(tmp_path / name)
        return [STEPS[0], ["restore", saved], STEPS[1], ["save", masters], ["load", arena], STEPS[2]]

    expected, other = (
        [
            answer
            for answer in _torch(config("torch", published_dtype="bf16", forward_weights=name), operations(name))
            if answer
        ]
        for name in ("published", "masters")
    )
    moved = load_file(tmp_path / "published" / "weights.safetensors")
    for number in (0, 1):
        assert abs(expected[number]["kl"] - other[number]["kl"]) > 1e-4
    # Here the masters are the published weights.
    assert expected[2]["kl"] == other[2]["kl"]

    for stage in STAGES:
        answers = two_ranks.ask(config(stage=stage, published_dtype="bf16"), operations(f"zero-{stage}"))

        _assert_close([answer for answer in answers if answer], expected, tolerance=1e-6)
        found = load_file(tmp_path / f"zero-{stage}" / "weights.safetensors")
        assert max(float((found[name] - moved[name]).abs().max()) for name in moved) <= 1e-6


@pytest.mark.parametrize("stage", STAGES)
def test_step_that_is_not_finite_changes_nothing(config, two_ranks, tmp_path, stage):
    paths = [str(tmp_path / f"{number}.npy") for number in range(4)]
    operations = [
        ["train", 0], ["store", paths[0]], ["train_bad", 1], ["explode", 2], ["train", 1, 0], ["store", paths[1]],
        ["train", 3], ["store", paths[2]],
    ]  # fmt: skip
    clean = [["train", 0], ["train", 3], ["store", paths[3]]]

    answers = two_ranks.ask(config(stage=stage), operations)
    two_ranks.ask(config(stage=stage), clean)

    assert [answer["is_applied"] for answer in (answers[0], *answers[2:5], answers[6])] == [
        True, False, False, False, True,
    ]  # fmt: skip
    assert np.isfinite(answers[3]["loss"])
    assert np.array_equal(_bits(paths[0]), _bits(paths[1]))
    assert np.array_equal(_bits(paths[2]), _bits(paths[3]))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_checkpoint_continues_at_the_same_and_at_another_number_of_ranks(
    config, one_rank, two_ranks, tmp_path, stage, dtype
):
    """2 -> 1 -> 2 ranks, and 2 ranks without a stop beside it."""
    own = config(stage=stage, compute_dtype=dtype)
    straight, again, first, second, last = (str(tmp_path / f"{name}.npy") for name in range(5))
    saved, moved = str(tmp_path / "saved"), str(tmp_path / "moved")

    reports = two_ranks.ask(own, [*STEPS[:2], ["save", saved], ["store", first], *STEPS[2:], ["store", straight]])
    same = two_ranks.ask(own, [["train", 9], ["restore", saved], *STEPS[2:], ["store", again]])
    one_rank.ask(own, [["restore", saved], ["store", second], STEPS[2], ["save", moved]])
    back = two_ranks.ask(own, [["restore", moved], STEPS[3], ["store", last]])

    # At the same number of ranks: bit for bit.
    assert np.array_equal(_bits(again), _bits(straight))
    assert _numbers(same[2:4]) == _numbers(reports[4:6])
    # At another: the same weights, then steps that differ by the order of sums.
    assert np.array_equal(_bits(second), _bits(first))
    tolerance = 1e-6 if dtype == "fp32" else 2e-3
    assert np.abs(_weights(last) - _weights(straight)).max() <= tolerance
    _assert_close(back[1:2], reports[5:6], tolerance=1e-6 if dtype == "fp32" else 0.01)


def test_checkpoints_go_to_the_torch_backend_and_back(config, two_ranks, tmp_path):
    straight, last = str(tmp_path / "straight.npy"), str(tmp_path / "last.npy")
    _torch(config("torch"), [*STEPS, ["store", straight]])

    two_ranks.ask(config(stage=3), [STEPS[0], ["save", str(tmp_path / "a")]])
    _torch(config("torch"), [["restore", str(tmp_path / "a")], STEPS[1], ["save", str(tmp_path / "b")]])
    two_ranks.ask(config(stage=1), [["restore", str(tmp_path / "b")], *STEPS[2:], ["store", last]])

    assert np.abs(_weights(last) - _weights(straight)).max() <= 1e-6


@pytest.mark.parametrize("stage", STAGES)
def test_published_weights_start_the_optimizer_anew(config, two_ranks, tmp_path, stage):
    published, one, other = (str(tmp_path / f"{name}.npy") for name in range(3))
    own = config(stage=stage, published_dtype="bf16")

    two_ranks.ask(own, [STEPS[0], ["store", published]])
    fresh = two_ranks.ask(own, [["load", published], *STEPS[1:3], ["store", one]])
    used = two_ranks.ask(own, [*STEPS[2:], ["load", published], *STEPS[1:3], ["store", other]])

    assert _numbers(fresh[1:3]) == _numbers(used[3:5])
    assert np.array_equal(_bits(one), _bits(other))


def test_checkpoint_before_the_first_step_is_a_start(config, two_ranks, tmp_path):
    own, saved, path = config(stage=2), str(tmp_path / "saved"), str(tmp_path / "weights.npy")

    expected = two_ranks.ask(own, [["save", saved], STEPS[0]])
    actual = two_ranks.ask(own, [*STEPS[1:], ["restore", saved], STEPS[0], ["store", path]])

    assert _numbers(actual[4:5]) == _numbers(expected[1:2])


def test_damaged_checkpoint_is_refused_on_all_ranks_and_changes_nothing(config, two_ranks, tmp_path):
    saved, before, after = tmp_path / "saved", str(tmp_path / "before.npy"), str(tmp_path / "after.npy")
    two_ranks.ask(config(stage=3), [STEPS[0], ["save", str(saved)]])
    optimizer = Path(saved) / "optimizer.safetensors"
    optimizer.write_bytes(optimizer.read_bytes()[:-7])

    answers = two_ranks.ask(
        config(stage=3), [STEPS[1], ["store", before], ["restore", str(saved)], ["store", after], STEPS[2]]
    )

    assert answers[2]["error"] == "CorruptStore"
    assert np.array_equal(_bits(before), _bits(after))
    assert answers[4]["is_applied"]


def test_loss_that_depends_on_the_split_is_refused(config, two_ranks):
    own = config(stage=1)
    own = own.model_copy(update={"loss": own.loss.model_copy(update={"scope": "microbatch"})})

    [answer] = two_ranks.ask(own, [])

    assert answer["error"] == "ConfigError"
    assert "loss.scope" in answer["message"]
