"""A mixture of experts is trained by two ranks, published, and swapped into vLLM in place."""

import numpy as np
import pytest

from heterorl.common.generation.inference_engine import generate_all
from heterorl.common.weights.arena import Arena
from heterorl.learner.learner_config import LearnerConfig
from tests.support.engines import PROMPTS, Truth, disturbed, semantics, vllm_engine, write_model
from tests.support.rank_processes import Ranks
from tests.support.training import VOCAB_SIZE

pytestmark = [pytest.mark.timeout(1500), pytest.mark.slow, pytest.mark.filterwarnings("default")]


def _trained(model_dir, path):
    ranks = Ranks(2)
    table = {
        "model_dir": str(model_dir),
        "sampling": {"max_new_tokens": 12},
        "backend": {"kind": "fsdp2", "lr": 1e-2, "published_dtype": "fp32", "threads": 1},
    }
    reports = ranks.ask(LearnerConfig.model_validate(table), [["train", 0], ["train", 1], ["store", str(path)]])
    assert ranks.close() == 0
    assert all(report["is_applied"] for report in reports[:-1])
    return np.load(path)


def test_trained_experts_are_swapped_in_place(monkeypatch, tmp_path):
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    # Experts of 48 rows: vLLM's kernel on the CPU fills them up to 64 before it packs them.
    model_dir = write_model(
        tmp_path / "model",
        family="Qwen3Moe",
        vocab_size=VOCAB_SIZE,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=48,
    )
    values = _trained(model_dir, tmp_path / "weights.npy")
    engine = vllm_engine(model_dir, tmp_path / "weights")
    try:
        process, truth, trained = engine._process, Truth(model_dir), Arena(engine.layout)
        start = 0
        for name in trained.layout.offsets:
            view = trained.view(name)
            view[...] = values[start : start + view.size].reshape(view.shape)
            start += view.size
        assert start == values.size
        experts = "model.layers.1.mlp.experts.down_proj"
        assert not np.array_equal(trained.view(experts), engine.base().view(experts))

        for version, state in ((1, trained), (2, disturbed(trained, seed=1))):
            engine.load(state, version)
            assert engine.swap_check_difference < 1e-5
            groups = generate_all(engine, PROMPTS, seeds=[1, 2, 3, 4], num_per_prompt=2)
            assert truth.difference(state, groups, semantics()) < 1e-5
        assert engine._process is process
    finally:
        engine.close()
