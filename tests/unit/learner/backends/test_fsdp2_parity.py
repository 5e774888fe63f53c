"""FSDP2 trains what the torch backend trains, at any number of ranks, and continues its checkpoints.

The ranks of one fixture serve all tests, because importing torch costs more than any of them.
"""

import numpy as np
import pytest
from safetensors.torch import load_file

from benchmarks.load_memory import write_model
from heterorl.common.weights.arena import CHUNK_ELEMENTS
from heterorl.learner.backends.torch_backend import TorchBackend
from heterorl.learner.learner_config import LearnerConfig
from tests.support.families import write_family
from tests.support.rank_jobs import run_job
from tests.support.rank_processes import Ranks
from tests.support.training import tiny_model

pytestmark = [pytest.mark.timeout(300), pytest.mark.process]
NEAR_REFERENCE = {
    "kind": "custom",
    "function": "tests.support.custom_losses:near_the_reference",
    "reads_reference": True,
}
STEPS = [["train", 0], ["train", 1], ["train_turns", 2], ["train", 3]]
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
    def build(kind="fsdp2", *, loss="gepo", model_dir=model_dir, lora=None, router_replay="none", **backend):
        return LearnerConfig.model_validate(
            {
                "model_dir": str(model_dir),
                "sampling": {"max_new_tokens": 16, "router_replay": router_replay},
                "loss": loss if isinstance(loss, dict) else {"kind": loss},
                "lora": lora or {},
                "backend": {
                    "kind": kind, "lr": 1e-3, "warmup_steps": 2, "lr_schedule": "cosine", "lr_decay_steps": 8,
                    "micro_batch_tokens": 64, "weight_decay": 0.01,
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
        replays_routing=config.sampling.router_replay == "rollout",
    )
    return run_job(backend, operations)


def _timeless(reports):
    return [{key: value for key, value in report.items() if key != "step_s"} for report in reports]


def _weights(path):
    return np.load(path).view(np.float32)


def _assert_close(actual, expected, *, tolerance):
    for one, other in zip(actual, expected, strict=True):
        assert one["is_applied"] == other["is_applied"]
        assert one["loss"] == pytest.approx(other["loss"], abs=tolerance)
        assert one["lr"] == pytest.approx(other["lr"], rel=1e-12)
        # Ten times wider: functions of weights that have gone apart by rounding, AdamW enlarging what is near 0.
        assert {key for key in one if key.startswith("metric_")} == {key for key in other if key.startswith("metric_")}
        metrics = [key for key in one if key.startswith("metric_")]
        for key in ("grad_norm", "kl", "entropy", "ess_fraction", "clip_fraction", *metrics):
            assert one[key] == pytest.approx(other[key], abs=10 * tolerance, rel=10 * tolerance), key


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "loss"),
    [
        ({}, "gepo"),
        ({"batching": "packed", "gradient_checkpointing": True, "attn_implementation": "eager"}, "grpo"),
        pytest.param({}, "eqp", marks=pytest.mark.nodes),
        # Version 0 as the reference, by a penalty and by what couples the rollouts of a group.
        ({"lora": LORA}, {"kind": "grpo", "reference_kl": 0.5}),
        # Each rank imports the function, which sees the whole step on all of them.
        ({}, {"kind": "custom", "function": "tests.support.custom_losses:normalised"}),
        pytest.param({}, NEAR_REFERENCE, marks=pytest.mark.nodes),
    ],
    ids=["plain", "packed", "coupled", "lora-reference", "custom", "reference"],
)
def test_steps_are_those_of_the_torch_backend(config, ranks, tmp_path, changes, loss):
    # Sums over the tokens of a rollout round more than means.
    tolerance = 1e-5 if loss == NEAR_REFERENCE else 1e-6
    operations = [*STEPS, ["store", str(tmp_path / "weights.npy")]]
    expected = _torch(config("torch", loss=loss, **changes), operations)
    weights = _weights(tmp_path / "weights.npy")

    actual = ranks.ask(config(loss=loss, **changes), operations)

    _assert_close(actual[:-1], expected[:-1], tolerance=tolerance)
    differences = np.abs(_weights(tmp_path / "weights.npy") - weights)
    # A gradient that is 0 but for rounding AdamW makes a step of; where there is one, the processor decides.
    assert np.quantile(differences, 0.999) <= tolerance
    assert differences.max() <= 10 * tolerance
    assert np.abs(weights).max() > 0.1


