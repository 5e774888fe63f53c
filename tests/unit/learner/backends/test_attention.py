"""Attention's implementations: one step, and what each needs."""

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from transformers import AttentionInterface, BloomConfig, BloomForCausalLM
from transformers.integrations.flash_attention import get_target_dtype
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from heterorl.common.errors import ConfigError
from heterorl.common.generation.inference_engine import ScoredText
from heterorl.common.model.contract import ALL_WEIGHTS
from heterorl.common.weights.arena import Arena
from heterorl.learner.backends.torch_backend import TorchBackend
from heterorl.learner.loss.loss_config import GepoConfig
from heterorl.learner.train.backend_config import TorchBackendConfig
from heterorl.learner.train.model import Canary, choose_attention
from tests.support.training import SAMPLING, random_groups, tiny_model


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    tiny_model().save_pretrained(directory)
    return directory


def _backend(model_dir, **settings):
    config = TorchBackendConfig(**settings)
    return TorchBackend(model_dir=model_dir, config=config, loss=GepoConfig(), sampling=SAMPLING, lora=ALL_WEIGHTS)


def test_eager_attention_takes_the_same_step(model_dir):
    rates = {"lr": 1e-3, "forward_weights": "masters"}
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


def test_model_without_fused_attention_is_told_of_the_plain_one():
    model = BloomForCausalLM(BloomConfig(vocab_size=64, hidden_size=32, n_layer=1, n_head=4))

    with pytest.raises(ConfigError, match=r'bloom has no sdpa \(set it to "eager"\)'):
        choose_attention(model, TorchBackendConfig())


def test_flash_attention_scores_in_bf16(model_dir):
    types = set()

    def flash(module, query, *others, **options):
        # As transformers does before flash-attn sees the queries.
        types.add(get_target_dtype(query, module) or query.dtype)
        return sdpa_attention_forward(module, query, *others, **options)

    AttentionInterface.register("flash_stub", flash)
    backend = _backend(model_dir)
    weights, ids = Arena(backend.layout), np.arange(1, 5, dtype=np.int32)
    backend.store(weights)
    canary = Canary(backend.torch_model, [ScoredText(prompt=ids[:2], completion=ids[2:])], temperature=1.0)
    whole = canary.score(weights)
    # Its setter asks for the package.
    backend.torch_model.config._attn_implementation_internal = "flash_stub"

    low = canary.score(weights)

    assert types == {torch.bfloat16}
    assert low == pytest.approx(whole, abs=0.05)
