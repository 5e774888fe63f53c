"""A model that computes with weights on the disk computes what the whole model computes."""

import pytest
import torch

from heterorl.common.errors import ConfigError
from heterorl.learner.backends.loading import open_model, streamed
from heterorl.learner.train.model import check_forward, load_model, prepare
from tests.support.training import VOCAB_SIZE, tiny_model

IDS = torch.arange(12)[None] * 5 % VOCAB_SIZE


@pytest.fixture(params=["Qwen3", "Llama", "Qwen3Moe"])
def model_dir(request, tmp_path):
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    settings = experts if request.param == "Qwen3Moe" else {}
    tiny_model(family=request.param, **settings).to(torch.bfloat16).save_pretrained(tmp_path, max_shard_size=8000)
    return tmp_path


@torch.no_grad()
def _logits(model):
    return model(input_ids=IDS, use_cache=False).logits


@pytest.mark.parametrize("gradient_checkpointing", [False, True])
def test_logits_are_those_of_the_whole_model_bit_for_bit(model_dir, gradient_checkpointing):
    with streamed(open_model(model_dir, gradient_checkpointing=gradient_checkpointing)) as model:
        streamed_logits = _logits(model)

    model = load_model(model_dir)
    prepare(model, gradient_checkpointing=gradient_checkpointing)
    assert torch.equal(streamed_logits, _logits(model))


def test_one_block_has_its_weights_at_a_time_and_none_afterwards(model_dir):
    opened = open_model(model_dir)
    layers, seen = opened.model.model.layers, []

    def note(*_):
        seen.append([any(not parameter.is_meta for parameter in layer.parameters()) for layer in layers])

    hooks = [layer.self_attn.register_forward_pre_hook(note) for layer in layers]
    with streamed(opened) as model:
        _logits(model)
        assert not model.lm_head.weight.is_meta
    for hook in hooks:
        hook.remove()

    assert seen == [[True, False], [False, True]]
    assert all(parameter.is_meta for parameter in opened.model.parameters())
    assert not any(layer._forward_pre_hooks or layer._forward_hooks for layer in layers)


def test_pass_that_fails_leaves_no_weights_behind(model_dir):
    opened = open_model(model_dir)

    def fail(*_):
        raise ZeroDivisionError

    hook = opened.model.model.layers[1].self_attn.register_forward_pre_hook(fail)
    with pytest.raises(ZeroDivisionError), streamed(opened) as model:
        _logits(model)
    hook.remove()

    assert all(parameter.is_meta for parameter in opened.model.parameters())


def test_model_whose_logits_are_not_its_own_is_still_refused(tmp_path):
    tiny_model(family="Granite", logits_scaling=2.0).save_pretrained(tmp_path)

    with streamed(open_model(tmp_path)) as model, pytest.raises(ConfigError, match="changes its logits"):
        check_forward(model, batching="padded")
