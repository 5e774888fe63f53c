"""The parts of the divided backend that need no DeepSpeed."""

import importlib.util
import json
import threading
from dataclasses import replace

import pytest
from pydantic import ValidationError

from heterorl.common.errors import ConfigError, DependencyMissing
from heterorl.common.generation.tiny_model import write_tiny_model
from heterorl.common.model.contract import LoraConfig
from heterorl.common.process.config_file import load
from heterorl.common.types.rollout import Span, turn_numbers, without_stale
from heterorl.learner import learner_parts
from heterorl.learner.backends.ranks.commands import Command, Do, command_from_bytes, command_to_bytes
from heterorl.learner.backends.ranks.local_ranks import LocalRanks
from heterorl.learner.backends.zero import engine_config, import_deepspeed
from heterorl.learner.learner_config import LearnerConfig
from heterorl.learner.train.backend_config import DeepSpeedBackendConfig, TorchBackendConfig
from tests.support.limits import WAIT_S
from tests.support.training import random_groups, random_trajectories


def test_command_survives_its_way(tmp_path):
    groups = tuple(queued.group for queued in random_groups(3))

    read = command_from_bytes(command_to_bytes(Command(do=Do.TRAIN, groups=groups, head_version=7)))

    assert (read.do, read.head_version) == (Do.TRAIN, 7)
    assert [group.id for group in read.groups] == [group.id for group in groups]
    assert all(
        (one.token_ids == other.token_ids).all() and (one.sampler_logprobs == other.sampler_logprobs).all()
        for mine, yours in zip(groups, read.groups, strict=True)
        for one, other in zip(mine.rollouts, yours.rollouts, strict=True)
    )
    assert command_from_bytes(command_to_bytes(Command(do=Do.RESTORE, directory=tmp_path))).directory == tmp_path


def test_all_ranks_number_the_turns_of_a_masked_group_alike():
    groups = []
    for queued in random_trajectories(3):
        rollouts = tuple(replace(one, spans=_aged(one.spans)) for one in queued.group.rollouts)
        groups.append(without_stale(replace(queued.group, rollouts=rollouts), oldest=2))
    groups.insert(1, random_groups(1)[0].group)

    read = command_from_bytes(command_to_bytes(Command(do=Do.TRAIN, groups=groups)))

    for mine, yours in zip(groups, read.groups, strict=True):
        for one, other in zip(mine.rollouts, yours.rollouts, strict=True):
            assert other.spans == one.spans
            assert turn_numbers(other.spans) == turn_numbers(one.spans)
    assert any(span.is_stale for span in read.groups[0].rollouts[0].spans)


def _aged(spans: tuple[Span, ...]) -> tuple[Span, ...]:
    """The same spans, of which version 1 drew the first and version 2 the others."""
    return tuple(replace(span, version=2) if number and span.is_drawn else span for number, span in enumerate(spans))


def test_backend_without_a_kind_is_torch_and_errors_name_the_key(tmp_path):
    assert isinstance(load(LearnerConfig, None, ["backend.lr=0.1"]).backend, TorchBackendConfig)
    chosen = load(LearnerConfig, None, ["backend.kind=deepspeed", "backend.stage=3"]).backend
    assert isinstance(chosen, DeepSpeedBackendConfig)
    assert chosen.stage == 3
    for override in ("backend.stage=4", "backend.offload_optimizer=1", "backend.lr=0", "backend.kind=tpu"):
        with pytest.raises(ConfigError, match="backend"):
            load(LearnerConfig, None, ["backend.kind=deepspeed", "backend.stage=0", override])


def test_configuration_reaches_another_rank_as_it_is():
    config = load(LearnerConfig, None, ["backend.kind=deepspeed", "backend.stage=1"])

    assert LearnerConfig.model_validate_json(config.model_dump_json()) == config


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_engine_never_scales_a_gradient_by_a_count_of_samples(stage):
    config = engine_config(DeepSpeedBackendConfig(stage=stage, compute_dtype="bf16", grad_clip=0.5), world_size=4)

    assert config["gradient_accumulation_steps"] == config["train_micro_batch_size_per_gpu"] == 1
    assert config["train_batch_size"] == 4
    assert config["gradient_clipping"] == (0.5 if stage else 0.0)
    assert config["bf16"]["enabled"] == (stage > 0)


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is not None, reason="it is installed")
def test_missing_package_is_named_with_its_extra():
    with pytest.raises(DependencyMissing, match=r"'\.\[deepspeed\]'"):
        import_deepspeed()


def test_several_processes_need_a_backend_that_divides(tmp_path):
    with pytest.raises(ConfigError, match="--nproc"):
        learner_parts.build_backend(LearnerConfig(model_dir="x"), 2)


def test_adapters_are_refused_before_another_rank_begins(monkeypatch):
    monkeypatch.setattr(learner_parts, "LocalRanks", lambda _: pytest.fail("another rank begins"))
    table = {"model_dir": "x", "backend": {"kind": "deepspeed"}}
    lora = LoraConfig(rank=2, target_modules=("q_proj",))
    with pytest.raises(ValidationError, match=r"lora: backend deepspeed trains all weights"):
        LearnerConfig.model_validate({**table, "lora": lora})
    config = LearnerConfig.model_validate(table).model_copy(update={"lora": lora})

    with pytest.raises(ConfigError, match=r"^lora: backend deepspeed trains all weights"):
        learner_parts.build_backend(config, 2)


@pytest.mark.parametrize("backend", [{"kind": "deepspeed", "stage": 3}, {"kind": "fsdp2"}], ids=["zero3", "fsdp2"])
def test_versions_of_divided_weights_have_no_canary(backend, tmp_path, monkeypatch):
    model_dir = write_tiny_model(tmp_path / "model", seed=0, hidden_size=32, num_layers=1)
    values = {"model_dir": str(model_dir), "sampling": {"max_new_tokens": 4}, "task": {"digits": 1},
              "verification": {"recompute_rewards": False}}  # fmt: skip
    built, _ = learner_parts.build_backend(LearnerConfig.model_validate(values), 1)
    monkeypatch.setattr(learner_parts, "build_backend", lambda *args, **kwargs: (built, lambda: None))

    def parts_with(backend):
        parts = learner_parts.assemble(LearnerConfig.model_validate({**values, "backend": backend}))
        parts.close()
        return parts

    assert parts_with(backend).canary is None
    assert parts_with({"kind": "deepspeed", "stage": 2}).canary is not None


@pytest.mark.slow
def test_rank_that_ends_before_its_time_is_reported():
    failed, failures = threading.Event(), []

    def note(error):
        failures.append(error)
        failed.set()

    ranks = LocalRanks(2, on_failure=note)
    [child] = ranks._children
    child.kill()

    assert failed.wait(WAIT_S)
    ranks.close()
    assert json.dumps(str(failures[0]))
    assert "rank 1 was ended by SIGKILL" in str(failures[0])


@pytest.mark.slow
def test_rank_ends_with_the_pipe_of_rank_0():
    failures = []
    ranks = LocalRanks(2, on_failure=failures.append)
    [child] = ranks._children

    ranks.close()

    assert child.returncode == 0
    assert failures == []
