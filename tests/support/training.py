"""Tiny models and groups for tests of the learner."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import transformers
from torch import nn

from heterorl.common.model.model_loading import BUILDING
from heterorl.common.types.common import Digest, LogprobMode, SamplingSemantics, SiteId
from heterorl.common.types.rollout import GIVEN, FinishReason, Group, GroupId, QueuedGroup, Rollout, Span
from heterorl.learner.train.model import prepare

VOCAB_SIZE = 50
SAMPLING = SamplingSemantics(temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=16, logprob_mode=LogprobMode.PROCESSED)


def tiny_model(
    *,
    seed: int = 0,
    is_tied: bool = True,
    dtype: torch.dtype = torch.float32,
    family: str = "Qwen3",
    num_key_value_heads: int = 2,
    max_position_embeddings: int = 128,
    **settings: Any,
) -> nn.Module:
    """A random two-layer model of about 20 thousand parameters, ready to train; `settings` go into its configuration."""
    # A copy: some write into their tables.
    settings = copy.deepcopy(settings)
    config = getattr(transformers, f"{family}Config")(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=num_key_value_heads,
        head_dim=8,
        max_position_embeddings=max_position_embeddings,
        initializer_range=0.3,
        tie_word_embeddings=is_tied,
        attn_implementation="sdpa",
        **settings,
    )
    with BUILDING:
        torch.manual_seed(seed)
        model: nn.Module = getattr(transformers, f"{family}ForCausalLM")(config)
    if dtype is torch.float64:
        _widen_norms(model)
    prepare(model, gradient_checkpointing=False)
    return model.to(dtype)


def _widen_norms(model: nn.Module) -> None:
    # transformers' norms round to fp32, which turns differences of 1e-16 into 1e-7.
    for parent in list(model.modules()):
        children: list[tuple[str, Any]] = list(parent.named_children())
        for name, child in children:
            if type(child).__name__.endswith("RMSNorm"):
                norm = nn.RMSNorm(child.weight.shape[0], eps=child.variance_epsilon)
                norm.weight = child.weight
                setattr(parent, name, norm)


def rollout(token_ids: Sequence[int], logprobs: Sequence[float], reward: float, *, version: int = 1) -> Rollout:
    """One completion, all of one version."""
    spans = (Span(version=version, start=0, end=len(token_ids)),) if len(token_ids) else ()
    return Rollout(
        token_ids=np.array(token_ids, np.int32),
        sampler_logprobs=np.array(logprobs, np.float32),
        spans=spans,
        reward=reward,
        reward_parts=(),
        finish_reason=FinishReason.EOS,
    )


def group(
    rollouts: Sequence[Rollout], *, prompt: Sequence[int] = (1, 2, 3), sequence: int = 1, version: int = 1
) -> Group:
    """One prompt's rollouts."""
    return Group(
        id=GroupId(site=SiteId("eu-1"), incarnation="b1946ac9", sequence=sequence),
        assignment=sequence,
        prompt_index=sequence,
        prompt_token_ids=np.array(prompt, np.int32),
        rollouts=tuple(rollouts),
        oldest_version=version,
        state_root=Digest("0" * 64),
        generation_s=1.0,
    )


def random_groups(
    num_groups: int = 4, *, group_size: int = 4, seed: int = 0, max_tokens: int = 12, version: int = 1
) -> list[QueuedGroup]:
    """Groups of random lengths, rewards and log-probs near those of an untrained model."""
    rng = np.random.default_rng(seed)
    result = []
    for number in range(num_groups):
        members = []
        for _ in range(group_size):
            length = int(rng.integers(1, max_tokens + 1))
            tokens = rng.integers(0, VOCAB_SIZE, length).tolist()
            members.append(
                rollout(tokens, (-1.0 - 4.0 * rng.random(length)).tolist(), float(rng.random()), version=version)
            )
        prompt = rng.integers(0, VOCAB_SIZE, int(rng.integers(1, 7))).tolist()
        result.append(queued(group(members, prompt=prompt, sequence=number + 1, version=version)))
    return result


def random_trajectories(
    num_groups: int = 4, *, group_size: int = 3, seed: int = 0, sequences: str = "mixed", version: int = 1
) -> list[QueuedGroup]:
    """Groups of three turns; the history goes on (one), is cut where it is (cut), or is written anew (new, mixed)."""
    rng = np.random.default_rng(seed)
    result = []
    for number in range(num_groups):
        prompt = rng.integers(0, VOCAB_SIZE, int(rng.integers(1, 5))).tolist()
        members = [_trajectory(rng, len(prompt), sequences, version) for _ in range(group_size)]
        result.append(queued(group(members, prompt=prompt, sequence=number + 1, version=version)))
    return result


def _trajectory(rng: np.random.Generator, known: int, sequences: str, version: int) -> Rollout:
    ids: list[int] = []
    spans: list[Span] = []
    for turn in range(3):
        if turn:
            count = int(rng.integers(1, 4))
            is_new = sequences == "new" or (sequences == "mixed" and rng.random() < 0.5)
            keeps = known if sequences == "cut" else int(rng.integers(0, known + 1)) if is_new else None
            spans.append(Span(version=GIVEN, start=len(ids), end=len(ids) + count, keeps=keeps))
            ids += rng.integers(0, VOCAB_SIZE, count).tolist()
            known = count + (known if keeps is None else keeps)
        count = int(rng.integers(1, 5))
        spans.append(Span(version=version, start=len(ids), end=len(ids) + count))
        ids += rng.integers(0, VOCAB_SIZE, count).tolist()
        known += count
    num_drawn = sum(span.end - span.start for span in spans if span.is_drawn)
    return Rollout(
        token_ids=np.array(ids, np.int32),
        sampler_logprobs=(-1.0 - 4.0 * rng.random(num_drawn)).astype(np.float32),
        spans=tuple(spans),
        reward=float(rng.integers(0, 3)) / 2,
        reward_parts=(),
        finish_reason=FinishReason.LENGTH,
    )


def queued(value: Group, *, policy_age_s: float = 5.0) -> QueuedGroup:
    """The group as the coordinator streams it."""
    return QueuedGroup(group=value, policy_age_s=policy_age_s, queue_age_s=1.0)


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """An independent copy of all parameters."""
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def is_identical(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Whether two states are equal bit for bit."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
