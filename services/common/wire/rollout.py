"""Protobuf <-> groups, work, outcomes of pushes, what failed a check. Canonical bytes of a group."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from google.protobuf.message import DecodeError

from heterorl.common.errors import InvalidRequest, MalformedPayload
from heterorl.common.process.tracing import well_formed
from heterorl.common.types.common import Digest, Float32Array, Int32Array, SiteId
from heterorl.common.types.rollout import (
    DropReason,
    FinishReason,
    Group,
    GroupId,
    PushOutcome,
    PushStatus,
    QueuedGroup,
    Rejection,
    RewardPart,
    Rollout,
    VersionSpan,
    WorkAssignment,
    WorkGrant,
)
from heterorl.common.wire.common import MAX_INT32, MAX_INT64
from heterorl.v1 import common_pb2, rollout_pb2

_FINISH = {
    FinishReason.EOS: rollout_pb2.FINISH_REASON_EOS,
    FinishReason.LENGTH: rollout_pb2.FINISH_REASON_LENGTH,
}


_FINISH_OF = {pb: value for value, pb in _FINISH.items()}


def group_id_to_pb(value: GroupId) -> common_pb2.GroupId:
    """Convert a group's identity."""
    return common_pb2.GroupId(site=value.site, incarnation=value.incarnation, sequence=value.sequence)


def group_id_from_pb(message: common_pb2.GroupId) -> GroupId:
    """Convert a group's identity."""
    return GroupId(
        site=SiteId(message.site), incarnation=message.incarnation, sequence=min(message.sequence, MAX_INT64)
    )


def _ids_from_pb(values: Sequence[int]) -> Int32Array:
    # An id beyond int32 is clamped, not wrapped: it stays outside every vocabulary and is refused as such.
    wide = np.fromiter(values, dtype=np.uint32, count=len(values))
    return np.minimum(wide, MAX_INT32).astype(np.int32)


def _rollout_to_pb(value: Rollout) -> rollout_pb2.Rollout:
    # .tolist(): protobuf takes lists three times faster than arrays.
    return rollout_pb2.Rollout(
        token_ids=value.token_ids.tolist(),
        sampler_logprobs=value.sampler_logprobs.tolist(),
        spans=[rollout_pb2.VersionSpan(version=s.version, start=s.start, end=s.end) for s in value.spans],
        reward=value.reward,
        reward_parts=[rollout_pb2.RewardPart(name=p.name, value=p.value) for p in value.reward_parts],
        finish_reason=_FINISH[value.finish_reason],
    )


def _rollout_from_pb(message: rollout_pb2.Rollout) -> Rollout:
    finish_reason = _FINISH_OF.get(message.finish_reason)
    if finish_reason is None:
        raise InvalidRequest(f"rollout.finish_reason: {message.finish_reason} is not a reason")
    num_logprobs = len(message.sampler_logprobs)
    logprobs: Float32Array = np.fromiter(message.sampler_logprobs, dtype=np.float32, count=num_logprobs)
    return Rollout(
        token_ids=_ids_from_pb(message.token_ids),
        sampler_logprobs=logprobs,
        spans=tuple(VersionSpan(version=s.version, start=s.start, end=s.end) for s in message.spans),
        reward=message.reward,
        reward_parts=tuple(RewardPart(name=p.name, value=p.value) for p in message.reward_parts),
        finish_reason=finish_reason,
    )


