"""Groups written number by number: what the columns of canonical bytes must be, by another way than the product's."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterable

import numpy as np
from hypothesis import strategies as st

from heterorl.common.types.rollout import FinishReason, Group, GroupId, RewardPart, Rollout, Span
from heterorl.common.wire.common_messages import MAX_INT64
from heterorl.v1 import common_pb2, rollout_pb2

_TRACE = f"00-{'a1' * 16}-{'b2' * 8}-01"
_ENDINGS = {
    "eos": 1, "length": 2, "turns": 3, "context": 4, "seconds": 5,
    "environment_failed": 16, "tool_lost": 17, "reward_failed": 18, "engine_failed": 19,
}  # fmt: skip


def _packed(kind: str, numbers: Iterable[float]) -> bytes:
    return b"".join(struct.pack(f"<{kind}", number) for number in numbers)


def group_to_pb(value: Group) -> rollout_pb2.Group:
    rollouts = value.rollouts
    parts = [part for rollout in rollouts for part in rollout.reward_parts]
    spans = [span for rollout in rollouts for span in rollout.spans]
    ids = value.prompt_token_ids.tolist() + [token for rollout in rollouts for token in rollout.token_ids.tolist()]
    width = max(1, (max(ids, default=0).bit_length() + 7) // 8)
    names: list[str] = []
    for part in parts:
        if part.name not in names:
            names.append(part.name)
    message = rollout_pb2.Group(
        id=common_pb2.GroupId(site=value.id.site, incarnation=value.id.incarnation, sequence=value.id.sequence),
        assignment=value.assignment,
        prompt_index=value.prompt_index,
        oldest_version=value.oldest_version,
        state_root=value.state_root,
        generation_s=value.generation_s,
        is_seeded=value.is_seeded,
        traceparent=value.trace,
        id_bytes=width,
        token_ids=b"".join(token.to_bytes(width, "little") for token in ids),
        lengths=_packed("I", [value.prompt_token_ids.size, *(rollout.token_ids.size for rollout in rollouts)]),
        logprobs=_packed("f", [number for rollout in rollouts for number in rollout.sampler_logprobs.tolist()]),
        endings=_packed("B", [_ENDINGS[rollout.finish_reason.value] for rollout in rollouts]),
        span_counts=_packed("I", [len(rollout.spans) for rollout in rollouts]),
        span_versions=_packed("q", [span.version for span in spans]),
        span_lengths=_packed("I", [span.end - span.start for span in spans]),
        rewards=_packed("d", [rollout.reward for rollout in rollouts]),
        part_counts=_packed("I", [len(rollout.reward_parts) for rollout in rollouts]),
        part_names="\n".join(names),
        part_name_positions=_packed("H", [names.index(part.name) for part in parts]),
        part_values=_packed("d", [part.value for part in parts]),
    )
    if any(span.keeps is not None for span in spans):
        message.span_keeps = _packed("I", [0 if span.keeps is None else 1 + span.keeps for span in spans])
    if any(part.weight != 1.0 for part in parts):
        message.part_weights = _packed("d", [part.weight for part in parts])
    if any(part.signature for part in parts):
        message.part_signatures = b"".join(part.signature or bytes(64) for part in parts)
    if any(rollout.routed_experts for rollout in rollouts):
        message.record_lengths = _packed("I", [len(rollout.routed_experts) for rollout in rollouts])
        message.routed_experts = b"".join(rollout.routed_experts for rollout in rollouts)
    return message


def group_to_bytes(value: Group) -> bytes:
    return group_to_pb(value).SerializeToString(deterministic=True)


def push_of(*groups: rollout_pb2.Group) -> rollout_pb2.PushGroupsRequest:
    """A push of messages, whatever is in them."""
    parts = [group.SerializeToString(deterministic=True) for group in groups]
    return rollout_pb2.PushGroupsRequest(groups=b"".join(parts), sizes=_packed("I", map(len, parts)))


_ids = st.integers(0, 8) | st.integers(0, 300) | st.integers(0, 2**31 - 1)
_parts = st.builds(
    RewardPart,
    name=st.text(st.characters(exclude_categories=["Cc", "Cs"]), max_size=6),
    value=st.floats(),
    weight=st.sampled_from([0.0, 0.5, 1.0, -2.0]),
    signature=st.just(b"") | st.binary(min_size=64, max_size=64).filter(any),
)


@st.composite
def _rollouts(draw):
    tokens = draw(st.lists(_ids, max_size=40))
    cuts = sorted({0, len(tokens), *draw(st.lists(st.integers(0, len(tokens)), max_size=2))})
    spans = tuple(
        Span(version=draw(st.integers(-1, 2**40)), start=start, end=end, keeps=draw(st.none() | st.integers(0, 90)))
        for start, end in itertools.pairwise(cuts)
    )
    count = sum(span.end - span.start for span in spans if span.version >= 0)
    return Rollout(
        token_ids=np.array(tokens, np.int32),
        sampler_logprobs=np.array(draw(st.lists(st.floats(width=32), min_size=count, max_size=count)), "f4"),
        spans=spans,
        reward=draw(st.floats()),
        reward_parts=tuple(draw(st.lists(_parts, max_size=3))),
        finish_reason=draw(st.sampled_from(FinishReason)),
        routed_experts=draw(st.binary(max_size=5)),
    )


GROUPS = st.builds(
    Group,
    id=st.builds(GroupId, site=st.text(max_size=6), incarnation=st.text(max_size=6), sequence=st.integers(0, MAX_INT64)),
    assignment=st.integers(0, MAX_INT64),
    prompt_index=st.integers(0, MAX_INT64),
    prompt_token_ids=st.lists(_ids, max_size=40).map(lambda numbers: np.array(numbers, np.int32)),
    rollouts=st.lists(_rollouts(), max_size=3).map(tuple),
    oldest_version=st.integers(-1, 2**40),
    state_root=st.text(max_size=6),
    generation_s=st.floats(),
    is_seeded=st.booleans(),
    trace=st.sampled_from(["", _TRACE]),
)  # fmt: skip
"""Groups that a sampler of this program can make, and many that no contract allows."""
