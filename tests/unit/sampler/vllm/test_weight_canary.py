"""The reference beside which an engine is judged, and the file in which its weights travel."""

import copy

import numpy as np
import pytest
import safetensors.torch
import torch
from transformers import AutoModelForCausalLM

from heterorl.common.errors import ConfigError, StaleWeights
from heterorl.common.model import tensors
from heterorl.common.model.adapters import attach
from heterorl.common.model.contract import LoraConfig
from heterorl.common.types.common import Digest, LogprobMode
from heterorl.common.weights.arena import Arena, Layout, TensorSpec
from heterorl.sampler.sampler_config import logprobs_mode
from heterorl.sampler.vllm import weight_canary
from heterorl.sampler.vllm.shared_model import stored_names, write_weights
from heterorl.sampler.vllm.vllm_engine import seed_of
from tests.support.engines import semantics
from tests.support.training import VOCAB_SIZE, tiny_model

SEQUENCES = [np.array([5, 9, 30, 2, 7, 11], np.int32), np.array([1, 2, 3], np.int32)]


def stored(model, dtype="fp32"):
    arena = Arena(tensors.layout_of(model, dtype))
    tensors.store(model, arena)
    return arena


@pytest.mark.parametrize("family", ["Qwen3", "Llama"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_reference_is_the_float32_forward_of_the_arena(family, dtype, tmp_path):
    arena = stored(tiny_model(seed=1, family=family), dtype)
    expected_model = tiny_model(seed=2, family=family).eval()
    tensors.load(arena, expected_model)
    # As an engine loads it: weights rounded, the positions' frequencies not.
    tiny_model(seed=3, family=family).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=tensors.TORCH_DTYPE[dtype])
    reference = weight_canary.Reference(model, arena.layout)

    sampling = semantics(temperature=0.5)
    twice = [reference.logprobs(arena, SEQUENCES, [4, 1], sampling) for _ in range(2)]

    for sequence, start, values, again in zip(SEQUENCES, [4, 1], *twice, strict=True):
        ids = torch.tensor(sequence[None].astype(np.int64))
        with torch.no_grad():
            logits = expected_model(input_ids=ids).logits[0, :-1]
        logits[start - 1 :] /= 0.5
        expected = logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0].numpy()
        np.testing.assert_allclose(values, expected, atol=1e-5)
        np.testing.assert_array_equal(values, again)


