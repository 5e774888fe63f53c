"""The learner's lease -> messages; the way back is in `messages`."""

from __future__ import annotations

from heterorl.common.types.values import LeaseGrant
from heterorl.v1 import policy_pb2


def grant_to_pb(value: LeaseGrant) -> policy_pb2.AcquireLeaseResponse:
    """Convert a new lease."""
    return policy_pb2.AcquireLeaseResponse(
        epoch=value.epoch,
        ttl_s=value.ttl_s,
        head_version=value.head_version,
        holder=value.holder,
        max_message_bytes=value.max_message_bytes,
        max_staleness_versions=value.max_staleness_versions,
    )


def renewal_to_pb(value: LeaseGrant) -> policy_pb2.RenewLeaseResponse:
    """Convert a renewed lease."""
    return policy_pb2.RenewLeaseResponse(
        epoch=value.epoch,
        ttl_s=value.ttl_s,
        head_version=value.head_version,
        holder=value.holder,
        rollback_to=None if value.rollback_to < 0 else value.rollback_to,
        max_staleness_versions=value.max_staleness_versions,
    )
