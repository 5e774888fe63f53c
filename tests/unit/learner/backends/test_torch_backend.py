"""The torch backend as the learner uses it: steps, publication, checkpoints."""

import dataclasses
import json

import numpy as np
import pytest
import torch

from heterorl.common.errors import ConfigError, CorruptStore
from heterorl.common.weights.arena import Arena
from heterorl.learner.backends.optimizer_state import COUNTERS_FILE, OPTIMIZER_FILE, WEIGHTS_FILE
from heterorl.learner.backends.tensor_file import TensorFile
from heterorl.learner.backends.torch_backend import TorchBackend
from heterorl.learner.backends.train_backend import TrainBackend
from heterorl.learner.loss.loss_config import DecoupledPpoConfig, GepoConfig, LossConfig
from heterorl.learner.step_metrics import PassCount
from heterorl.learner.train.backend_config import TorchBackendConfig
from tests.support.training import SAMPLING, is_identical, queued, random_groups, tiny_model, weights

CONFIG = TorchBackendConfig(lr=1e-3, warmup_steps=4, micro_batch_tokens=64, weight_decay=0.01)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    tiny_model().save_pretrained(directory)
    return directory


def _backend(model_dir, *, config=CONFIG, loss=None) -> TrainBackend:
    return TorchBackend(model_dir=model_dir, config=config, loss=loss or GepoConfig(), sampling=SAMPLING)


def _train(backend, first, last):
    return [backend.train_step(random_groups(seed=step), head_version=step, step=step) for step in range(first, last)]


def _numbers(reports):
    return [dataclasses.replace(report, step_s=0.0) for report in reports]


def test_step_moves_weights_and_reports_finite_numbers(model_dir):
    backend = _backend(model_dir)
    before = weights(backend.torch_model)

    report = backend.train_step(random_groups(version=3), head_version=7, step=1)

    assert report.is_applied
    assert not is_identical(weights(backend.torch_model), before)
    assert (report.step, report.version, report.staleness_max, report.num_groups) == (1, 8, 4, 4)
    numbers = dataclasses.asdict(report)
    # When it was evaluated and where its time went, a backend does not know.
    assert numbers.pop("evaluation_accuracy") is numbers.pop("times") is None
    completions = numbers.pop("completions")
    assert numbers.pop("sources") == ()
    assert completions["sites"] == ({"site": "eu-1", "num_groups": 4, "num_tokens": report.num_tokens},)
    # No group is of the step's own version.
    assert numbers.pop("kl_token_fresh") is None
    assert np.isfinite(list(numbers.values())).all()
    assert report.kl > 0.0
    assert 0.0 < report.ess_fraction <= 1.0
    assert 0.0 < report.entropy < np.log(50)


def test_step_says_how_many_of_its_micro_batches_are_done(model_dir):
    noted = []

    class Noting(PassCount):
        def note(self, done, total):
            noted.append((done, total))

    backend = TorchBackend(model_dir=model_dir, config=CONFIG, loss=GepoConfig(), sampling=SAMPLING, passes=Noting())

    backend.train_step(random_groups(version=3), head_version=7, step=1)

    total = len(noted) - 1
    assert total > 1, "one micro-batch would show nothing"
    assert noted == [(done, total) for done in range(total + 1)]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_step_on_a_logprob_that_is_not_finite_changes_nothing(model_dir, bad):
    backend = _backend(model_dir)
    _train(backend, 0, 2)
    before, published = weights(backend.torch_model), Arena(backend.layout)
    backend.store(published)
    groups = random_groups(seed=9)
    groups[0].group.rollouts[0].sampler_logprobs[0] = bad

    report = backend.train_step(groups, head_version=2, step=3)

    after = Arena(backend.layout)
    backend.store(after)
    assert not report.is_applied
    assert is_identical(weights(backend.torch_model), before)
    assert after.digests() == published.digests()


def test_skipped_step_leaves_no_trace_in_later_ones(model_dir):
    clean, disturbed = _backend(model_dir), _backend(model_dir)
    bad = random_groups(seed=9)
    bad[0].group.rollouts[0].sampler_logprobs[0] = float("nan")

    _train(clean, 0, 3)
    _train(disturbed, 0, 2)
    disturbed.train_step(bad, head_version=2, step=2)
    _train(disturbed, 2, 3)

    assert is_identical(weights(clean.torch_model), weights(disturbed.torch_model))


