"""Protobuf <-> groups on their way, work, outcomes of pushes, what failed a check."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
from google.protobuf.message import DecodeError

from heterorl.common.errors import InvalidRequest
from heterorl.common.types.common import SiteId, peer_words
from heterorl.common.types.rollout import (
    DropReason,
    GroupId,
    LeasedGroup,
    PushOutcome,
    PushStatus,
    QueuedGroup,
    Rejection,
    ReturnReason,
    SealedGroup,
    WorkAssignment,
    WorkGrant,
)
from heterorl.common.wire.common_messages import MAX_INT64, to_message, to_value
from heterorl.common.wire.evaluation_messages import spec_from_pb, spec_to_pb
from heterorl.common.wire.seal import open_group, read_sealed, shell_of
from heterorl.v1 import common_pb2, rollout_pb2

_LOG = logging.getLogger(__name__)
TOGETHER_BYTES = 1 << 18
"""Most bytes of several groups in one message; a larger group has its own."""
FRAME_BYTES = 16
"""Overhead of a message: two tags and lengths."""
SIZE_BYTES = 4
"""Bytes of a group's size in the message."""


def group_id_to_pb(value: GroupId) -> common_pb2.GroupId:
    return common_pb2.GroupId(site=value.site, incarnation=value.incarnation, sequence=value.sequence)


def group_id_from_pb(message: common_pb2.GroupId) -> GroupId:
    return GroupId(
        site=SiteId(message.site), incarnation=message.incarnation, sequence=min(message.sequence, MAX_INT64)
    )


_STATUS = {status: rollout_pb2.PushStatus.Value(f"PUSH_STATUS_{status.name}") for status in PushStatus}
_REASON = {reason: rollout_pb2.DropReason.Value(f"DROP_REASON_{reason.name}") for reason in DropReason}
_RETURN_REASON = {reason: rollout_pb2.ReturnReason.Value(f"RETURN_REASON_{reason.name}") for reason in ReturnReason}
_STATUS_OF = {pb: value for value, pb in _STATUS.items()}
_REASON_OF = {pb: value for value, pb in _REASON.items()}
_RETURN_REASON_OF = {pb: value for value, pb in _RETURN_REASON.items()}


def outcomes_to_pb(values: Sequence[PushOutcome]) -> rollout_pb2.PushGroupsResponse:
    return rollout_pb2.PushGroupsResponse(outcomes=[outcome_to_pb(value) for value in values])


def outcomes_from_pb(message: rollout_pb2.PushGroupsResponse) -> list[PushOutcome]:
    return [outcome_from_pb(outcome) for outcome in message.outcomes]


def outcome_to_pb(value: PushOutcome) -> rollout_pb2.GroupOutcome:
    reason = None if value.reason is None else _REASON[value.reason]
    return to_message(
        rollout_pb2.GroupOutcome, value, id=group_id_to_pb(value.id), status=_STATUS[value.status], reason=reason
    )


def outcome_from_pb(message: rollout_pb2.GroupOutcome) -> PushOutcome:
    """Convert a group's outcome; a newer peer's status reads as RETRY, so no group is forgotten."""
    status = _STATUS_OF.get(message.status, PushStatus.RETRY)
    reason = _REASON_OF.get(message.reason)
    return to_value(PushOutcome, message, id=group_id_from_pb(message.id), status=status, reason=reason)


def reason_to_pb(value: DropReason) -> rollout_pb2.DropReason.ValueType:
    return _REASON[value]


def reason_from_pb(message: rollout_pb2.DropReason.ValueType) -> DropReason | None:
    """Convert a drop reason; None if it is not stated or newer than this program."""
    return _REASON_OF.get(message)


def return_reason_to_pb(value: ReturnReason | None) -> rollout_pb2.ReturnReason.ValueType:
    return rollout_pb2.RETURN_REASON_UNSPECIFIED if value is None else _RETURN_REASON[value]


def return_reason_from_pb(message: rollout_pb2.ReturnReason.ValueType) -> ReturnReason | None:
    """Convert a return reason; None if it is not stated or newer than this program."""
    return _RETURN_REASON_OF.get(message)


def leased_to_pb(value: LeasedGroup) -> rollout_pb2.StreamGroupsResponse:
    """Leased group -> message, around its sealed bytes."""
    return to_message(rollout_pb2.StreamGroupsResponse, value, without={"sealed"}, group=value.sealed.data)


def queued_from_pb(message: rollout_pb2.StreamGroupsResponse) -> QueuedGroup:
    """Message -> group in the learner's form; raises MalformedPayload if its bytes are not a group."""
    return to_value(QueuedGroup, message, group=open_group(read_sealed(message.group)), source="")


