"""The learner's canary: what an engine with the same weights computes, in the contract's semantics."""

import numpy as np
import pytest
import torch

from heterorl.common.generation.hf_engine import HfEngine
from heterorl.common.generation.inference_engine import (
    MAX_TOKENS,
    NUM_SEQUENCES,
    ScoredText,
    canary_texts,
    generate_all,
)
from heterorl.common.generation.tiny_model import write_tiny_model
from heterorl.common.model import tensors
from heterorl.common.tasks.arithmetic import ArithmeticTask
from heterorl.common.text.prompter import Prompter
from heterorl.common.types.common import LogprobMode, SamplingSemantics
from heterorl.common.weights.arena import Arena
from heterorl.learner.train.model import Canary, load_model


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("model"), seed=3, hidden_size=32)


def _sampling(temperature=1.0, mode=LogprobMode.PROCESSED):
    return SamplingSemantics(temperature=temperature, top_p=1.0, top_k=0, max_new_tokens=6, logprob_mode=mode)


def _engine(model_dir, sampling):
    return HfEngine(
        model_dir=str(model_dir), published_dtype="fp32", compute_dtype="fp32", device="cpu", sampling=sampling,
        batch_rows=8, end_token_ids=(1,),
    )  # fmt: skip


def test_canary_is_held_out_prompts_with_their_answers(model_dir):
    prompter = Prompter(str(model_dir), use_chat_template=False)
    task = ArithmeticTask(digits=2)

    texts = canary_texts(task, prompter)

    assert len(texts) == NUM_SEQUENCES
    for index, text in enumerate(texts):
        prompt = task.evaluation_prompt(index)
        assert text.prompt.tolist() == prompter.encode(prompt.text).tolist()
        assert prompter.decode(text.completion) == prompt.answer
        assert text.completion[-1] == prompter.eos_token_id
        assert text.completion.size <= MAX_TOKENS


@pytest.mark.parametrize("sampling", [_sampling(), _sampling(0.5), _sampling(0.5, LogprobMode.RAW)])
def test_learner_and_engine_score_the_canary_alike_and_other_weights_differently(model_dir, sampling):
    texts = canary_texts(ArithmeticTask(digits=2), Prompter(str(model_dir), use_chat_template=False))
    model, engine = load_model(model_dir), _engine(model_dir, sampling)
    canary = Canary(model, texts, temperature=sampling.logprob_temperature)

    arena = Arena(engine.layout)
    tensors.store(model, arena)
    stated = canary.score(arena)

    assert np.concatenate(engine.score(texts)) == pytest.approx(np.array(stated), abs=1e-5)
    assert len(stated) == sum(text.completion.size for text in texts)
    with torch.no_grad():
        next(model.parameters()).mul_(1.5)
    tensors.store(model, arena)
    moved = np.array(canary.score(arena))
    assert np.median(np.abs(moved - stated)) > 0.1
    engine.load(arena, 1)
    assert np.concatenate(engine.score(texts)) == pytest.approx(moved, abs=1e-5)


def test_score_is_what_generate_states(model_dir):
    engine = _engine(model_dir, _sampling(0.7))
    prompt = np.array([3, 12, 4], np.int32)

    for (row,) in generate_all(engine, [prompt], seeds=[5], num_per_prompt=1):
        with torch.no_grad():
            whole = engine.model(torch.tensor([[*prompt, *row.token_ids]])).logits[0, prompt.size - 1 : -1] / 0.7
        widths = []
        engine.model.register_forward_hook(lambda *of, widths=widths: widths.append(of[2].logits.shape[1]))
        (score,) = engine.score([ScoredText(prompt=prompt, completion=row.token_ids)])
        np.testing.assert_allclose(score, row.logprobs, atol=1e-5)
        drawn = torch.log_softmax(whole, -1)[torch.arange(len(whole)), torch.from_numpy(row.token_ids).long()]
        np.testing.assert_allclose(score, drawn.numpy(), atol=1e-6)
        # No logits of the prompt but its last token's.
        assert widths == [row.token_ids.size + 1]


def test_learner_scores_other_weights_and_keeps_its_own(model_dir, monkeypatch):
    texts = canary_texts(ArithmeticTask(digits=2), Prompter(str(model_dir), use_chat_template=False))
    model, engine = load_model(model_dir), _engine(model_dir, _sampling())
    canary = Canary(model, texts, temperature=1.0)
    places = [parameter.data_ptr() for parameter in model.parameters()]
    arena, own = Arena(tensors.layout_of(model, "bf16")), Arena(tensors.layout_of(model, "fp32"))
    tensors.store(model, own)
    with torch.no_grad():
        other = load_model(model_dir)
        next(other.parameters()).mul_(1.5)
    tensors.store(other, arena)

    scored = canary.score(arena)

    tensors.load(arena, engine.model)
    assert np.concatenate(engine.score(texts)) == pytest.approx(np.array(scored), abs=1e-5)
    assert np.median(np.abs(np.array(scored) - canary.score(own))) > 0.1
    assert [parameter.data_ptr() for parameter in model.parameters()] == places
    again = Arena(own.layout)
    tensors.store(model, again)
    assert again.digests() == own.digests()

    def full(*_, **__):
        raise torch.OutOfMemoryError

    monkeypatch.setattr("heterorl.learner.train.model.learner_logprobs", full)
    # Without memory for them nothing is stated: other weights would say something else.
    assert canary.score(arena) == ()
    assert [parameter.data_ptr() for parameter in model.parameters()] == places