def group_to_pb(value: Group) -> rollout_pb2.Group:
    """Convert a group."""
    return rollout_pb2.Group(
        id=group_id_to_pb(value.id),
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
    """Convert a group.

    Raises:
        InvalidRequest: an enum value is unknown.
    """
    return Group(
        id=group_id_from_pb(message.id),
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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReceivedGroup(Group):
    """A group with its bytes, made where that holds up nobody."""

    data: bytes


def received(value: Group) -> ReceivedGroup:
    """Serialise a group now rather than on the store's thread."""
    return ReceivedGroup(**{name.name: getattr(value, name.name) for name in fields(value)}, data=group_to_bytes(value))


def group_to_bytes(value: Group) -> bytes:
    """Serialise a group for a durable spool or queue."""
    if isinstance(value, ReceivedGroup):
        return value.data
    return group_to_pb(value).SerializeToString(deterministic=True)


def group_from_bytes(data: bytes) -> Group:
    """Read what `group_to_bytes` wrote.

    Raises:
        MalformedPayload: the bytes are not a group.
    """
    try:
        return group_from_pb(rollout_pb2.Group.FromString(data))
    except DecodeError as error:
        raise MalformedPayload(f"not a group: {error}") from error


_STATUS = {status: rollout_pb2.PushStatus.Value(f"PUSH_STATUS_{status.name}") for status in PushStatus}


_REASON = {reason: rollout_pb2.DropReason.Value(f"DROP_REASON_{reason.name}") for reason in DropReason}


_STATUS_OF = {pb: value for value, pb in _STATUS.items()}


_REASON_OF = {pb: value for value, pb in _REASON.items()}


def outcome_to_pb(value: PushOutcome) -> rollout_pb2.PushGroupsResponse:
    """Convert the outcome of one group."""
    return rollout_pb2.PushGroupsResponse(
        id=group_id_to_pb(value.id),
        status=_STATUS[value.status],
        reason=_REASON[value.reason] if value.reason else rollout_pb2.DROP_REASON_UNSPECIFIED,
        message=value.message,
        retry_after_s=value.retry_after_s,
    )


def outcome_from_pb(message: rollout_pb2.PushGroupsResponse) -> PushOutcome:
    """Convert the outcome of one group; a status of a newer peer reads as RETRY, so that nothing is forgotten."""
    return PushOutcome(
        id=group_id_from_pb(message.id),
        status=_STATUS_OF.get(message.status, PushStatus.RETRY),
        reason=_REASON_OF.get(message.reason),
        message=message.message,
        retry_after_s=message.retry_after_s,
    )


def reason_to_pb(value: DropReason) -> rollout_pb2.DropReason.ValueType:
    """Convert a drop reason."""
    return _REASON[value]


def reason_from_pb(message: rollout_pb2.DropReason.ValueType) -> DropReason | None:
    """Convert a drop reason; None when it is not stated or newer than this program."""
    return _REASON_OF.get(message)


def work_to_pb(value: WorkAssignment) -> rollout_pb2.WorkAssignment:
    """Convert a work assignment."""
    return rollout_pb2.WorkAssignment(
        id=value.id, prompt_index=value.prompt_index, seed=value.seed, lease_s=value.lease_s
    )


def work_from_pb(message: rollout_pb2.WorkAssignment) -> WorkAssignment:
    """Convert a work assignment."""
    return WorkAssignment(id=message.id, prompt_index=message.prompt_index, seed=message.seed, lease_s=message.lease_s)


def queued_to_pb(value: QueuedGroup) -> rollout_pb2.StreamGroupsResponse:
    """Group streamed to the learner -> message."""
    return rollout_pb2.StreamGroupsResponse(
        group=group_to_pb(value.group),
        policy_age_s=value.policy_age_s,
        queue_age_s=value.queue_age_s,
        seed=value.seed,
        flavour=value.flavour,
    )


def queued_from_pb(message: rollout_pb2.StreamGroupsResponse) -> QueuedGroup:
    """Message -> group streamed to the learner."""
    return QueuedGroup(
        group=group_from_pb(message.group),
        policy_age_s=message.policy_age_s,
        queue_age_s=message.queue_age_s,
        seed=message.seed if message.HasField("seed") else None,
        flavour=message.flavour,
    )


def work_grant_to_pb(value: WorkGrant) -> rollout_pb2.LeaseWorkResponse:
    """Convert a grant of work."""
    return rollout_pb2.LeaseWorkResponse(
        assignments=[work_to_pb(assignment) for assignment in value.assignments],
        reason=value.reason,
        retry_after_s=value.retry_after_s,
    )


def work_grant_from_pb(message: rollout_pb2.LeaseWorkResponse) -> WorkGrant:
    """Convert a grant of work."""
    return WorkGrant(
        assignments=tuple(work_from_pb(assignment) for assignment in message.assignments),
        reason=message.reason,
        retry_after_s=message.retry_after_s,
    )


def rejections_to_pb(epoch: int, values: Sequence[Rejection]) -> rollout_pb2.RejectGroupsRequest:
    """Convert groups that failed a check."""
    return rollout_pb2.RejectGroupsRequest(
        epoch=epoch,
        rejections=[
            rollout_pb2.Rejection(id=group_id_to_pb(value.id), reason=reason_to_pb(value.reason), detail=value.detail)
            for value in values
        ],
    )


def rejections_from_pb(message: rollout_pb2.RejectGroupsRequest) -> list[Rejection]:
    """Convert groups that failed a check.

    Raises:
        InvalidRequest: a reason is not stated.
    """
    rejections = []
    for entry in message.rejections:
        reason = reason_from_pb(entry.reason)
        if reason is None:
            raise InvalidRequest("rejections.reason: not stated")
        rejections.append(Rejection(id=group_id_from_pb(entry.id), reason=reason, detail=entry.detail))
    return rejections


_LOG = logging.getLogger(__name__)


def push_to_pb(group: Group, *, limit_bytes: int) -> rollout_pb2.PushGroupsRequest:
    """The message of a group; of one that no message has room for, its shell.

    The shell has no rollouts, so the coordinator refuses it for good and counts it. Were it never sent, everything
    behind it in the outbox would wait for ever; were it dropped here, its sequence would be missing for ever.
    """
    message = rollout_pb2.PushGroupsRequest(group=group_to_pb(group))
    if message.ByteSize() <= limit_bytes:
        return message
    _LOG.error(
        "group %d of site %s is lost: its message has %d bytes, the coordinator's max_message_bytes is %d",
        group.id.sequence,
        group.id.site,
        message.ByteSize(),
        limit_bytes,
    )
    shell = dataclasses.replace(group, rollouts=(), prompt_token_ids=np.zeros(0, np.int32))
    return rollout_pb2.PushGroupsRequest(group=group_to_pb(shell))