@pytest.mark.parametrize("is_dropped", [False, True])
def test_step_on_equal_rewards_is_one_of_gradient_zero_unless_the_loss_drops_them(model_dir, is_dropped):
    """AdamW takes a gradient of 0 as any other: its momentum, and weight decay, move weights."""
    backend = _backend(model_dir, loss=GepoConfig(sampler_kl=0.0, drop_uniform_groups=is_dropped))
    _train(backend, 1, 2)
    before = weights(backend.torch_model)
    groups = []
    for entry in random_groups(seed=9):
        rollouts = tuple(dataclasses.replace(rollout, reward=0.5) for rollout in entry.group.rollouts)
        groups.append(dataclasses.replace(entry, group=dataclasses.replace(entry.group, rollouts=rollouts)))

    report = backend.train_step(groups, head_version=2, step=2)

    assert report.grad_norm == 0.0
    assert report.is_applied is not is_dropped
    assert (report.num_tokens == 0) is is_dropped
    assert is_identical(weights(backend.torch_model), before) is is_dropped


def test_step_on_no_groups_changes_nothing(model_dir):
    backend = _backend(model_dir)
    before = weights(backend.torch_model)

    report = backend.train_step([], head_version=0, step=1)

    assert not report.is_applied
    assert is_identical(weights(backend.torch_model), before)


def test_same_inputs_give_the_same_bits(model_dir):
    one, other = _backend(model_dir), _backend(model_dir)

    assert _numbers(_train(one, 0, 3)) == _numbers(_train(other, 0, 3))
    assert is_identical(weights(one.torch_model), weights(other.torch_model))


def test_run_restored_from_a_checkpoint_continues_bit_for_bit(model_dir, tmp_path):
    straight, stopped, resumed = _backend(model_dir), _backend(model_dir), _backend(model_dir)

    # The checkpoint is inside the warm-up, so a lost step count would show.
    expected = _train(straight, 0, 6)
    _train(stopped, 0, 2)
    stopped.freeze(tmp_path)()
    expected_draw = torch.rand(3)
    _train(resumed, 7, 9)
    resumed.restore(tmp_path)
    draw = torch.rand(3)
    actual = _train(resumed, 2, 6)

    assert _numbers(actual) == _numbers(expected[2:])
    assert is_identical(weights(straight.torch_model), weights(resumed.torch_model))
    assert torch.equal(draw, expected_draw)


def test_state_that_was_frozen_is_that_of_its_moment_though_steps_follow(model_dir, tmp_path):
    backend, resumed = _backend(model_dir), _backend(model_dir)
    _train(backend, 0, 2)
    write = backend.freeze(tmp_path)
    expected = _train(backend, 2, 4)
    write()

    resumed.restore(tmp_path)

    assert _numbers(_train(resumed, 2, 4)) == _numbers(expected)
    assert is_identical(weights(backend.torch_model), weights(resumed.torch_model))


def test_checkpoint_before_the_first_step_restores(model_dir, tmp_path):
    straight, resumed = _backend(model_dir), _backend(model_dir)
    straight.freeze(tmp_path)()
    _train(resumed, 0, 2)

    resumed.restore(tmp_path)
    _train(straight, 0, 2)
    _train(resumed, 0, 2)

    assert is_identical(weights(straight.torch_model), weights(resumed.torch_model))


def _truncate(path):
    path.write_bytes(path.read_bytes()[:-7])


def _lose_moment(path):
    from safetensors.torch import load_file, save_file

    tensors = load_file(path)
    del tensors[next(name for name in tensors if name.startswith("exp_avg/"))]
    save_file(tensors, path)


def _spoil_random_state(path):
    from safetensors.torch import load_file, save_file

    tensors = load_file(path)
    # Right in type and size; the generator's position, an integer at byte 8, is not one that it can have.
    tensors["random/cpu"][8:16] = 255
    save_file(tensors, path)


