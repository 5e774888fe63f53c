"""Protobuf <-> manifests, payloads, publications, plans of pulls, the learner's lease."""

from __future__ import annotations

import xxhash
from google.protobuf.message import DecodeError

from heterorl.common.errors import InvalidRequest, MalformedPayload
from heterorl.common.types.common import Digest, digest_field
from heterorl.common.types.policy import (
    FlavourVersion,
    LeaseGrant,
    Manifest,
    PayloadKind,
    PayloadRef,
    PlanKind,
    PublishRequest,
    PullPlan,
)
from heterorl.common.wire.common import (
    MAX_INT64,
    MAX_RUN_ID,
    bytes_digest,
    report_from_pb,
    report_to_pb,
)
from heterorl.common.wire.rollout import group_id_from_pb, group_id_to_pb
from heterorl.v1 import policy_pb2

_PAYLOAD = {kind: policy_pb2.PayloadKind.Value(f"PAYLOAD_KIND_{kind.name}") for kind in PayloadKind}


_PAYLOAD_OF = {pb: value for value, pb in _PAYLOAD.items()}


def payload_to_pb(value: PayloadRef) -> policy_pb2.PayloadRef:
    return policy_pb2.PayloadRef(
        kind=_PAYLOAD[value.kind],
        from_version=value.from_version,
        to_version=value.to_version,
        digest=value.digest,
        num_bytes=value.num_bytes,
    )


def payload_from_pb(message: policy_pb2.PayloadRef) -> PayloadRef:
    """Convert a payload's reference.

    Raises:
        InvalidRequest: the kind is not stated, the digest is none, or the size is beyond a file's.
    """
    kind = _PAYLOAD_OF.get(message.kind)
    if kind is None:
        raise InvalidRequest("payload.kind: not stated")
    if message.num_bytes > MAX_INT64:
        raise InvalidRequest(f"payload.num_bytes: {message.num_bytes} is beyond any file")
    return PayloadRef(
        kind=kind,
        from_version=message.from_version,
        to_version=message.to_version,
        # The one place where a payload's name enters: it becomes a file's name.
        digest=digest_field("payload.digest", message.digest),
        num_bytes=message.num_bytes,
    )


def manifest_to_bytes(value: Manifest) -> bytes:
    """Serialise a manifest, once, at its publisher."""
    return policy_pb2.Manifest(
        run_id=value.run_id,
        epoch=value.epoch,
        version=value.version,
        parent_version=value.parent_version,
        parent_digest=value.parent_digest,
        layout_id=value.layout_id,
        chunk_digests=list(value.chunk_digests),
        state_root=value.state_root,
        step=value.step,
        num_changed=value.num_changed,
        num_elements=value.num_elements,
        full_bytes=value.full_bytes,
        payloads=[payload_to_pb(payload) for payload in value.payloads],
        chunk_elements=value.chunk_elements,
        num_byte_elements=value.num_byte_elements,
    ).SerializeToString(deterministic=True)


def manifest_from_bytes(data: bytes) -> Manifest:
    """Read the exact bytes of a manifest.

    Raises:
        MalformedPayload: the bytes are not a manifest, or a digest in it is none.
    """
    try:
        message = policy_pb2.Manifest.FromString(data)
        payloads = tuple(payload_from_pb(payload) for payload in message.payloads)
        layout_id = digest_field("layout_id", message.layout_id)
        state_root = digest_field("state_root", message.state_root)
        parent_digest = digest_field("parent_digest", message.parent_digest) if message.parent_digest else ""
        if len(message.run_id) > MAX_RUN_ID:
            # Written down with each version that is used.
            raise InvalidRequest(f"run_id: {len(message.run_id)} characters, at most {MAX_RUN_ID}")
    except (DecodeError, InvalidRequest) as error:
        raise MalformedPayload(f"not a manifest: {error}") from error
    return Manifest(
        run_id=message.run_id,
        epoch=message.epoch,
        version=message.version,
        parent_version=message.parent_version,
        parent_digest=parent_digest,
        layout_id=layout_id,
        chunk_digests=tuple(message.chunk_digests),
        state_root=state_root,
        step=message.step,
        num_changed=message.num_changed,
        num_elements=message.num_elements,
        full_bytes=message.full_bytes,
        payloads=payloads,
        chunk_elements=message.chunk_elements,
        num_byte_elements=message.num_byte_elements,
    )


def manifest_digest(data: bytes) -> Digest:
    """Identity of a version: blake3 of the exact bytes of its manifest."""
    return bytes_digest(data)


_PLAN = {kind: policy_pb2.PlanKind.Value(f"PLAN_KIND_{kind.name}") for kind in PlanKind}


_PLAN_OF = {pb: value for value, pb in _PLAN.items()}


