"""Protobuf <-> manifests, payloads, publications, plans of pulls, the learner's lease."""

from __future__ import annotations

import xxhash
from google.protobuf.message import DecodeError

from heterorl.common.errors import InvalidRequest, MalformedPayload
from heterorl.common.types.common import Digest, digest_field
from heterorl.common.types.policy import (
    LeaseGrant,
    Manifest,
    PayloadKind,
    PayloadRef,
    PlanKind,
    PublishRequest,
    PullPlan,
    VariantVersion,
)
from heterorl.common.wire.common_messages import (
    MAX_INT64,
    MAX_RUN_ID,
    bytes_digest,
    report_from_pb,
    report_to_pb,
    to_message,
    to_value,
)
from heterorl.common.wire.rollout_messages import group_id_from_pb, group_id_to_pb
from heterorl.v1 import policy_pb2

_PAYLOAD = {kind: policy_pb2.PayloadKind.Value(f"PAYLOAD_KIND_{kind.name}") for kind in PayloadKind}
_PAYLOAD_OF = {pb: value for value, pb in _PAYLOAD.items()}


def payload_to_pb(value: PayloadRef) -> policy_pb2.PayloadRef:
    return to_message(policy_pb2.PayloadRef, value, kind=_PAYLOAD[value.kind])


def payload_from_pb(message: policy_pb2.PayloadRef) -> PayloadRef:
    """Convert a payload's reference; raises InvalidRequest for a bad field."""
    kind = _PAYLOAD_OF.get(message.kind)
    if kind is None:
        raise InvalidRequest("payload.kind: not stated")
    if message.num_bytes > MAX_INT64:
        raise InvalidRequest(f"payload.num_bytes: {message.num_bytes} is beyond any file")
    # The only place where a payload's name enters; it becomes a file name.
    return to_value(PayloadRef, message, kind=kind, digest=digest_field("payload.digest", message.digest))


def manifest_to_bytes(value: Manifest) -> bytes:
    """Serialise a manifest, once, at its publisher."""
    payloads = [payload_to_pb(payload) for payload in value.payloads]
    return to_message(policy_pb2.Manifest, value, payloads=payloads).SerializeToString(deterministic=True)


def manifest_from_bytes(data: bytes) -> Manifest:
    """Read a manifest's exact bytes; raises MalformedPayload if they are none."""
    try:
        message = policy_pb2.Manifest.FromString(data)
        if len(message.run_id) > MAX_RUN_ID:
            # Recorded with each version that is used.
            raise InvalidRequest(f"run_id: {len(message.run_id)} characters, at most {MAX_RUN_ID}")
        return to_value(
            Manifest,
            message,
            payloads=tuple(payload_from_pb(payload) for payload in message.payloads),
            layout_id=digest_field("layout_id", message.layout_id),
            state_root=digest_field("state_root", message.state_root),
            parent_digest=digest_field("parent_digest", message.parent_digest) if message.parent_digest else "",
        )
    except (DecodeError, InvalidRequest) as error:
        raise MalformedPayload(f"not a manifest: {error}") from error


def manifest_digest(data: bytes) -> Digest:
    """Identity of a version: blake3 of the exact bytes of its manifest."""
    return bytes_digest(data)


_PLAN = {kind: policy_pb2.PlanKind.Value(f"PLAN_KIND_{kind.name}") for kind in PlanKind}
_PLAN_OF = {pb: value for value, pb in _PLAN.items()}


def frame_checksum(frame: bytes) -> int:
    """XXH3-64 of a frame: finds damage before the payload's digest does."""
    return xxhash.xxh3_64_intdigest(frame)


def grant_from_pb(message: policy_pb2.AcquireLeaseResponse | policy_pb2.RenewLeaseResponse) -> LeaseGrant:
    """Convert a lease: bounds at the first answer, rollback orders at renewals."""
    stated = {
        "max_staleness_versions": message.max_staleness_versions if message.HasField("max_staleness_versions") else -1
    }
    if isinstance(message, policy_pb2.AcquireLeaseResponse):
        stated["rollback_to"] = -1
    else:
        ordered = message.rollback_to if message.HasField("rollback_to") else -1
        stated |= {"rollback_to": ordered, "max_message_bytes": 0, "most_groups_per_version": 0}
    return to_value(LeaseGrant, message, **stated)


def plan_to_pb(value: PullPlan) -> policy_pb2.PlanPullResponse:
    payloads = [payload_to_pb(payload) for payload in value.payloads]
    return to_message(policy_pb2.PlanPullResponse, value, kind=_PLAN[value.kind], payloads=payloads)


def plan_from_pb(message: policy_pb2.PlanPullResponse) -> PullPlan:
    """Convert a pull plan; raises InvalidRequest if the kind is unknown."""
    kind = _PLAN_OF.get(message.kind)
    if kind is None:
        raise InvalidRequest(f"plan.kind: {message.kind} is not a kind")
    return to_value(PullPlan, message, kind=kind, payloads=tuple(map(payload_from_pb, message.payloads)))


def publish_to_pb(value: PublishRequest) -> policy_pb2.PublishVersionRequest:
    return to_message(
        policy_pb2.PublishVersionRequest,
        value,
        without={"step_id", "canary"},
        request_id=value.step_id,
        canary_logprobs=value.canary,
        consumed=[group_id_to_pb(group_id) for group_id in value.consumed],
        reports=[report_to_pb(report) for report in value.reports],
        variants=[
            to_message(policy_pb2.VariantVersion, entry, without={"canary"}, canary_logprobs=entry.canary)
            for entry in value.variants
        ],
    )


def publish_from_pb(message: policy_pb2.PublishVersionRequest) -> PublishRequest:
    return to_value(
        PublishRequest,
        message,
        step_id=message.request_id,
        canary=tuple(message.canary_logprobs),
        consumed=tuple(group_id_from_pb(group_id) for group_id in message.consumed),
        reports=tuple(report_from_pb(report) for report in message.reports),
        variants=tuple(
            to_value(VariantVersion, entry, canary=tuple(entry.canary_logprobs)) for entry in message.variants
        ),
    )


def grant_to_pb(value: LeaseGrant) -> policy_pb2.AcquireLeaseResponse:
    return to_message(policy_pb2.AcquireLeaseResponse, value, without={"rollback_to"})


def renewal_to_pb(value: LeaseGrant) -> policy_pb2.RenewLeaseResponse:
    ordered = None if value.rollback_to < 0 else value.rollback_to
    unsaid = {"max_message_bytes", "most_groups_per_version"}
    return to_message(policy_pb2.RenewLeaseResponse, value, without=unsaid, rollback_to=ordered)
