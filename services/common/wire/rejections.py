"""Groups that failed a check <-> their message."""

from __future__ import annotations

from collections.abc import Sequence

from heterorl.common.api import Rejection
from heterorl.common.errors import InvalidRequest
from heterorl.common.wire.groups import group_id_from_pb, group_id_to_pb
from heterorl.common.wire.messages import reason_from_pb, reason_to_pb
from heterorl.v1 import rollout_pb2


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
