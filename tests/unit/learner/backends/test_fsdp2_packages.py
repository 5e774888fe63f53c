"""What the packages around FSDP2 do to a process is met before it can do harm."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from heterorl.common.errors import ConfigError, DependencyUnsupported
from heterorl.common.model import library_versions
from heterorl.common.model.contract import LoraConfig, SamplingConfig
from heterorl.learner import learner_parts
from heterorl.learner.backends import fsdp2, zero
from heterorl.learner.backends.fsdp2 import Fsdp2Sharding, piece_of
from heterorl.learner.backends.ranks.rank_env import RankEnv
from heterorl.learner.backends.ranks.sharding import check_experts
from heterorl.learner.backends.zero import ZeroSharding
from heterorl.learner.learner_config import LearnerConfig
from heterorl.learner.loss.loss_config import GepoConfig
from heterorl.learner.train.backend_config import DeepSpeedBackendConfig, Fsdp2BackendConfig
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


@pytest.mark.parametrize(("num_rows", "world_size"), [(8, 4), (7, 2), (9, 4), (5, 4), (2, 4), (1, 3), (0, 2)])
def test_rows_of_each_rank_are_those_of_torch_chunk(num_rows, world_size):
    values = torch.arange(3 * num_rows).view(num_rows, 3)
    chunks = [*torch.chunk(values, world_size), *[values[:0]] * world_size][:world_size]

    pieces = [piece_of(values.shape, rank=rank, world_size=world_size) for rank in range(world_size)]

    assert [piece.size for piece in pieces] == [chunk.numel() for chunk in chunks]
    for piece, chunk in zip(pieces, chunks, strict=True):
        assert torch.equal(values.view(-1)[piece.start : piece.start + piece.size], chunk.reshape(-1))
        assert piece.start + piece.size <= values.numel()


def test_experts_that_are_modules_of_their_own_are_refused_where_ranks_meet_different_ones():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = nn.ModuleList([nn.Linear(2, 2)])

    def work(ranks):
        return check_experts(nn.Sequential(Block()), ranks)

    assert on_all_ranks(1, work) == [None]
    assert [type(answer) for answer in on_all_ranks(2, work)] == [ConfigError, ConfigError]


@pytest.mark.parametrize(
    ("module", "backend", "config"),
    [
        (fsdp2, Fsdp2Sharding, Fsdp2BackendConfig()),
        (zero, ZeroSharding, DeepSpeedBackendConfig(stage=3)),
        (zero, ZeroSharding, DeepSpeedBackendConfig(stage=2)),
    ],
    ids=["fsdp2", "zero-3", "zero-2"],
)
def test_backend_whose_ranks_reduce_by_parameter_asks_for_the_experts_of_its_model(
    monkeypatch, module, backend, config
):
    """Stage 2 reduces what lies end to end, whoever had a gradient."""

    class EngineBuilt(Exception):
        pass

    def build_engine(*_, **__):
        raise EngineBuilt

    def open_together(*_):
        model = tiny_model()
        model.experts = nn.ModuleList([nn.Linear(2, 2)])
        return SimpleNamespace(model=model)

    monkeypatch.setattr(module, "open_together", open_together)
    monkeypatch.setattr(module, "shard" if module is fsdp2 else "build_engine", build_engine)
    loss, sampling = GepoConfig(), SamplingConfig(max_new_tokens=16).semantics()
    options = {"lora": LoraConfig()} if backend is Fsdp2Sharding else {}

    def work(ranks):
        ranks.rank_env = RankEnv(rank=ranks.rank, local_rank=ranks.rank, world_size=2, local_world_size=2)
        return backend("none", config, loss=loss, sampling=sampling, ranks=ranks, **options)

    answers = on_all_ranks(2, work)

    if config == DeepSpeedBackendConfig(stage=2):
        assert [type(answer) for answer in answers] == [EngineBuilt, EngineBuilt]
    else:
        assert [getattr(answer, "key", answer) for answer in answers] == ["model_dir", "model_dir"]


@pytest.mark.parametrize(("name", "found"), [("torch", "2.9.1"), ("transformers", "4.57.3")])
def test_package_that_trains_wrongly_when_divided_is_refused_before_another_rank_begins(monkeypatch, name, found):
    own = library_versions.installed
    monkeypatch.setattr(library_versions, "installed", lambda asked: found if asked == name else own(asked))
    monkeypatch.setattr(learner_parts, "LocalRanks", lambda _: pytest.fail("another rank begins"))
    config = LearnerConfig.model_validate(
        {"model_dir": "none", "sampling": {"max_new_tokens": 16}, "backend": {"kind": "fsdp2"}}
    )

    with pytest.raises(DependencyUnsupported, match=name):
        learner_parts.build_backend(config, 2)
    with pytest.raises(DependencyUnsupported, match=name):
        learner_parts._check_divided(config)


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
    module = "heterorl.learner.backends.fsdp2"
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
