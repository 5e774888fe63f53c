"""A frozen model beside the learner: version 0 unless another is named; never trained, and what is far away pulls."""

import dataclasses

import pytest
import torch

from heterorl.common.errors import ConfigError
from heterorl.common.model.contract import ALL_WEIGHTS, LoraConfig
from heterorl.learner.backends.torch_backend import TorchBackend
from heterorl.learner.loss.loss_config import CustomLossConfig, GrpoConfig
from heterorl.learner.train.backend_config import TorchBackendConfig
from tests.support.training import SAMPLING, is_identical, queued, random_groups, tiny_model, weights

SETTINGS = {"lr": 1e-3, "micro_batch_tokens": 64}
NEAR_REFERENCE = CustomLossConfig(function="tests.support.custom_losses:near_the_reference", reads_reference=True)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    tiny_model().save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def other_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("other")
    tiny_model(seed=5).save_pretrained(directory)
    return directory


def _backend(model_dir, loss, *, lora=ALL_WEIGHTS, **settings):
    config = TorchBackendConfig(**(SETTINGS | settings))
    return TorchBackend(model_dir=model_dir, config=config, loss=loss, sampling=SAMPLING, lora=lora)


def _equal(group):
    return dataclasses.replace(group, rollouts=tuple(dataclasses.replace(one, reward=0.5) for one in group.rollouts))


def _train(backend, steps):
    for step in range(steps):
        assert backend.train_step(random_groups(seed=step), head_version=step, step=step).is_applied
    return weights(backend.torch_model)


@pytest.mark.parametrize(
    "settings", [{"forward_weights": "published"}, {"forward_weights": "masters"}, {"attn_implementation": "eager"}]
)
def test_version_0_is_no_distance_away_at_the_first_step_and_pulls_at_later_ones(model_dir, settings):
    free, held = (_backend(model_dir, GrpoConfig(reference_kl=weight), **settings) for weight in (0.0, 30.0))
    start = weights(free.torch_model)

    assert is_identical(_train(free, 1), _train(held, 1))

    def moved(backend):
        return sum(float((value - start[name]).square().sum()) for name, value in _train(backend, 6).items())

    assert moved(held) < 0.9 * moved(free)


def test_named_model_pulls_from_the_first_step(model_dir, other_dir):
    free = _backend(model_dir, GrpoConfig())
    held = _backend(model_dir, GrpoConfig(reference_kl=1.0), reference_model_dir=str(other_dir))

    assert not is_identical(_train(free, 1), _train(held, 1))


@pytest.mark.slow
def test_a_loss_of_the_users_own_reads_the_named_model(model_dir, other_dir):
    loss = NEAR_REFERENCE.model_copy(update={"sampler_kl": 0.0})
    backend = _backend(model_dir, loss, reference_model_dir=str(other_dir), lr=3e-4)
    groups = [queued(_equal(one.group)) for one in random_groups(seed=2)]

    reports = [backend.train_step(groups, head_version=step, step=step) for step in range(30)]

    # The loss is the distance from the reference over its own mean, so its gradient falls with the distance.
    assert backend._passes.reference is not None
    assert all(report.is_applied for report in reports)


def test_gradient_with_a_reference_does_not_depend_on_micro_batches(model_dir, other_dir):
    loss = NEAR_REFERENCE.model_copy(update={"reference_kl": 0.5})
    small, large = (
        _backend(model_dir, loss, micro_batch_tokens=tokens, reference_model_dir=str(other_dir))
        for tokens in (20, 4096)
    )
    reports = [one.train_step(random_groups(seed=3), head_version=1, step=1) for one in (small, large)]

    assert reports[0].grad_norm == pytest.approx(reports[1].grad_norm, rel=1e-4)
    assert reports[0].loss == pytest.approx(reports[1].loss, rel=1e-4)


def test_reference_is_frozen_and_only_loaded_for_losses_that_read_it(model_dir):
    backend = _backend(model_dir, GrpoConfig(reference_kl=1.0))
    before = weights(backend._passes.reference.model)

    _train(backend, 3)

    assert is_identical(weights(backend._passes.reference.model), before)
    assert not any(parameter.requires_grad for parameter in backend._passes.reference.model.parameters())
    assert _backend(model_dir, GrpoConfig())._passes.reference is None


@pytest.mark.parametrize("lora", [LoraConfig(), LoraConfig(rank=2, target_modules=("q_proj",))], ids=["all", "lora"])
def test_reference_of_another_shape_is_refused(model_dir, tmp_path, lora):
    torch.manual_seed(0)
    other = tiny_model()
    other.resize_token_embeddings(60)
    other.save_pretrained(tmp_path)

    with pytest.raises(ConfigError, match=r"backend\.reference_model_dir: .* other shapes"):
        _backend(model_dir, GrpoConfig(reference_kl=1.0), lora=lora, reference_model_dir=str(tmp_path))


@pytest.mark.parametrize("family", ["Llama", "Qwen2"])
@pytest.mark.parametrize("lora", [LoraConfig(), LoraConfig(rank=2, target_modules=("q_proj",))], ids=["all", "lora"])
def test_reference_of_another_architecture_is_refused(model_dir, tmp_path, family, lora):
    # Tensors of the same names have the same shapes.
    tiny_model(family=family).save_pretrained(tmp_path)

    with pytest.raises(ConfigError, match=r"backend\.reference_model_dir: .* other shapes .*: tensor model\.layers\."):
        _backend(model_dir, GrpoConfig(reference_kl=1.0), lora=lora, reference_model_dir=str(tmp_path))


def test_reference_that_is_not_there_is_named_by_its_own_key(model_dir, tmp_path):
    with pytest.raises(ConfigError, match=r"backend\.reference_model_dir: .*no-such-model"):
        _backend(model_dir, GrpoConfig(reference_kl=1.0), reference_model_dir=str(tmp_path / "no-such-model"))
