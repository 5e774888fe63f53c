"""Experts recorded by the engine are those of the learner's passes: through the wire, padded and packed."""

import dataclasses
import threading

import numpy as np
import pytest
import torch
import transformers

from heterorl.common.errors import ConfigError
from heterorl.common.generation.hf_engine import HfEngine
from heterorl.common.generation.inference_engine import Request, ScoredText, generate_all, in_order
from heterorl.common.model.router_replay import RouterReplay, routers_of, routing_shape
from heterorl.common.types.common import LogprobMode, SamplingSemantics
from heterorl.common.wire.sealed_groups import canonical, open_group, seal
from heterorl.learner.backends.torch_backend import TorchBackend
from heterorl.learner.checks.findings import SOUND
from heterorl.learner.checks.verifier import Limits, judge
from heterorl.learner.learner_config import LearnerConfig
from heterorl.learner.loss.loss_config import CustomLossConfig, GepoConfig
from heterorl.learner.train.backend_config import TorchBackendConfig
from heterorl.learner.train.batch import build_batch, collate
from heterorl.learner.train.model import learner_logprobs, prepare
from heterorl.v1 import rollout_pb2
from tests.support.training import SAMPLING, VOCAB_SIZE, group, queued, rollout, tiny_model

PROMPTS = [np.array(ids, np.int32) for ids in ([2, 3, 4], [5, 6, 7, 8, 9, 9, 2], [9], [11, 3, 3])]
EXPERTS = 6


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("experts")
    tiny_model(
        family="Qwen3Moe", num_experts=EXPERTS, num_experts_per_tok=2, moe_intermediate_size=16, norm_topk_prob=True
    ).save_pretrained(directory)
    return directory


def _engine(model_dir, *, batch_rows=8):
    return HfEngine(
        model_dir=str(model_dir), published_dtype="fp32", compute_dtype="fp32", device="cpu", sampling=SAMPLING,
        batch_rows=batch_rows, end_token_ids=(1, 2, 3, 4, 5), records_routing=True,
    )  # fmt: skip


def _drawn(engine):
    """Groups of which some begin while others are under way, and of which rows end and leave."""
    return [
        group(
            [
                dataclasses.replace(
                    rollout(row.token_ids, row.logprobs, float(row.token_ids.size % 2)),
                    routed_experts=row.routed_experts,
                )
                for row in rows
            ],
            prompt=PROMPTS[number],
            sequence=number + 1,
        )
        for number, rows in enumerate(generate_all(engine, PROMPTS, seeds=[1, 2, 3, 4], num_per_prompt=4))
    ]


def _tied(model_dir):
    """The model with routers that differ by rounding: near a tie it would choose otherwise."""
    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    prepare(model, gradient_checkpointing=False)
    return model


@pytest.mark.parametrize("batching", ["padded", "packed"])
def test_learner_takes_the_samplers_experts_where_routers_tie(model_dir, batching):
    engine, model = _engine(model_dir), _tied(model_dir)
    torch.manual_seed(3)
    for mine, theirs in zip(routers_of(engine.model), routers_of(model), strict=True):
        torch.nn.init.normal_(theirs.weight, std=3e-7)
        torch.nn.init.normal_(mine.weight, std=3e-7)
    groups = [open_group(seal(one)) for one in _drawn(engine)]
    batch = build_batch(groups, loss=GepoConfig())
    micro_batch = collate(batch.sequences, batching=batching)
    sampler_N = torch.from_numpy(np.concatenate([one.sampler_logprobs for one in batch.sequences]))

    replay = RouterReplay(model)
    with torch.no_grad():
        own_N, _ = learner_logprobs(model, micro_batch, temperature=1.0)
        replay.use(micro_batch.routed)
        replayed_N, _ = learner_logprobs(model, micro_batch, temperature=1.0)

    assert (own_N - sampler_N).abs().mean() > 0.1
    assert (replayed_N - sampler_N).abs().max() < 1e-5