def opened(value: LeasedGroup) -> QueuedGroup:
    """The learner's form of a leased group, without a wire."""
    return QueuedGroup(
        group=open_group(value.sealed),
        policy_age_s=value.policy_age_s,
        queue_age_s=value.queue_age_s,
        seed=value.seed,
        variant=value.variant,
        wants_note=value.wants_note,
    )


def work_grant_to_pb(value: WorkGrant) -> rollout_pb2.LeaseWorkResponse:
    assignments = [to_message(rollout_pb2.WorkAssignment, assignment) for assignment in value.assignments]
    evaluation = None if value.evaluation is None else spec_to_pb(value.evaluation)
    return to_message(rollout_pb2.LeaseWorkResponse, value, assignments=assignments, evaluation=evaluation)


def work_grant_from_pb(message: rollout_pb2.LeaseWorkResponse) -> WorkGrant:
    """Convert a grant of work; raises InvalidRequest if the draws of its held-out prompts are invalid."""
    assignments = tuple(to_value(WorkAssignment, assignment) for assignment in message.assignments)
    evaluation = spec_from_pb(message.evaluation) if message.HasField("evaluation") else None
    return to_value(WorkGrant, message, assignments=assignments, evaluation=evaluation)


def rejections_to_pb(epoch: int, values: Sequence[Rejection]) -> rollout_pb2.RejectGroupsRequest:
    return rollout_pb2.RejectGroupsRequest(
        epoch=epoch,
        rejections=[
            rollout_pb2.Rejection(
                id=group_id_to_pb(value.id), reason=reason_to_pb(value.reason), detail=peer_words(value.detail)
            )
            for value in values
        ],
    )


def rejections_from_pb(message: rollout_pb2.RejectGroupsRequest) -> list[Rejection]:
    """Convert rejections; raises InvalidRequest if a reason is not stated."""
    rejections = []
    for entry in message.rejections:
        reason = reason_from_pb(entry.reason)
        if reason is None:
            raise InvalidRequest("rejections.reason: not stated")
        rejections.append(Rejection(id=group_id_from_pb(entry.id), reason=reason, detail=entry.detail))
    return rejections


def pushes_to_pb(
    groups: Sequence[SealedGroup], *, limit_bytes: int, limit_groups: int = 1
) -> list[tuple[rollout_pb2.PushGroupsRequest, int]]:
    """Messages of groups in order, each with its number of groups; small groups share a message.

    A group larger than any message is sent as its shell, without rollouts: the coordinator refuses it for good and
    counts its sequence. Otherwise it would block the outbox, or its sequence would be missing for ever.
    """
    pushed: list[tuple[rollout_pb2.PushGroupsRequest, int]] = []
    together: list[bytes] = []
    num_bytes = FRAME_BYTES
    for sealed in groups:
        data = sealed.data
        if FRAME_BYTES + SIZE_BYTES + len(data) > limit_bytes:
            _LOG.error(
                "group %d of site %s is lost: it has %d bytes, the coordinator's max_message_bytes is %d",
                sealed.id.sequence,
                sealed.id.site,
                len(data),
                limit_bytes,
            )
            data = shell_of(sealed)
        size = len(data) + SIZE_BYTES
        if together and (len(together) >= limit_groups or num_bytes + size > min(TOGETHER_BYTES, limit_bytes)):
            pushed.append(_push_of(together))
            together, num_bytes = [], FRAME_BYTES
        together.append(data)
        num_bytes += size
    return [*pushed, _push_of(together)] if together else pushed


def _push_of(groups: Sequence[bytes]) -> tuple[rollout_pb2.PushGroupsRequest, int]:
    sizes = np.array([len(data) for data in groups], "<u4").tobytes()
    return rollout_pb2.PushGroupsRequest(groups=b"".join(groups), sizes=sizes), len(groups)


def pushed_from_pb(message: rollout_pb2.PushGroupsRequest, *, limit_groups: int) -> list[rollout_pb2.Group]:
    """The groups of a push, in order; raises InvalidRequest for wrong sizes, too many groups, or no group."""
    if len(message.sizes) % SIZE_BYTES:
        raise InvalidRequest(f"sizes: {len(message.sizes)} bytes, {SIZE_BYTES} for each group")
    sizes = np.frombuffer(message.sizes, "<u4").tolist()
    if not 0 < len(sizes) <= limit_groups:
        raise InvalidRequest(f"sizes: {len(sizes)} groups, a message carries 1 to {limit_groups}")
    if sum(sizes) != len(message.groups):
        raise InvalidRequest(f"groups: {len(message.groups)} bytes, sizes states {sum(sizes)}")
    groups, start = [], 0
    for size in sizes:
        try:
            groups.append(rollout_pb2.Group.FromString(message.groups[start : start + size]))
        except DecodeError as error:
            raise InvalidRequest(f"groups: not a group: {error}") from error
        start += size
    return groups
