"""Protobuf <-> manifests, payloads, publications, plans of pulls, the learner's lease."""

import xxhash
from google.protobuf.message import DecodeError

from heterorl.common.errors import InvalidRequest, MalformedPayload
from heterorl.common.types.common import Digest, digest_field
from heterorl.common.types.policy import LeaseGrant, Manifest
from heterorl.common.wire.common_messages import MAX_RUN_ID, bytes_digest, to_message, to_value
from heterorl.v1 import policy_pb2


def manifest_to_bytes(value: Manifest) -> bytes:
    """Serialise a manifest, once, at its publisher."""
    return to_message(policy_pb2.Manifest, value).SerializeToString(deterministic=True)


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
            layout_id=digest_field("layout_id", message.layout_id),
            state_root=digest_field("state_root", message.state_root),
            parent_digest=digest_field("parent_digest", message.parent_digest) if message.parent_digest else "",
        )
    except (DecodeError, InvalidRequest) as error:
        raise MalformedPayload(f"not a manifest: {error}") from error


def manifest_digest(data: bytes) -> Digest:
    """Identity of a version: blake3 of the exact bytes of its manifest."""
    return bytes_digest(data)


def frame_checksum(frame: bytes) -> int:
    """XXH3-64 of a frame: finds damage before the payload's digest does."""
    return xxhash.xxh3_64_intdigest(frame)


def grant_from_pb(message: policy_pb2.AcquireLeaseResponse | policy_pb2.RenewLeaseResponse) -> LeaseGrant:
    """Convert a lease; rollback orders come at renewals."""
    most = message.max_staleness_versions if message.HasField("max_staleness_versions") else -1
    if isinstance(message, policy_pb2.AcquireLeaseResponse):
        return to_value(LeaseGrant, message, max_staleness_versions=most, rollback_to=-1, rollback_id="")
    ordered = message.rollback_to if message.HasField("rollback_to") else -1
    return to_value(LeaseGrant, message, max_staleness_versions=most, rollback_to=ordered)


def grant_to_pb(value: LeaseGrant) -> policy_pb2.AcquireLeaseResponse:
    return to_message(policy_pb2.AcquireLeaseResponse, value, without={"rollback_to", "rollback_id"})


def renewal_to_pb(value: LeaseGrant) -> policy_pb2.RenewLeaseResponse:
    ordered = None if value.rollback_to < 0 else value.rollback_to
    return to_message(policy_pb2.RenewLeaseResponse, value, rollback_to=ordered)
