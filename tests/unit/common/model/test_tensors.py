"""Models in and out of arenas."""

import numpy as np
import pytest
import torch
from torch import nn

from heterorl.common.errors import ConfigError, StateMismatch
from heterorl.common.model import tensors
from heterorl.common.model.model_loading import load_pretrained
from heterorl.common.weights.arena import Arena
from tests.support.training import is_identical, tiny_model, weights

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_tied", [True, False])
def test_loaded_weights_are_the_stored_ones_rounded_once(dtype, is_tied):
    source, target = tiny_model(seed=1, is_tied=is_tied), tiny_model(seed=2, is_tied=is_tied)
    arena = Arena(tensors.layout_of(source, dtype))

    tensors.store(source, arena)
    tensors.load(arena, target)

    rounded = {name: value.to(DTYPES[dtype]).float() for name, value in weights(source).items()}
    assert is_identical(weights(target), rounded)


@pytest.mark.parametrize("dtype", DTYPES)
def test_store_after_load_gives_the_same_bits(dtype):
    model = tiny_model(seed=1)
    layout = tensors.layout_of(model, dtype)
    one, other = Arena(layout), Arena(layout)

    tensors.store(model, one)
    tensors.load(one, model)
    tensors.store(model, other)

    assert one.digests() == other.digests()


def test_arena_holds_the_bit_pattern_of_the_published_type():
    layer = nn.Linear(2, 1, bias=False)
    nn.init.constant_(layer.weight, 1.0)
    arena = Arena(tensors.layout_of(layer, "bf16"))

    tensors.store(layer, arena)

    assert arena.view("weight").tolist() == [[0x3F80, 0x3F80]]


def test_tied_weights_take_no_space_and_stay_tied():
    tied, untied = tiny_model(), tiny_model(is_tied=False)
    layout = tensors.layout_of(tied, "bf16")
    arena = Arena(layout)

    tensors.store(tied, arena)
    tensors.load(arena, tied)

    assert tensors.layout_of(untied, "bf16").num_elements - layout.num_elements == 50 * 32
    assert [spec.alias_of for spec in layout.specs if spec.alias_of] == ["lm_head.weight"]
    assert tied.lm_head.weight is tied.model.embed_tokens.weight


def test_layout_does_not_depend_on_the_type_of_the_model():
    assert (
        tensors.layout_of(tiny_model(), "bf16").layout_id
        == tensors.layout_of(tiny_model(dtype=torch.bfloat16), "bf16").layout_id
    )


def test_weights_tied_in_the_arena_reach_both_tensors_of_an_untied_model():
    tied, untied = tiny_model(seed=1), tiny_model(seed=2, is_tied=False)
    arena = Arena(tensors.layout_of(tied, "fp32"))

    tensors.store(tied, arena)
    tensors.load(arena, untied)

    assert torch.equal(untied.lm_head.weight, tied.lm_head.weight)
    assert torch.equal(untied.model.embed_tokens.weight, tied.lm_head.weight)


def test_weights_kept_apart_are_refused_by_a_model_that_ties_them():
    arena = Arena(tensors.layout_of(tiny_model(is_tied=False), "fp32"))
    model = tiny_model(seed=3)
    before = weights(model)

    with pytest.raises(StateMismatch, match="ties"):
        tensors.load(arena, model)

    assert is_identical(weights(model), before)


def test_tensor_of_another_shape_is_refused_rather_than_broadcast():
    arena = Arena(tensors.layout_of(nn.Linear(1, 1, bias=False), "fp32"))

    with pytest.raises(StateMismatch):
        tensors.load(arena, nn.Linear(3, 2, bias=False))


@pytest.mark.parametrize(("dtype", "value"), [("fp16", 1e6), ("bf16", float("nan")), ("fp32", float("inf"))])
def test_weight_that_is_not_finite_in_the_published_type_is_never_published(dtype, value):
    layer = nn.Linear(2, 2)
    arena = Arena(tensors.layout_of(layer, dtype))
    nn.init.constant_(layer.weight, value)

    with pytest.raises(ConfigError, match="weight is not finite"):
        tensors.store(layer, arena)


def test_persistent_buffers_travel_and_counters_do_not():
    norm = nn.BatchNorm1d(3)
    arena = Arena(tensors.layout_of(norm, "fp32"))
    norm.running_mean.fill_(2.5)

    tensors.store(norm, arena)

    assert np.array_equal(arena.view("running_mean").view(np.float32), np.full(3, 2.5, np.float32))
    assert "num_batches_tracked" not in {spec.name for spec in arena.layout.specs}


# ---- tensors that a model keeps in fp32


def _routed(seed=0):
    """A mixture of experts whose routers' corrections transformers keeps in fp32: one unit of bf16 is .25 there."""
    model = tiny_model(
        family="Glm4Moe", is_tied=False, seed=seed, pad_token_id=0, n_routed_experts=8, num_experts_per_tok=2,
        moe_intermediate_size=16, first_k_dense_replace=0, n_group=1, topk_group=1, n_shared_experts=1,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(34.5 + 0.14 * torch.randn(buffer.shape, generator=generator))
    return model


def _corrections(model):
    return {name: buffer for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")}


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_a_model_keeps_in_fp32_is_published_in_it(dtype):
    source, target = _routed(seed=1), _routed(seed=2)
    layout = tensors.layout_of(source, dtype)
    arena = Arena(layout)

    tensors.store(source, arena)
    tensors.load(arena, target)

    kept = _corrections(source)
    assert len(kept) == 2
    assert {spec.name for spec in layout.specs if spec.dtype != dtype} == (set() if dtype == "fp32" else set(kept))
    assert tensors.main_type(layout) == dtype
    assert all(torch.equal(_corrections(target)[name], buffer) for name, buffer in kept.items())


def test_layout_with_two_types_does_not_depend_on_the_type_of_the_model(tmp_path):
    model = _routed()
    model.save_pretrained(tmp_path)
    narrow = load_pretrained(str(tmp_path), dtype=torch.bfloat16)
    # transformers keeps what the layout keeps.
    assert {name for name, tensor in narrow.state_dict().items() if tensor.dtype == torch.float32} == set(
        _corrections(model)
    )
    arena, again = Arena(tensors.layout_of(model, "bf16")), Arena(tensors.layout_of(narrow, "bf16"))
    assert arena.layout.layout_id == again.layout.layout_id

    tensors.store(model, arena)
    tensors.store(narrow, again)

    assert arena.state_root() == again.state_root()


def test_a_tied_tensor_is_wide_where_either_of_its_names_is_kept():
    model = tiny_model()
    model._keep_in_fp32_modules_strict = {"lm_head"}

    types = {spec.name: spec.dtype for spec in tensors.layout_of(model, "bf16").specs}

    assert types["lm_head.weight"] == types["model.embed_tokens.weight"] == "fp32"
    assert types["model.norm.weight"] == "bf16"


@pytest.mark.parametrize(("dtype", "kept"), [("fp16", "fp32"), ("bf16", "bf16"), ("fp32", "fp32")])
def test_what_is_kept_from_fp16_alone_is_narrow_in_bf16(dtype, kept):
    model = tiny_model()
    model._keep_in_fp32_modules = ["layers.*.mlp.up_proj"]

    types = {spec.name: spec.dtype for spec in tensors.layout_of(model, dtype).specs}

    assert {types[f"model.layers.{layer}.mlp.up_proj.weight"] for layer in (0, 1)} == {kept}
    assert types["model.layers.0.mlp.down_proj.weight"] == dtype