def test_rollouts_without_a_record_are_routed_by_the_learner(model_dir):
    drawn = _drawn(_engine(model_dir))
    bare = [dataclasses.replace(one, routed_experts=b"") for one in drawn[0].rollouts]
    wrong = [
        dataclasses.replace(one, routed_experts=bytes([0, 1, 4, 5]) * (len(one.routed_experts) // 4))
        for one in drawn[1].rollouts
    ]
    mixed = [dataclasses.replace(drawn[0], rollouts=tuple(bare)), dataclasses.replace(drawn[1], rollouts=tuple(wrong))]
    model = _tied(model_dir)
    replay = RouterReplay(model)
    found = []
    for groups in (mixed, drawn[:2]):
        batch = build_batch(groups, loss=GepoConfig())
        micro_batch = collate(batch.sequences, batching="packed")
        replay.use(micro_batch.routed if groups is mixed else None)
        with torch.no_grad():
            found.append(learner_logprobs(model, micro_batch, temperature=1.0)[0])
    num_bare = sum(one.token_ids.size for one in bare)
    assert (found[0] - found[1])[:num_bare].abs().max() < 1e-6
    assert (found[0] - found[1])[num_bare:].abs().mean() > 0.1


def test_step_that_fails_leaves_no_record_for_the_next_caller_of_the_model(model_dir):
    groups = [queued(one) for one in _drawn(_engine(model_dir))]
    backend = TorchBackend(
        model_dir=model_dir,
        config=TorchBackendConfig(lr=1e-3),
        loss=CustomLossConfig(function="tests.support.custom_losses:raising"),
        sampling=SAMPLING,
        replays_routing=True,
    )
    micro_batch = collate(
        build_batch([groups[0].group], loss=GepoConfig(), head_version=1).sequences, batching="padded"
    )
    expected_N, _ = learner_logprobs(backend.torch_model, micro_batch, temperature=1.0)

    with pytest.raises(ConfigError, match="no such rollout"):
        backend.train_step(groups, head_version=1, step=1)

    actual_N, _ = learner_logprobs(backend.torch_model, micro_batch, temperature=1.0)
    assert torch.equal(actual_N, expected_N)


def test_record_is_that_of_each_row_alone_and_scoring_meanwhile_is_not_in_it(model_dir):
    engine = _engine(model_dir, batch_rows=64)
    requests = [Request(key=key, prompt=prompt, seed=key, num_completions=3) for key, prompt in enumerate(PROMPTS)]
    alone = [generate_all(engine, [one.prompt], seeds=[one.seed], num_per_prompt=3)[0] for one in requests]
    text = ScoredText(prompt=PROMPTS[1], completion=PROMPTS[1])
    is_over = threading.Event()

    def score():
        while not is_over.is_set():
            engine.score([text])

    thread = threading.Thread(target=score)
    thread.start()
    try:
        engine.submit(requests[0])
        finished = engine.collect()
        for one in requests[1:]:
            engine.submit(one)
        while ended := engine.collect():
            finished += ended
    finally:
        is_over.set()
        thread.join()
    together = in_order(finished, requests)
    for prompt, expected, actual in zip(PROMPTS, alone, together, strict=True):
        for one, other in zip(expected, actual, strict=True):
            assert np.array_equal(one.token_ids, other.token_ids)
            assert len(other.routed_experts) == (prompt.size + other.token_ids.size - 1) * 4
            assert one.routed_experts == other.routed_experts


def test_record_of_a_later_turn_has_its_whole_prompt(model_dir):
    engine = _engine(model_dir)
    prompt = PROMPTS[0]
    for key in range(2):
        engine.submit(Request(key=key, prompt=prompt, seed=1, num_completions=1, may_continue=True))
        (one,) = (ended.completion for ended in engine.collect())
        assert len(one.routed_experts) == (prompt.size + one.token_ids.size - 1) * 4
        prompt = np.concatenate([prompt, one.token_ids, PROMPTS[1]])


def test_evaluations_have_no_record(model_dir):
    engine = _engine(model_dir)
    greedy = SamplingSemantics(temperature=1.0, top_p=1.0, top_k=1, max_new_tokens=4, logprob_mode=LogprobMode.RAW)
    engine.submit(Request(key=1, prompt=PROMPTS[0], seed=1, num_completions=1, sampling=greedy))
    assert [one.completion.routed_experts for one in engine.collect()] == [b""]


def test_learner_refuses_records_of_other_models(model_dir):
    drawn = _drawn(_engine(model_dir))[0]
    shape = routing_shape(_tied(model_dir))
    limits = Limits(group_size=4, vocab_size=VOCAB_SIZE, max_sequence_tokens=0, routing=shape)
    assert judge(drawn, limits) == SOUND

    def with_record(record):
        return dataclasses.replace(
            drawn, rollouts=(dataclasses.replace(drawn.rollouts[0], routed_experts=record), *drawn.rollouts[1:])
        )

    good = drawn.rollouts[0].routed_experts
    for record, words in (
        (good[:-1], "bytes for"),
        (good + good, "bytes for"),
        (bytes([EXPERTS]) + good[1:], f"expert {EXPERTS}"),
        (good[:1] + good[:1] + good[2:], "twice"),
    ):
        assert words in judge(with_record(record), limits).detail
    assert "no routing is replayed" in judge(drawn, dataclasses.replace(limits, routing=None)).detail


def test_record_travels_and_is_part_of_the_groups_bytes(model_dir):
    drawn = _drawn(_engine(model_dir))[0]
    sealed = canonical(rollout_pb2.Group.FromString(seal(drawn).data))
    opened = open_group(sealed)
    assert [one.routed_experts for one in opened.rollouts] == [one.routed_experts for one in drawn.rollouts]
    assert sealed.data == seal(drawn).data


@pytest.mark.parametrize(
    "backend", [{"kind": "deepspeed"}, {"kind": "torch", "compile": True}, {"kind": "fsdp2", "sequence_parallel": 2}]
)
def test_backends_that_do_not_replay_are_refused(backend):
    with pytest.raises(ValueError, match=r"sampling\.router_replay"):
        LearnerConfig.model_validate(
            {"model_dir": "m", "sampling": {"router_replay": "rollout"}, "backend": {"lr": 1e-3, **backend}}
        )


def test_replay_and_the_checks_of_sites_that_are_not_trusted_are_refused_together():
    table = {"model_dir": "m", "sampling": {"router_replay": "rollout"}, "backend": {"lr": 1e-3}}
    table |= {"verification": {"logprob_floor": 0.05}}

    with pytest.raises(ValueError, match=r"sampling\.router_replay with verification\.logprob_floor"):
        LearnerConfig.model_validate(table)
    LearnerConfig.model_validate(table | {"verification": {"logprob_floor": 0.0}})
    LearnerConfig.model_validate(table | {"sampling": {"router_replay": "none"}})


def test_engine_refuses_a_model_without_routers(tmp_path):
    tiny_model().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"sampling\.router_replay"):
        _engine(tmp_path)