@pytest.mark.slow
def test_base_under_adapters_and_its_reference_are_rounded_as_by_the_torch_backend(config, ranks):
    loss = {"kind": "grpo", "reference_kl": 0.5}
    changes = {"lora": LORA, "published_dtype": "bf16", "forward_weights": "masters"}

    actual = ranks.ask(config(loss=loss, **changes), STEPS)

    _assert_close(actual, _torch(config("torch", loss=loss, **changes), STEPS), tolerance=1e-6)


def test_step_that_failed_in_a_pass_is_followed_by_no_other(config, tmp_path):
    """No undo clears what the engine holds; with more ranks, the others have ended."""
    loss = {"kind": "custom", "function": "tests.support.custom_losses:raising_on_age", "options": {"age": 7}}
    saved, weights = str(tmp_path / "saved"), str(tmp_path / "weights.npy")
    attempts = [["restore", saved], ["load", weights], ["train", 1]]
    ranks = Ranks(1)

    _, _, *answers = ranks.ask(config(loss=loss), [["save", saved], ["store", weights], ["train_failing"], *attempts])

    assert [answer["error"] for answer in answers] == ["ConfigError"] * 4
    assert all("no such rollout" in answer["message"] for answer in answers)
    assert ranks.close() == 0


@pytest.mark.slow
def test_mixture_of_experts_is_divided_by_experts(config, ranks, tmp_path):
    """Three fused experts, so that ranks have unequal parts of them."""
    model_dir = tmp_path / "experts"
    tiny_model(family="Qwen3Moe", num_experts=3, num_experts_per_tok=2, moe_intermediate_size=16).save_pretrained(
        model_dir
    )
    operations = [*STEPS[:2], ["store", str(tmp_path / "weights.npy")]]
    expected = _torch(config("torch", model_dir=model_dir), operations)
    weights = _weights(tmp_path / "weights.npy")

    actual = ranks.ask(config(model_dir=model_dir), operations)

    _assert_close(actual[:-1], expected[:-1], tolerance=1e-6)
    assert np.abs(_weights(tmp_path / "weights.npy") - weights).max() <= 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"batching": "packed", "gradient_checkpointing": True}])
def test_experts_of_a_record_are_taken_on_all_ranks(config, ranks, tmp_path, changes):
    model_dir = tmp_path / "experts"
    tiny_model(
        family="Qwen3Moe", num_experts=5, num_experts_per_tok=2, moe_intermediate_size=16, norm_topk_prob=True
    ).save_pretrained(model_dir)
    replayed = {"model_dir": model_dir, "router_replay": "rollout", **changes}
    operations = [["train_routed", seed, 5, 2, 2] for seed in (0, 1)]
    expected = _torch(config("torch", **replayed), operations)
    unlike = _torch(config("torch", model_dir=model_dir, **changes), operations)

    actual = ranks.ask(config(**replayed), operations)

    _assert_close(actual, expected, tolerance=1e-6)
    assert abs(expected[0]["kl"] - unlike[0]["kl"]) > 0.01


@pytest.mark.slow
def test_optimizer_in_host_memory_takes_the_same_steps_bit_for_bit(config, ranks, tmp_path):
    path, saved = str(tmp_path / "weights.npy"), str(tmp_path / "saved")
    operations = [STEPS[0], ["save", saved], STEPS[1], ["store", path]]
    expected = ranks.ask(config(), operations)
    weights = np.load(path)

    actual = ranks.ask(config(offload_optimizer=True), [["restore", saved], STEPS[1], ["store", path]])

    assert np.array_equal(np.load(path), weights)
    for key in ("loss", "grad_norm", "entropy", "kl"):
        assert actual[1][key] == expected[2][key], key
    assert actual[2] == expected[3]