def _change_random_state(change):
    def damage(path):
        from safetensors.torch import load_file, save_file

        tensors = load_file(path)
        tensors["random/cpu"] = change(tensors["random/cpu"])
        save_file(tensors, path)

    return damage


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        (WEIGHTS_FILE, lambda path: path.unlink()),
        (WEIGHTS_FILE, _truncate),
        (OPTIMIZER_FILE, _truncate),
        (OPTIMIZER_FILE, _lose_moment),
        (OPTIMIZER_FILE, _spoil_random_state),
        (OPTIMIZER_FILE, _change_random_state(lambda state: torch.cat([state, state[:8]]))),
        (OPTIMIZER_FILE, _change_random_state(lambda state: state.to(torch.int16))),
        (COUNTERS_FILE, lambda path: path.write_text("{")),
        (COUNTERS_FILE, lambda path: path.write_text(json.dumps({"format": 99, "applied_steps": 1}))),
        (COUNTERS_FILE, lambda path: path.write_text(json.dumps({"format": 1, "applied_steps": -1}))),
    ],
)
def test_damaged_checkpoint_is_refused_and_changes_nothing(model_dir, tmp_path, name, damage):
    backend = _backend(model_dir)
    _train(backend, 0, 1)
    backend.freeze(tmp_path)()
    damage(tmp_path / name)
    _train(backend, 1, 2)
    before = weights(backend.torch_model)

    with pytest.raises(CorruptStore):
        backend.restore(tmp_path)

    assert is_identical(weights(backend.torch_model), before)


def test_checkpoint_that_goes_while_it_is_read_changes_nothing(model_dir, tmp_path, monkeypatch):
    backend = _backend(model_dir)
    _train(backend, 0, 1)
    backend.freeze(tmp_path)()
    _train(backend, 1, 2)
    before, flat = weights(backend.torch_model), TensorFile.flat

    def vanishing(self, name):
        found = flat(self, name)
        if not name.startswith("random/"):
            (tmp_path / OPTIMIZER_FILE).unlink(missing_ok=True)
        return found

    monkeypatch.setattr(TensorFile, "flat", vanishing)
    with pytest.raises(CorruptStore, match="cannot be read"):
        backend.restore(tmp_path)

    assert is_identical(weights(backend.torch_model), before)


def test_checkpoint_of_another_model_is_refused(model_dir, tmp_path):
    other_dir, saved = tmp_path / "other", tmp_path / "saved"
    saved.mkdir()
    tiny_model(is_tied=False).save_pretrained(other_dir)
    _backend(other_dir).freeze(saved)()

    with pytest.raises(CorruptStore, match="another model"):
        _backend(model_dir).restore(saved)


@pytest.mark.parametrize("dtype", ["bf16", pytest.param("fp16", marks=pytest.mark.slow), "fp32"])
def test_published_weights_load_into_another_learner_with_a_fresh_optimizer(model_dir, dtype):
    config = CONFIG.model_copy(update={"published_dtype": dtype})
    publisher, taker, fresh = (_backend(model_dir, config=config) for _ in range(3))
    _train(publisher, 0, 2)
    _train(taker, 5, 7)
    arena, copy = Arena(publisher.layout), Arena(publisher.layout)
    publisher.store(arena)

    taker.load_published(arena)
    fresh.load_published(arena)
    taker.store(copy)

    assert copy.digests() == arena.digests()
    assert _numbers(_train(taker, 0, 2)) == _numbers(_train(fresh, 0, 2))


def test_gradient_checkpointing_gives_the_same_weights(model_dir):
    plain = _backend(model_dir)
    saving = _backend(model_dir, config=CONFIG.model_copy(update={"gradient_checkpointing": True}))

    _train(plain, 0, 2)
    _train(saving, 0, 2)

    assert saving.torch_model.base_model.layers[0].gradient_checkpointing
    assert is_identical(weights(plain.torch_model), weights(saving.torch_model))


def test_dropout_of_the_model_is_off(tmp_path):
    model = tiny_model()
    model.config.attention_dropout = 0.5
    model.save_pretrained(tmp_path)
    # Checkpointing puts the model into training mode, where dropout would act.
    backend = _backend(tmp_path, config=CONFIG.model_copy(update={"gradient_checkpointing": True}))
    ids = torch.arange(12)[None]

    assert backend.torch_model.training
    assert torch.equal(backend.torch_model(ids).logits, backend.torch_model(ids).logits)


def test_warm_up_takes_smaller_steps_first(model_dir, tmp_path):
    def learner(**changes):
        return _backend(model_dir, config=CONFIG.model_copy(update=changes))

    warming = learner(lr=2e-3, warmup_steps=2)
    half, full = learner(lr=1e-3, warmup_steps=0), learner(lr=2e-3, warmup_steps=0)

    _train(warming, 0, 2)
    # The moments do not depend on the step size: half of it for the first step, all of it for the second.
    _train(half, 0, 1)
    half.freeze(tmp_path)()
    full.restore(tmp_path)
    _train(full, 1, 2)

    assert is_identical(weights(warming.torch_model), weights(full.torch_model))


