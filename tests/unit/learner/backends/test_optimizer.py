"""Adafactor beside AdamW: its state comes back bit for bit, is small, and is refused where a rank has a part of a matrix."""

import json

import pytest
import torch
from pydantic import ValidationError
from safetensors import safe_open

from heterorl.common.errors import ConfigError, CorruptStore
from heterorl.common.model.contract import ALL_WEIGHTS, LoraConfig
from heterorl.learner.backends.optimizer_state import build_optimizer, moments_of
from heterorl.learner.backends.torch_backend import TorchBackend
from heterorl.learner.loss.loss_config import GepoConfig
from heterorl.learner.train.backend_config import DeepSpeedBackendConfig, Fsdp2BackendConfig, TorchBackendConfig
from heterorl.learner.train.model import choose_attention
from tests.support.training import SAMPLING, is_identical, random_groups, tiny_model, weights

LORA = LoraConfig(rank=2, target_modules=("q_proj",))


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    tiny_model().save_pretrained(directory)
    return directory


def _backend(model_dir, *, lora=ALL_WEIGHTS, **settings):
    config = TorchBackendConfig(**({"optimizer": "adafactor", "lr": 1e-2} | settings))
    return TorchBackend(model_dir=model_dir, config=config, loss=GepoConfig(), sampling=SAMPLING, lora=lora)


def _train(backend, steps):
    for step in steps:
        assert backend.train_step(random_groups(seed=step), head_version=step, step=step).is_applied
    return weights(backend.torch_model)


@pytest.mark.parametrize("lora", [ALL_WEIGHTS, LORA], ids=["all", "lora"])
def test_restored_adafactor_goes_on_bit_for_bit(model_dir, tmp_path, lora):
    backend = _backend(model_dir, lora=lora)
    start = weights(backend.torch_model)
    assert not is_identical(_train(backend, [1, 2]), start)
    backend.freeze(tmp_path)()
    expected = _train(backend, [3])

    restored = _backend(model_dir, lora=lora)
    restored.restore(tmp_path)

    assert is_identical(_train(restored, [3]), expected)


def test_state_is_rows_and_columns(model_dir, tmp_path):
    backend = _backend(model_dir)
    _train(backend, [1])
    backend.freeze(tmp_path)()

    with safe_open(tmp_path / "optimizer.safetensors", "pt") as file:
        sizes = {name: file.get_tensor(name).numel() for name in file.keys() if "var" in name}  # noqa: SIM118
    count = sum(parameter.numel() for parameter in backend.torch_model.parameters())
    # Rows and columns of matrices of about 40 by 40: a twentieth of their elements, where AdamW keeps two of each.
    assert sum(sizes.values()) < 0.12 * count
    assert json.loads((tmp_path / "state.json").read_text())["optimizer"] == "adafactor"


@pytest.mark.parametrize("shape", [(6, 4), (3, 6, 4), (5,)])
@pytest.mark.parametrize("optimizer", ["adamw", "adafactor"])
def test_shapes_are_those_that_torch_makes(optimizer, shape):
    parameter = torch.nn.Parameter(torch.ones(shape))
    parameter.grad = torch.ones(shape)
    made = build_optimizer([parameter], TorchBackendConfig(optimizer=optimizer))
    made.step()

    found = {name: value.shape for name, value in made.state[parameter].items() if name != "step"}
    assert found == moments_of(optimizer, parameter.shape)


def test_small_gradients_and_rows_without_any_are_no_trouble():
    # An embedding of tokens that no sequence has, among gradients as small as those of billions of weights.
    parameter = torch.nn.Parameter(torch.full((4, 8), 0.02))
    optimizer = build_optimizer([parameter], TorchBackendConfig(optimizer="adafactor", lr=1e-2))
    generator = torch.Generator().manual_seed(0)
    moves = []
    for size in (1e-5, 1e-9):
        before = parameter.detach().clone()
        parameter.grad = size * torch.randn((4, 8), generator=generator)
        parameter.grad[2] = 0.0
        optimizer.step()
        moves.append((parameter.detach() - before).square().mean().sqrt())
        assert torch.isfinite(parameter).all()

    assert parameter[2].tolist() == pytest.approx([0.02] * 8)
    # lr times the size of the tensor, clipped to it.
    assert 1e-5 < float(moves[0]) <= 1e-2 * 0.021


def test_checkpoint_of_the_other_optimizer_is_refused_and_changes_nothing(model_dir, tmp_path):
    saved = tmp_path / "saved"
    saved.mkdir()
    other = _backend(model_dir, optimizer="adamw")
    _train(other, [1])
    other.freeze(saved)()
    backend = _backend(model_dir)
    before = weights(backend.torch_model)

    with pytest.raises(CorruptStore, match="is of optimizer 'adamw', not adafactor"):
        backend.restore(saved)

    assert is_identical(weights(backend.torch_model), before)


@pytest.mark.parametrize("config", [Fsdp2BackendConfig, DeepSpeedBackendConfig])
def test_ranks_that_have_some_rows_refuse_it(config):
    with pytest.raises(ValidationError, match="whole matrices"):
        config.model_validate({"optimizer": "adafactor"})


def test_decay_rates_of_adamw_are_refused_beside_it():
    with pytest.raises(ValidationError, match="betas are AdamW's"):
        TorchBackendConfig(optimizer="adafactor", betas=(0.9, 0.95))


def test_eager_attention_takes_the_same_step(model_dir):
    rates = {"lr": 1e-3, "optimizer": "adamw", "forward_weights": "masters"}
    fused, plain = (_backend(model_dir, attn_implementation=name, **rates) for name in ("sdpa", "eager"))

    reports = [one.train_step(random_groups(seed=1), head_version=1, step=1) for one in (fused, plain)]

    assert plain.torch_model.config._attn_implementation == "eager"
    assert reports[1].loss == pytest.approx(reports[0].loss, abs=1e-5)
    assert reports[1].grad_norm == pytest.approx(reports[0].grad_norm, rel=1e-3)


def test_flash_attention_is_refused_where_it_cannot_run():
    for settings in ({}, {"compute_dtype": "bf16"}, {"device": "cuda"}):
        with pytest.raises(ValidationError, match="needs compute_dtype bf16 and device cuda"):
            TorchBackendConfig(attn_implementation="flash_attention_2", **settings)
    config = TorchBackendConfig(attn_implementation="flash_attention_2", compute_dtype="bf16", device="cuda")

    with pytest.raises(ConfigError, match=r"backend\.attn_implementation: flash_attention_2 cannot be had.*flash-attn"):
        choose_attention(tiny_model(), config)