SLICED = [
    ({}, "gepo", {}),
    ({"batching": "packed", "gradient_checkpointing": True}, "gspo", {}),
    pytest.param({}, "grpo", {}, marks=pytest.mark.nodes),
    pytest.param({"batching": "packed"}, "gepo", {}, marks=pytest.mark.nodes),
    pytest.param({"batching": "packed"}, "grpo", LORA, marks=pytest.mark.nodes),
    pytest.param({}, "gspo", {}, marks=pytest.mark.nodes),
    pytest.param({"batching": "packed"}, "eqp", {}, marks=pytest.mark.nodes),
    # The two ranks of a group take the reference's passes in turn.
    ({"micro_batch_tokens": 24}, {"kind": "grpo", "reference_kl": 0.5}, {}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("changes", "loss", "lora"), SLICED)
def test_steps_of_ranks_that_share_sequences_are_those_of_the_torch_backend(
    config, ranks, tmp_path, changes, loss, lora
):
    """Odd lengths, so that slices are padded; at 4 ranks two groups of two have passes of their own."""
    if ranks.num_ranks == 1:
        pytest.skip("slices need two ranks")
    operations = [*STEPS, ["store", str(tmp_path / "weights.npy")]]
    expected = _torch(config("torch", loss=loss, lora=lora, **changes), operations)
    weights = _weights(tmp_path / "weights.npy")

    actual = ranks.ask(config(loss=loss, lora=lora, sequence_parallel=2, **changes), operations)

    _assert_close(actual[:-1], expected[:-1], tolerance=1e-6)
    differences = np.abs(_weights(tmp_path / "weights.npy") - weights)
    # A gradient that is 0 but for rounding AdamW makes a step of.
    assert np.quantile(differences, 0.999) <= 1e-6
    assert differences.max() <= 1e-5


@pytest.mark.slow
def test_heads_of_keys_are_copied_and_what_cannot_be_sliced_is_refused(config, ranks, tmp_path):
    """All ranks are one group: 4 share 2 heads of keys, and 2 those of a model that has one."""
    if ranks.num_ranks == 1:
        pytest.skip("slices need two ranks")
    directory = tmp_path / "one"
    tiny_model(num_key_value_heads=ranks.num_ranks // 2).save_pretrained(directory)
    expected = _torch(config("torch", model_dir=directory), STEPS[:2])

    actual = ranks.ask(config(model_dir=directory, sequence_parallel=ranks.num_ranks), STEPS[:2])

    _assert_close(actual, expected, tolerance=1e-6)
    # Twice as many as there are: of 2 ranks by their number, of 4 by the heads.
    for size, problem in ((3, "4 attention heads"), (2 * ranks.num_ranks, "cannot be divided")):
        (answer,) = ranks.ask(config(sequence_parallel=size), STEPS[:1])
        assert answer["error"] == "ConfigError"
        assert "backend.sequence_parallel" in answer["message"]
        assert problem in answer["message"]


@pytest.mark.slow
@pytest.mark.parametrize("compute_dtype", ["fp32", "bf16"])
def test_model_that_mixes_positions_outside_of_attention_is_refused(config, ranks, tmp_path, compute_dtype):
    if ranks.num_ranks == 1:
        pytest.skip("slices need two ranks")
    tiny_model(family="Lfm2", layer_types=["conv", "full_attention"]).save_pretrained(tmp_path / "conv")

    changes = {"sequence_parallel": 2, "compute_dtype": compute_dtype}
    (answer,) = ranks.ask(config(model_dir=tmp_path / "conv", **changes), STEPS[:1])

    assert answer["error"] == "ConfigError"
    assert "backend.sequence_parallel" in answer["message"]
    assert "over slices differ" in answer["message"]


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


@pytest.mark.parametrize(
    "family", ["gemma4", *(pytest.param(name, marks=pytest.mark.slow) for name in ("hrm", "glm4-moe"))]
)
def test_what_is_published_and_not_trained_is_that_of_the_torch_backend(config, ranks, tmp_path, family):
    """A buffer, a parameter that the model's own code freezes, and a router's correction that stays fp32.

    Rounded for the passes, written, and taken from a published version, by the model too.
    """
    own, other = (write_family(family, tmp_path / str(seed), seed=seed) for seed in (5, 6))
    paths = [str(tmp_path / f"{number}.npy") for number in range(4)]
    foreign, operations = (
        [["store", paths[3]]],
        [["store", paths[0]], STEPS[0], ["load", paths[3]], ["store", paths[1]]],
    )
    operations += [STEPS[1], ["store", paths[2]]]
    _torch(config("torch", model_dir=other, published_dtype="bf16"), foreign)
    expected = _torch(config("torch", model_dir=own, published_dtype="bf16"), operations)
    published = np.load(paths[2])

    actual = ranks.ask(config(model_dir=own, published_dtype="bf16"), operations)

    # Of version 0, and of the weights that were loaded: bit for bit.
    assert [actual[0], actual[3]] == [expected[0], expected[3]]
    assert actual[0] != actual[3]
    _assert_close([actual[1], actual[4]], [expected[1], expected[4]], tolerance=1e-5)
    assert np.mean(np.load(paths[2]) != published) <= 5e-3


@pytest.mark.slow
def test_weights_that_a_model_keeps_in_fp32_are_not_gathered_as_bf16(config, ranks, tmp_path):
    own = write_family("ernie4.5-moe", tmp_path)

    [refused], [trained] = (
        ranks.ask(config(model_dir=own, compute_dtype=name), STEPS[:1]) for name in ("bf16", "fp32")
    )

    assert refused["message"].startswith("backend.compute_dtype: bf16 would round model.layers.0.mlp.gate.weight")
    assert trained["is_applied"]


@pytest.mark.slow
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


@pytest.mark.slow
def test_parameter_without_a_gradient_is_kept_by_checkpoints(config, ranks, tmp_path):
    """Phi's head has a bias, which log-probs are computed without."""
    tiny_model(family="Phi").save_pretrained(tmp_path / "model")
    wanted = config(model_dir=tmp_path / "model")
    operations = [["train", 0], ["save", str(tmp_path / "kept")], ["store"], ["train", 1], ["store"]]

    found = ranks.ask(wanted, operations)
    again = ranks.ask(wanted, [["restore", str(tmp_path / "kept")], ["store"], ["train", 1], ["store"]])

    assert [found[place] for place in (2, 4)] == [again[place] for place in (1, 3)]
    moments = load_file(tmp_path / "kept" / "optimizer.safetensors")
    assert not moments["exp_avg/lm_head.bias"].any()
    torch_operations = [["restore", str(tmp_path / "kept")], ["store"]]
    assert _torch(config("torch", model_dir=tmp_path / "model"), torch_operations)[1] == again[1]


@pytest.mark.slow
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


@pytest.mark.slow
def test_reference_that_is_not_there_is_refused_by_its_own_key_on_all_ranks(config, ranks, tmp_path):
    missing = config(loss={"kind": "grpo", "reference_kl": 0.5}, reference_model_dir=str(tmp_path / "none"))

    [answer] = ranks.ask(missing, STEPS)

    assert answer["error"] == "ConfigError"
    assert answer["message"].startswith("backend.reference_model_dir: ")
    # And all of them are ready for what comes next.
    assert ranks.ask(config(), STEPS[:1])[0]["is_applied"]


@pytest.fixture(scope="module")
def model_of_two_chunks(tmp_path_factory):
    directory = tmp_path_factory.mktemp("two-chunks")
    write_model(directory, hidden_size=32, num_layers=1, vocab_size=CHUNK_ELEMENTS // 32 + 10)
    return directory


@pytest.mark.slow
def test_versions_that_all_ranks_make_are_those_of_one_process_bit_for_bit(
    config, ranks, tmp_path, model_of_two_chunks
):
    ours = config(model_dir=model_of_two_chunks, published_dtype="bf16")
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


@pytest.mark.slow
def test_checkpoint_beside_a_step_has_the_bytes_of_one_between_two_steps(config, ranks, tmp_path):
    between, beside, path = (str(tmp_path / name) for name in ("between", "beside", "weights.npy"))
    expected = ranks.ask(config(), [STEPS[0], ["save", between], STEPS[1], ["store", path]])
    weights = np.load(path)

    actual = ranks.ask(config(), [STEPS[0], ["freeze", beside, 1], ["store", path]])

    assert _timeless(actual[:2]) == _timeless([expected[0], expected[2]])
    assert np.array_equal(np.load(path), weights)
    for name in ("weights.safetensors", "optimizer.safetensors", "state.json"):
        assert (tmp_path / "beside" / name).read_bytes() == (tmp_path / "between" / name).read_bytes()
    # At once, where that is asked for.
    inline = [["restore", beside], ["freeze", between + "-again", 1], ["store", path]]
    assert _timeless(ranks.ask(config(overlap_checkpoint=False), inline)[1:2]) == _timeless(expected[2:3])
    assert np.array_equal(np.load(path), weights)
