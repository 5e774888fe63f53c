"""Model families beyond the demo's: each is read from files, trained, published and drawn from, and stays one policy."""

import numpy as np
import pytest
import torch
import transformers

from heterorl.common.generation.hf import HfEngine
from heterorl.common.weights.arena import Arena
from heterorl.learner.backends.torch import TorchBackend
from heterorl.learner.loss.config import GepoConfig
from heterorl.learner.train.config import TorchBackendConfig
from tests.support.training import SAMPLING, VOCAB_SIZE, group, queued, rollout

SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "decoder_sparse_step": 1}
FAMILIES = {
    "qwen3": ("Qwen3", {"head_dim": 8, "tie_word_embeddings": True}),
    "qwen3-untied": ("Qwen3", {"head_dim": 8, "tie_word_embeddings": False}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "llama": ("Llama", {"tie_word_embeddings": False}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "qwen3-moe": ("Qwen3Moe", {"head_dim": 8, **MOE}),
}
TOLERANCE = {"fp32": 1e-6, "bf16": 2e-2}
"""Of KL(learner || sampler), nats per token: the masters are fp32, the sampler has what was published of them."""


@pytest.fixture(scope="module", params=FAMILIES)
def model_dir(request, tmp_path_factory):
    family, changes = FAMILIES[request.param]
    config = getattr(transformers, f"{family}Config")(**{**SHAPE, **changes})
    directory = tmp_path_factory.mktemp(request.param)
    with torch.random.fork_rng():
        torch.manual_seed(5)
        getattr(transformers, f"{family}ForCausalLM")(config).save_pretrained(directory)
    return directory


def _engine(model_dir, published_dtype):
    return HfEngine(
        model_dir=str(model_dir), published_dtype=published_dtype, compute_dtype="fp32", device="cpu",
        sampling=SAMPLING, batch_rows=32, end_token_ids=(1,),
    )  # fmt: skip


def _groups(engine, *, version):
    """Groups drawn by the engine; the reward is the share of even tokens."""
    prompts = [np.array(ids, np.int32) for ids in ([2, 3, 4], [5, 6, 7, 8], [9, 2], [11, 3, 3])]
    groups = []
    for number, rows in enumerate(engine.generate(prompts, seeds=[1, 2, 3, 4], num_per_prompt=4)):
        members = [
            rollout(row.token_ids, row.logprobs, float(np.mean(row.token_ids % 2 == 0)), version=version)
            for row in rows
        ]
        groups.append(queued(group(members, prompt=prompts[number], sequence=number + 1, version=version)))
    return groups


@pytest.mark.parametrize(("published_dtype", "batching"), [("fp32", "packed"), ("bf16", "padded")])
def test_family_is_trained_published_and_drawn_from_as_one_policy(model_dir, published_dtype, batching):
    backend = TorchBackend(
        model_dir=model_dir,
        config=TorchBackendConfig(lr=3e-3, published_dtype=published_dtype, batching=batching, micro_batch_tokens=96),
        loss=GepoConfig(),
        sampling=SAMPLING,
    )
    engine = _engine(model_dir, published_dtype)
    assert engine.layout.layout_id == backend.layout.layout_id

    arenas, reports = [], []
    for version in range(4):
        arenas.append(Arena(backend.layout))
        backend.store(arenas[-1])
        engine.load(arenas[-1], version)
        reports.append(backend.train_step(_groups(engine, version=version), head_version=version, step=version))

    assert all(report.is_applied for report in reports)
    assert len({arena.state_root() for arena in arenas}) == 4
    # The learner finds the sampler's tokens as probable as the sampler did, so every weight is in its place.
    assert [report.kl for report in reports] == pytest.approx([0.0] * 4, abs=TOLERANCE[published_dtype])