def test_packed_and_padded_learners_agree(model_dir):
    padded = _backend(model_dir)
    packed = _backend(model_dir, config=CONFIG.model_copy(update={"batching": "packed"}))

    [one], [other] = _train(padded, 0, 1), _train(packed, 0, 1)

    # fp32: sums in another order
    assert other.loss == pytest.approx(one.loss, abs=1e-5)
    assert other.grad_norm == pytest.approx(one.grad_norm, rel=1e-4)


def test_bf16_products_train_fp32_masters(model_dir):
    backend = _backend(model_dir, config=CONFIG.model_copy(update={"compute_dtype": "bf16"}))
    exact = _backend(model_dir)

    [report], [reference] = _train(backend, 0, 1), _train(exact, 0, 1)

    assert report.is_applied
    assert {parameter.dtype for parameter in backend.torch_model.parameters()} == {torch.float32}
    assert report.entropy == pytest.approx(reference.entropy, rel=0.02)


def test_steps_on_one_rewarded_token_make_it_likelier(model_dir):
    from tests.support.training import group, rollout

    backend = _backend(model_dir, config=TorchBackendConfig(lr=3e-3), loss=GepoConfig(sampler_kl=0.0))
    prompt = torch.tensor([[1, 2, 3]])

    def logprobs():
        with torch.no_grad():
            return torch.log_softmax(backend.torch_model(prompt).logits[0, -1], -1)

    first = logprobs()
    for step in range(20):
        now = logprobs().tolist()
        members = [rollout([token], [now[token]], float(token == 7)) for token in (7, 8, 9, 10)]
        backend.train_step([queued(group(members))], head_version=step, step=step)

    assert logprobs()[7] > first[7] + 0.5


def test_missing_model_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="model_dir"):
        _backend(tmp_path / "nothing")


def test_step_leaves_its_rollouts_measurements_behind(model_dir):
    backend = _backend(model_dir)
    report = backend.train_step(random_groups(version=3), head_version=7, step=1)

    weights_B = backend.last_sequences.log_gepo_B.exp()
    assert float(weights_B.var(correction=0)) == pytest.approx(report.iw_variance, rel=1e-12)
    assert report.lr == CONFIG.lr / CONFIG.warmup_steps


def test_step_size_shrinks_with_the_effective_sample_size(model_dir):
    plain, scaled = _backend(model_dir), _backend(model_dir, loss=GepoConfig(step_size="ess"))
    groups = random_groups(seed=3)

    report = plain.train_step(groups, head_version=0, step=0)
    scaled_lr = scaled.train_step(groups, head_version=0, step=0).lr

    assert scaled_lr == pytest.approx(report.lr * np.sqrt(report.ess_fraction), rel=1e-12)
    assert report.ess_fraction < 0.99
    assert not is_identical(weights(plain.torch_model), weights(scaled.torch_model))


def test_step_counts_staleness_from_the_head_version(model_dir):
    loss = DecoupledPpoConfig(proximal="loglinear", eps_low=0.01, eps_high=0.01)
    fresh, stale = _backend(model_dir, loss=loss), _backend(model_dir, loss=loss)

    one = fresh.train_step(random_groups(version=7), head_version=7, step=1)
    other = stale.train_step(random_groups(version=3), head_version=7, step=1)

    assert one.loss != other.loss


def test_reproduction_choice_is_logged(model_dir, caplog):
    _backend(model_dir, loss=GepoConfig(normalisation="raw"))

    assert "loss.normalisation" in caplog.text


@pytest.mark.parametrize("kind", ["eqp", "m2po"])
def test_loss_that_plans_a_step_takes_one_on_no_groups_and_on_bad_numbers(model_dir, kind):
    from pydantic import TypeAdapter

    backend = _backend(model_dir, loss=TypeAdapter(LossConfig).validate_python({"kind": kind}))
    before = weights(backend.torch_model)
    bad = random_groups(seed=9)
    bad[0].group.rollouts[0].sampler_logprobs[0] = float("nan")

    assert not backend.train_step([], head_version=0, step=1).is_applied
    assert not backend.train_step(bad, head_version=0, step=1).is_applied
    assert is_identical(weights(backend.torch_model), before)
