"""Rotary positions that depend on the longest text of a pass are held: a text has those it has alone, or is refused."""

import dataclasses

import numpy as np
import pytest
import torch
import transformers

from heterorl.common.errors import ConfigError, PromptTooLong
from heterorl.common.generation.hf_engine import HfEngine
from heterorl.common.generation.inference_engine import Request
from heterorl.common.model.model_loading import (
    TokenLimits,
    load_pretrained,
    token_limits_at,
    token_limits_of,
    window_of,
)
from heterorl.learner.backends.loading import empty_model, fill, open_model
from heterorl.learner.train.batch import TrainingSequence, collate
from heterorl.learner.train.model import learner_logprobs, load_model
from heterorl.sampler.vllm.shared_model import SharedModel
from tests.support.families import write_family
from tests.support.training import SAMPLING, VOCAB_SIZE, tiny_model

WINDOW = 16
LONG = {
    "rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4,
    "original_max_position_embeddings": WINDOW,
}  # fmt: skip
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
MODELS = {
    "longrope": ("Llama", {"rope_parameters": LONG}),
    "phi3": ("Phi3", {"rope_parameters": LONG, "original_max_position_embeddings": WINDOW, "pad_token_id": 0}),
    "dynamic": ("Llama", {"rope_parameters": DYNAMIC, "max_position_embeddings": WINDOW}),
    "by layer": (
        "Olmo3",
        {
            "rope_parameters": {"full_attention": LONG, "sliding_attention": DYNAMIC | {"rope_type": "default"}},
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
}


@pytest.fixture(scope="module", params=MODELS)
def model_dir(request, tmp_path_factory):
    family, changes = MODELS[request.param]
    directory = tmp_path_factory.mktemp("model")
    tiny_model(family=family, **changes).save_pretrained(directory)
    return directory


def _sequence(length, seed):
    rng = np.random.default_rng(seed)
    return TrainingSequence.scored(rng.integers(1, 50, 4, dtype=np.int32), rng.integers(1, 50, length, dtype=np.int32))


@torch.no_grad()
def _logprobs(model, sequences, batching="padded"):
    return learner_logprobs(model, collate(sequences, batching=batching), temperature=1.0)[0]


@pytest.mark.parametrize("batching", ["padded", "packed"])
@pytest.mark.parametrize("load", [load_model, lambda directory: fill(open_model(directory))], ids=["whole", "by name"])
def test_log_probs_depend_on_no_text_beside_or_before(model_dir, load, batching):
    model, short, long = load(model_dir), _sequence(6, 1), _sequence(40, 2)
    alone, far = _logprobs(model, [short]), _logprobs(model, [long])

    beside = _logprobs(model, [long, short], batching)
    after = _logprobs(model, [short])

    torch.testing.assert_close(beside[-6:], alone, rtol=0, atol=1e-5)
    torch.testing.assert_close(beside[:-6], far, rtol=0, atol=1e-5)
    assert torch.equal(after, alone)


def test_within_the_window_they_are_those_of_transformers(model_dir):
    raw = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    ids = torch.arange(1, WINDOW + 1)[None]

    with torch.no_grad():
        expected, actual = (model(input_ids=ids, use_cache=False).logits for model in (raw, load_model(model_dir)))

    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)


def test_the_window_is_that_of_the_first_training(model_dir):
    window = window_of(empty_model(str(model_dir)).config)

    assert window.tokens == WINDOW
    assert window.kind in ("longrope", "dynamic")
    assert (
        token_limits_at(str(model_dir))
        == token_limits_of(load_model(model_dir).config)
        == TokenLimits(vocab_size=VOCAB_SIZE, positions=WINDOW)
    )


@pytest.mark.parametrize("rope", [{"rope_type": "default", "rope_theta": 1e4}, {**DYNAMIC, "rope_type": "linear"}])
def test_other_positions_have_no_window(rope):
    assert window_of(tiny_model(family="Llama", rope_parameters=rope).config) is None


def test_a_prompt_whose_completion_could_leave_the_window_is_refused_alone(model_dir):
    engine = HfEngine(
        model_dir=str(model_dir), published_dtype="bf16", compute_dtype="fp32", device="cpu", batch_rows=4,
        sampling=dataclasses.replace(SAMPLING, max_new_tokens=8), end_token_ids=(1,),
    )  # fmt: skip

    def submit(length):
        engine.submit(Request(key=length, prompt=np.arange(2, 2 + length, dtype=np.int32), num_completions=1, seed=0))

    submit(WINDOW - 8)
    with pytest.raises(PromptTooLong, match=f"{WINDOW} tokens hold no prompt of {WINDOW - 7} and 8 new ones"):
        submit(WINDOW - 7)
    [finished] = engine.collect()
    assert finished.key == WINDOW - 8


def test_positions_that_cannot_be_held_are_refused(tmp_path):
    write_family("phimoe", tmp_path)

    for load in (load_model, open_model, lambda path: load_pretrained(str(path), dtype=torch.bfloat16)):
        with pytest.raises(ConfigError, match="type longrope .* in PhimoeRotaryEmbedding") as caught:
            load(tmp_path)
        assert caught.value.key == "model_dir"


def _source(tmp_path, rope):
    tiny_model(family="Llama", rope_parameters=rope).save_pretrained(tmp_path / "model")
    return SharedModel(
        model_dir=str(tmp_path / "model"), published_dtype="bf16", sampling=SAMPLING, weights_dir=tmp_path / "weights"
    )


def test_vllm_which_decides_by_its_longest_text_stays_within_the_window(tmp_path):
    source = _source(tmp_path, LONG)

    assert source.longest(0) == source.longest(WINDOW) == WINDOW
    assert source.longest(9) == 9
    with pytest.raises(ConfigError, match="beyond 16 tokens") as caught:
        source.longest(WINDOW + 1)
    assert caught.value.key == "engine.max_model_len"
    source.close()


def test_vllm_whose_positions_are_others_is_refused(tmp_path):
    source = _source(tmp_path, DYNAMIC)

    with pytest.raises(ConfigError, match="type dynamic otherwise than the learner") as caught:
        source.longest(0)
    assert caught.value.key == "engine.kind"
    source.close()
    plain = _source(tmp_path / "plain", {"rope_type": "default", "rope_theta": 1e4})
    assert (plain.longest(0), plain.longest(500)) == (128, 500)
    plain.close()
