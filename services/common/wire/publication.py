"""A publication <-> its message."""

from __future__ import annotations

from heterorl.common.types.values import FlavourVersion, PublishRequest
from heterorl.common.wire.groups import group_id_from_pb, group_id_to_pb
from heterorl.common.wire.messages import report_from_pb, report_to_pb
from heterorl.v1 import policy_pb2


def publish_to_pb(value: PublishRequest) -> policy_pb2.PublishVersionRequest:
    """Convert a publication."""
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
    """Convert a publication."""
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
