"""Groups field by field: how programs wrote and read them before they were sealed, which stores and outboxes remember."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from heterorl.common.errors import InvalidRequest
from heterorl.common.process.tracing import well_formed
from heterorl.common.types.common import Digest, Int32Array, SiteId
from heterorl.common.types.rollout import FinishReason, Group, GroupId, RewardPart, Rollout, VersionSpan
from heterorl.common.wire.common import MAX_INT32, MAX_INT64
from heterorl.v1 import common_pb2, rollout_pb2

_FINISH = {
    FinishReason.EOS: rollout_pb2.FINISH_REASON_EOS,
    FinishReason.LENGTH: rollout_pb2.FINISH_REASON_LENGTH,
}
_FINISH_OF = {pb: value for value, pb in _FINISH.items()}


def group_to_bytes(value: Group) -> bytes:
    return group_to_pb(value).SerializeToString(deterministic=True)


def cleaned(message: rollout_pb2.Group) -> bytes:
    """What a store kept of a message."""
    return group_to_bytes(group_from_pb(message))


def _ids_from_pb(values: Sequence[int]) -> Int32Array:
    # An id beyond int32 is clamped, not wrapped: it stays outside every vocabulary and is refused as such.
    wide = np.fromiter(values, dtype=np.uint32, count=len(values))
    return np.minimum(wide, MAX_INT32).astype(np.int32)


def _part_to_pb(value: RewardPart) -> rollout_pb2.RewardPart:
    weight = None if value.weight == 1.0 else value.weight
    return rollout_pb2.RewardPart(name=value.name, value=value.value, weight=weight, signature=value.signature)


def _part_from_pb(message: rollout_pb2.RewardPart) -> RewardPart:
    weight = message.weight if message.HasField("weight") else 1.0
    return RewardPart(name=message.name, value=message.value, weight=weight, signature=message.signature)


def _rollout_to_pb(value: Rollout) -> rollout_pb2.Rollout:
    # .tolist(): protobuf takes lists three times faster than arrays.
    return rollout_pb2.Rollout(
        token_ids=value.token_ids.tolist(),
        sampler_logprobs=value.sampler_logprobs.tolist(),
        spans=[rollout_pb2.VersionSpan(version=s.version, start=s.start, end=s.end) for s in value.spans],
        reward=value.reward,
        reward_parts=[_part_to_pb(part) for part in value.reward_parts],
        finish_reason=_FINISH[value.finish_reason],
    )


def _rollout_from_pb(message: rollout_pb2.Rollout) -> Rollout:
    finish_reason = _FINISH_OF.get(message.finish_reason)
    if finish_reason is None:
        raise InvalidRequest(f"rollout.finish_reason: {message.finish_reason} is not a reason")
    num_logprobs = len(message.sampler_logprobs)
    logprobs = np.fromiter(message.sampler_logprobs, dtype=np.float32, count=num_logprobs)
    return Rollout(
        token_ids=_ids_from_pb(message.token_ids),
        sampler_logprobs=logprobs,
        spans=tuple(VersionSpan(version=s.version, start=s.start, end=s.end) for s in message.spans),
        reward=message.reward,
        reward_parts=tuple(_part_from_pb(part) for part in message.reward_parts),
        finish_reason=finish_reason,
    )


def group_to_pb(value: Group) -> rollout_pb2.Group:
    return rollout_pb2.Group(
        id=common_pb2.GroupId(site=value.id.site, incarnation=value.id.incarnation, sequence=value.id.sequence),
        assignment=value.assignment,
        prompt_index=value.prompt_index,
        prompt_token_ids=value.prompt_token_ids.tolist(),
        rollouts=[_rollout_to_pb(rollout) for rollout in value.rollouts],
        oldest_version=value.oldest_version,
        state_root=value.state_root,
        generation_s=value.generation_s,
        is_seeded=value.is_seeded,
        traceparent=value.trace,
    )


def group_from_pb(message: rollout_pb2.Group) -> Group:
    return Group(
        id=GroupId(
            site=SiteId(message.id.site),
            incarnation=message.id.incarnation,
            sequence=min(message.id.sequence, MAX_INT64),
        ),
        assignment=min(message.assignment, MAX_INT64),
        prompt_index=min(message.prompt_index, MAX_INT64),
        prompt_token_ids=_ids_from_pb(message.prompt_token_ids),
        rollouts=tuple(_rollout_from_pb(rollout) for rollout in message.rollouts),
        oldest_version=message.oldest_version,
        state_root=Digest(message.state_root),
        generation_s=message.generation_s,
        is_seeded=message.is_seeded,
        trace=well_formed(message.traceparent),
    )
