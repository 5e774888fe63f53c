"""The stacked model against transformers': logits, log-probs and gradients of the same weights."""

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from heterorl.common.errors import ConfigError
from heterorl.common.generation.tiny_model import write_tiny_model
from heterorl.learner.train.model import load_model
from heterorl_research.lab.fast import forward, stack
from heterorl_research.lab.fast.evaluation import additive_mask
from heterorl_research.lab.fast.layout import Sizes, lay_out, lay_out_apart, mask_of
from research.tests.support.fast_lab import random_rollouts
from tests.support.training import tiny_model

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> list[Path]:
    base = tmp_path_factory.mktemp("models")
    return [write_tiny_model(base / str(seed), seed=seed, hidden_size=32, num_layers=3) for seed in (1, 2)]


@pytest.mark.parametrize("settings", [{"family": "Llama"}, {"is_tied": False}], ids=["llama", "untied"])
def test_model_of_another_architecture_is_refused(tmp_path, settings):
    tiny_model(**settings).save_pretrained(tmp_path)

    with pytest.raises(ConfigError, match="is no model of the lab"):
        stack.read_model(tmp_path)


def passed(models, sizes, *, is_sharing=True, is_causal=False):
    shape = stack.read_model(models[0])[0]
    masters = torch.stack([stack.read_model(path)[1] for path in models])
    rollouts = [random_rollouts(sizes, seed) for seed in range(len(models))]
    tokens = np.stack([one.drawn.tokens_RGMT for one in rollouts])
    prompts = np.stack([one.work.tokens_GP for one in rollouts])
    if is_sharing:
        lengths = np.stack([one.drawn.lengths_RGM for one in rollouts])
        layout = lay_out(sizes, prompts, tokens, lengths, np.stack([one.drawn.first_RGMT for one in rollouts]))
    else:
        layout = lay_out_apart(sizes, torch.from_numpy(prompts), torch.from_numpy(tokens))
    layout = replace(layout, is_causal=is_causal)
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in stack.views(masters, shape).items()}
    folded = forward.fold(shape, leaves, num_positions=sizes.num_positions)
    logits = forward.forward(folded, layout, additive_mask(sizes, CPU))
    logprobs, entropies = forward.log_probs(logits, layout, torch.from_numpy(tokens), temperature=0.7)
    is_token = np.arange(sizes.max_new_tokens) < np.stack([one.drawn.lengths_RGM for one in rollouts])[..., None]
    return rollouts, leaves, torch.where(torch.from_numpy(is_token), logprobs, 0.0), entropies, layout


def by_transformers(model_dir, rollouts):
    """Log-probs and entropies [G, M, T] of one model, and the model."""
    model = load_model(model_dir)
    drawn = rollouts.drawn
    logprobs, entropies = torch.zeros(drawn.tokens_RGMT.shape), torch.zeros(drawn.tokens_RGMT.shape)
    for group, member in np.ndindex(drawn.lengths_RGM.shape):
        length = int(drawn.lengths_RGM[group, member])
        prompt = rollouts.work.tokens_GP[group]
        ids = torch.from_numpy(np.concatenate([prompt, drawn.tokens_RGMT[group, member, :length]]))
        logs = torch.log_softmax(model(input_ids=ids[None, :-1]).logits[0, len(prompt) - 1 :] / 0.7, -1)
        logprobs[group, member, :length] = logs.gather(1, ids[len(prompt) :, None])[:, 0]
        entropies[group, member, :length] = -(logs.exp() * logs).sum(-1).detach()
    return logprobs, entropies, model


@pytest.mark.parametrize(
    ("tokens", "is_sharing", "is_causal"),
    [*itertools.product((1, 5, 23, 43), (True, False), (False,)), (43, False, True)],
)
def test_log_probs_and_gradients_are_those_of_transformers(models, tokens, is_sharing, is_causal):
    sizes = Sizes(num_prompts=3, group_size=4, prompt_length=5, max_new_tokens=tokens, vocab_size=19)
    rollouts, leaves, logprobs, entropies, _ = passed(models, sizes, is_sharing=is_sharing, is_causal=is_causal)
    weights = torch.randn(logprobs.shape, generator=torch.Generator().manual_seed(5))
    (logprobs * weights).sum().backward()

    for number, model_dir in enumerate(models):
        expected, spread, model = by_transformers(model_dir, rollouts[number])
        assert torch.allclose(logprobs[number], expected, atol=1e-5, rtol=0)
        is_token = expected != 0
        assert torch.allclose(entropies[number][is_token], spread[is_token], atol=1e-5, rtol=0)
        (expected * weights[number]).sum().backward()
        grads = {name: leaf.grad[number] for name, leaf in leaves.items()}
        own = dict(model.named_parameters())
        largest = max(float(parameter.grad.abs().max()) for parameter in own.values())
        pairs = [("embedding", "model.embed_tokens"), ("norm", "model.norm"), ("1.norm_query", "model.layers.1.self_attn.q_norm"),
                 ("0.norm_key", "model.layers.0.self_attn.k_norm"), ("2.output", "model.layers.2.self_attn.o_proj"),
                 ("0.norm_attention", "model.layers.0.input_layernorm"), ("2.down", "model.layers.2.mlp.down_proj"),
                 ("1.norm_mlp", "model.layers.1.post_attention_layernorm")]  # fmt: skip
        for mine, theirs in pairs:
            assert torch.allclose(grads[mine], own[f"{theirs}.weight"].grad, atol=2e-6 * largest, rtol=0), mine
        for layer in range(3):
            names = [f"model.layers.{layer}.self_attn.{part}_proj.weight" for part in "qkv"]
            whole = torch.cat([own[name].grad for name in names])
            assert torch.allclose(grads[f"{layer}.query_key_value"], whole, atol=2e-6 * largest, rtol=0)
            names = [f"model.layers.{layer}.mlp.{part}_proj.weight" for part in ("gate", "up")]
            whole = torch.cat([own[name].grad for name in names])
            assert torch.allclose(grads[f"{layer}.gate_up"], whole, atol=2e-6 * largest, rtol=0)


def test_equal_prefixes_are_one_row(models):
    sizes = Sizes(num_prompts=3, group_size=4, prompt_length=5, max_new_tokens=4, vocab_size=19)
    rollouts, *_, layout = passed(models, sizes)
    for number, one in enumerate(rollouts):
        prefixes = {
            (group, tuple(one.drawn.tokens_RGMT[group, member, :end]))
            for group, member in np.ndindex(one.drawn.lengths_RGM.shape)
            for end in range(1, int(one.drawn.lengths_RGM[group, member]))
        }
        assert layout.counts[number] == 3 * 5 + len(prefixes)
        assert layout.seen_counts[number] == 3 + len(prefixes)


def test_a_slot_sees_its_prompt_and_its_own_rollout_up_to_itself():
    sizes = Sizes(num_prompts=1, group_size=2, prompt_length=2, max_new_tokens=3, vocab_size=19)
    seen = [np.flatnonzero(row).tolist() for row in mask_of(sizes)]

    assert seen == [[0], [0, 1], [0, 1, 2], [0, 1, 3], [0, 1, 2, 4], [0, 1, 3, 5]]


def test_published_weights_are_rounded_as_samplers_have_them(models):
    row = stack.read_model(models[0])[1]
    assert torch.equal(stack.published(row[None])[0], row.bfloat16().float())
    assert not torch.equal(stack.published(row[None])[0], row)
