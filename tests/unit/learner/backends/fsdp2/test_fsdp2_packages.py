"""What the packages around FSDP2 do to a process is met before it can do harm."""

import pytest
import torch
from torch import nn

from heterorl.common.errors import ConfigError
from heterorl.learner.backends.fsdp2 import state
from heterorl.learner.backends.fsdp2.state import ShardedState
from heterorl.learner.backends.ranks.division import check_experts
from heterorl.learner.backends.ranks.state import Piece
from heterorl.learner.config import LearnerConfig
from heterorl.learner.train.config import Fsdp2BackendConfig
from tests.support.patched import patched_path
from tests.support.rank_processes import Ranks
from tests.support.thread_ranks import on_all_ranks
from tests.support.training import tiny_model

# Liger exchanges the classes in transformers for some whose kernels take tensors of a GPU alone.
LIGER = """
def apply_liger(model, config):
    from transformers.models.qwen3 import modeling_qwen3
    class LigerRMSNorm(modeling_qwen3.Qwen3RMSNorm):
        def forward(self, x):
            raise ValueError("Pointer argument (at 0) cannot be accessed from Triton (cpu tensor?)")
    modeling_qwen3.Qwen3RMSNorm = LigerRMSNorm
"""


def test_rows_that_leave_the_storage_of_the_optimizer_are_refused_on_all_ranks(monkeypatch):
    """As releases of torch before 2.10 do to padded rows at the first pass."""
    monkeypatch.setattr(state, "local_part", lambda parameter: parameter.detach())
    monkeypatch.setattr(state, "piece_of", lambda shape, **_: Piece(start=0, size=shape.numel()))

    def work(ranks):
        parameter = nn.Parameter(torch.zeros(5 - ranks.rank, 2))
        sharded = ShardedState({"w": parameter}, config=Fsdp2BackendConfig(), ranks=ranks)
        if ranks.rank == 1:
            parameter.data = parameter.data.clone()
        return sharded.update(1.0, 1e-3)

    answers = on_all_ranks(2, work)

    assert [type(answer) for answer in answers] == [ConfigError, ConfigError]
    assert "upgrade torch to 2.10" in str(answers[0])


def test_experts_that_are_modules_of_their_own_are_refused_where_ranks_meet_different_ones():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = nn.ModuleList([nn.Linear(2, 2)])

    def work(ranks):
        return check_experts(nn.Sequential(Block()), ranks)

    assert on_all_ranks(1, work) == [None]
    assert [type(answer) for answer in on_all_ranks(2, work)] == [ConfigError, ConfigError]


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_reference_is_opened_and_checked_before_ligers_kernels_are_in_the_process(tmp_path):
    tiny_model().save_pretrained(tmp_path / "model")
    config = LearnerConfig.model_validate(
        {
            "model_dir": str(tmp_path / "model"),
            "sampling": {"max_new_tokens": 16},
            "loss": {"kind": "grpo", "reference_kl": 0.5},
            "backend": {"kind": "fsdp2", "threads": 1, "micro_batch_tokens": 64},
        }
    )
    module = "heterorl.learner.backends.fsdp2.backend"
    ranks = Ranks(1, first_on_path=patched_path(tmp_path / "path", module, "module.apply_liger = apply_liger", LIGER))

    assert ranks.ask(config, [["train", 0]])[0]["is_applied"]

    assert ranks.close() == 0


def test_replayed_logprobs_are_not_computed_by_ligers_kernels_on_a_cpu(tmp_path):
    backend = {"kind": "fsdp2", "liger": True, "device": "cuda", "compute_dtype": "bf16"}
    table = {"model_dir": str(tmp_path), "backend": backend, "verification": {"logprob_floor": 0.05}}

    with pytest.raises(ValueError, match=r"verification\.device to cuda"):
        LearnerConfig.model_validate(table)
    table["verification"]["device"] = "cuda:0"
    LearnerConfig.model_validate(table)