def frame_checksum(frame: bytes) -> int:
    """XXH3-64 of a frame: tells damage on the way at the frame it happened to, long before the payload's digest."""
    return xxhash.xxh3_64_intdigest(frame)


def grant_from_pb(message: policy_pb2.AcquireLeaseResponse | policy_pb2.RenewLeaseResponse) -> LeaseGrant:
    is_ordered = isinstance(message, policy_pb2.RenewLeaseResponse) and message.HasField("rollback_to")
    is_new = isinstance(message, policy_pb2.AcquireLeaseResponse)
    return LeaseGrant(
        epoch=message.epoch,
        holder=message.holder,
        ttl_s=message.ttl_s,
        head_version=message.head_version,
        rollback_to=message.rollback_to if is_ordered else -1,  # type: ignore[union-attr]
        max_message_bytes=message.max_message_bytes if is_new else 0,  # type: ignore[union-attr]
        max_staleness_versions=message.max_staleness_versions if message.HasField("max_staleness_versions") else -1,
        masks_stale=message.masks_stale,
        most_groups_per_version=message.most_groups_per_version if is_new else 0,  # type: ignore[union-attr]
    )


def plan_to_pb(value: PullPlan) -> policy_pb2.PlanPullResponse:
    return policy_pb2.PlanPullResponse(
        kind=_PLAN[value.kind],
        target_version=value.target_version,
        payloads=[payload_to_pb(payload) for payload in value.payloads],
        manifests=list(value.manifests),
        reason=value.reason,
        signature=value.signature,
    )


def plan_from_pb(message: policy_pb2.PlanPullResponse) -> PullPlan:
    """Convert a pull plan.

    Raises:
        InvalidRequest: the kind is unknown.
    """
    kind = _PLAN_OF.get(message.kind)
    if kind is None:
        raise InvalidRequest(f"plan.kind: {message.kind} is not a kind")
    return PullPlan(
        kind=kind,
        target_version=message.target_version,
        payloads=tuple(payload_from_pb(payload) for payload in message.payloads),
        manifests=tuple(message.manifests),
        reason=message.reason,
        signature=message.signature,
    )


def publish_to_pb(value: PublishRequest) -> policy_pb2.PublishVersionRequest:
    return policy_pb2.PublishVersionRequest(
        epoch=value.epoch,
        request_id=value.step_id,
        parent_version=value.parent_version,
        lineage_version=value.lineage_version,
        manifest=value.manifest,
        consumed=[group_id_to_pb(group_id) for group_id in value.consumed],
        reports=[report_to_pb(report) for report in value.reports],
        signature=value.signature,
        canary_logprobs=value.canary,
        encode_s=value.encode_s,
        flavours=[_flavour_to_pb(entry) for entry in value.flavours],
    )


def publish_from_pb(message: policy_pb2.PublishVersionRequest) -> PublishRequest:
    return PublishRequest(
        epoch=message.epoch,
        step_id=message.request_id,
        parent_version=message.parent_version,
        lineage_version=message.lineage_version,
        manifest=message.manifest,
        consumed=tuple(group_id_from_pb(group_id) for group_id in message.consumed),
        reports=tuple(report_from_pb(report) for report in message.reports),
        signature=message.signature,
        canary=tuple(message.canary_logprobs),
        encode_s=message.encode_s,
        flavours=tuple(_flavour_from_pb(entry) for entry in message.flavours),
    )


def _flavour_to_pb(value: FlavourVersion) -> policy_pb2.FlavourVersion:
    return policy_pb2.FlavourVersion(
        flavour=value.flavour, manifest=value.manifest, signature=value.signature, canary_logprobs=value.canary
    )


def _flavour_from_pb(message: policy_pb2.FlavourVersion) -> FlavourVersion:
    return FlavourVersion(
        flavour=message.flavour,
        manifest=message.manifest,
        signature=message.signature,
        canary=tuple(message.canary_logprobs),
    )


def grant_to_pb(value: LeaseGrant) -> policy_pb2.AcquireLeaseResponse:
    return policy_pb2.AcquireLeaseResponse(
        epoch=value.epoch,
        ttl_s=value.ttl_s,
        head_version=value.head_version,
        holder=value.holder,
        max_message_bytes=value.max_message_bytes,
        max_staleness_versions=value.max_staleness_versions,
        masks_stale=value.masks_stale,
        most_groups_per_version=value.most_groups_per_version,
    )


def renewal_to_pb(value: LeaseGrant) -> policy_pb2.RenewLeaseResponse:
    return policy_pb2.RenewLeaseResponse(
        epoch=value.epoch,
        ttl_s=value.ttl_s,
        head_version=value.head_version,
        holder=value.holder,
        rollback_to=None if value.rollback_to < 0 else value.rollback_to,
        max_staleness_versions=value.max_staleness_versions,
        masks_stale=value.masks_stale,
    )