def test_reference_holds_no_weights_between_calls():
    model = tiny_model(seed=1)
    arena = stored(model)
    reference = weight_canary.Reference(model, arena.layout)

    reference.logprobs(arena, SEQUENCES, [1, 1], semantics())

    assert sum(parameter.numel() for parameter in model.parameters()) == 0


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_reference_under_adapters_keeps_the_base_model_and_computes_in_float32(dtype, tmp_path):
    lora = LoraConfig(rank=2, alpha=4.0).settings(Digest(""))
    tiny_model(seed=1).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=tensors.TORCH_DTYPE[dtype])
    attach(model, lora)
    arena = stored(model, dtype)
    for spec in arena.layout.specs:
        values = torch.from_numpy(arena.view(spec.name)).view(tensors.TORCH_DTYPE[dtype])
        values.copy_(torch.randn(values.shape, generator=torch.Generator().manual_seed(len(spec.name))) * 0.3)
    expected_model = copy.deepcopy(model).float()
    tensors.load(arena, expected_model)
    reference = weight_canary.Reference(model, arena.layout)

    values = [reference.logprobs(arena, SEQUENCES[:1], [1], semantics())[0] for _ in range(2)]

    ids = torch.tensor(SEQUENCES[0][None].astype(np.int64))
    with torch.no_grad():
        expected = expected_model(input_ids=ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    np.testing.assert_allclose(values[0], expected.numpy(), atol=1e-5)
    np.testing.assert_array_equal(*values)
    assert sum(parameter.numel() for name, parameter in model.named_parameters() if "lora" in name) == 0


def test_check_refuses_one_old_tensor_and_what_is_not_a_number():
    model = tiny_model(seed=1)
    old, new = stored(model), stored(tiny_model(seed=2))
    reference = weight_canary.Reference(model, old.layout)
    truth = reference.logprobs(new, SEQUENCES, [1, 1], semantics())
    spoiled = new.copy()
    spoiled.view("model.layers.1.mlp.down_proj.weight")[:] = old.view("model.layers.1.mlp.down_proj.weight")
    engine = reference.logprobs(spoiled, SEQUENCES, [1, 1], semantics())

    assert weight_canary.check(truth, truth, version=4, tolerance=1e-4) == 0
    with pytest.raises(StaleWeights, match="version 4"):
        weight_canary.check(engine, truth, version=4, tolerance=1e-4)
    with pytest.raises(StaleWeights):
        weight_canary.check([np.full(5, np.nan, np.float32)], truth[:1], version=4, tolerance=1e9)


def test_check_prompts_are_the_same_everywhere_and_fit():
    prompts = weight_canary.check_prompts(VOCAB_SIZE, max_length=10)

    assert [prompt.size for prompt in prompts] == [3, 9, 10]
    assert all(
        np.array_equal(*pair)
        for pair in zip(prompts, weight_canary.check_prompts(VOCAB_SIZE, max_length=10), strict=True)
    )
    assert max(prompt.max() for prompt in prompts) < VOCAB_SIZE


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_weights_file_is_safetensors_that_only_its_user_reads(tmp_path, dtype):
    model = tiny_model(seed=1)
    arena = stored(model, dtype)
    names = stored_names(arena.layout, lambda name: name == "lm_head.weight")
    path = tmp_path / "model.safetensors"

    size = write_weights(arena, path, names=names)

    assert path.stat().st_size == size
    assert path.stat().st_mode & 0o777 == 0o600
    assert [item.name for item in tmp_path.iterdir()] == ["model.safetensors"]
    read = safetensors.torch.load_file(path)
    state = model.state_dict()
    assert set(read) == set(state) - {"lm_head.weight"}
    assert all(torch.equal(tensor, state[name].to(tensors.TORCH_DTYPE[dtype])) for name, tensor in read.items())


def test_stored_names_are_one_for_each_storage():
    specs = [
        TensorSpec(name="a", dtype="fp32", shape=(2,)),
        TensorSpec(name="b", dtype="fp32", shape=(2,), alias_of="a"),
    ]
    layout = Layout.build([*specs, TensorSpec(name="c", dtype="fp32", shape=(1,))])

    assert stored_names(layout, lambda name: name == "a") == ["b", "c"]
    assert stored_names(layout, lambda name: name == "b") == ["a", "c"]
    assert stored_names(layout, lambda name: name in "ab") == ["b", "c"]


@pytest.mark.parametrize(
    ("changes", "mode"),
    [
        ({}, "processed_logprobs"),
        ({"temperature": 0.5}, "processed_logprobs"),
        ({"temperature": 0.5, "logprob_mode": LogprobMode.RAW}, "raw_logprobs"),
        ({"top_p": 0.9}, "raw_logprobs"),
        ({"top_k": 5, "temperature": 0.5, "logprob_mode": LogprobMode.RAW}, "raw_logprobs"),
    ],
)
def test_logprobs_have_the_contracts_meaning(changes, mode):
    assert logprobs_mode(semantics(**changes)) == mode


@pytest.mark.parametrize(
    "changes", [{"temperature": 0.5, "top_p": 0.9}, {"temperature": 0.5, "top_k": 2}, {"temperature": 0.005}]
)
def test_semantics_that_vllm_lacks_are_refused(changes):
    with pytest.raises(ConfigError, match="sampling"):
        logprobs_mode(semantics(**changes))


def test_seeds_differ_within_a_group_and_between_close_groups():
    seeds = [seed_of(seed, member) for seed in range(100) for member in range(8)]

    assert len(set(seeds)) == 800
    assert all(0 <= seed < 1 << 63 for seed in seeds)
