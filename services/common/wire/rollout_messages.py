"""Protobuf <-> work, groups, outcomes of pushes, failed checks, evaluations."""

import logging
from collections.abc import Sequence

import numpy as np
from google.protobuf.message import DecodeError

from heterorl.common.errors import InvalidRequest
from heterorl.common.types.common import SiteId
from heterorl.common.types.evaluation import Evaluation, EvaluationSummary, PromptResult, ScoredSample
from heterorl.common.types.rollout import (
    MAX_REWARD,
    DropReason,
    LeasedGroup,
    PushOutcome,
    PushStatus,
    QueuedGroup,
    ReturnReason,
    SealedGroup,
)
from heterorl.common.wire.common_messages import MAX_INT64, members_of, to_message, to_value
from heterorl.common.wire.sealed_groups import open_group, read_sealed, shell_of
from heterorl.v1 import evaluation_pb2, rollout_pb2

_LOG = logging.getLogger(__name__)
TOGETHER_BYTES = 1 << 18
"""Most bytes of several groups in one message; a larger group has its own."""
FRAME_BYTES = 16
"""Overhead of a message: two tags and lengths."""
SIZE_BYTES = 4
"""Bytes of a group's size in the message."""


REASON_OF = members_of(DropReason, rollout_pb2.DropReason.DESCRIPTOR)
RETURN_REASON_OF = members_of(ReturnReason, rollout_pb2.ReturnReason.DESCRIPTOR)


def outcome_from_pb(message: rollout_pb2.GroupOutcome) -> PushOutcome:
    """Convert a group's outcome; a newer peer's status reads as RETRY."""
    known = members_of(PushStatus, rollout_pb2.PushStatus.DESCRIPTOR)
    return to_value(PushOutcome, message, status=known.get(message.status, PushStatus.RETRY))


def leased_to_pb(value: LeasedGroup) -> rollout_pb2.StreamGroupsResponse:
    """Leased group -> message, around its sealed bytes."""
    without = {"sealed", "superseded_s"}
    return to_message(rollout_pb2.StreamGroupsResponse, value, without=without, group=value.sealed.data)


def queued_from_pb(message: rollout_pb2.StreamGroupsResponse) -> QueuedGroup:
    """Convert a queued group; raises MalformedPayload if it is no group."""
    return to_value(QueuedGroup, message, group=open_group(read_sealed(message.group)), source="")


def pushes_to_pb(
    groups: Sequence[SealedGroup], *, limit_bytes: int, limit_groups: int = 1
) -> list[rollout_pb2.PushGroupsRequest]:
    """Messages of groups in order.

    Small groups share a message. A group larger than any message is sent as its shell, without rollouts: the
    coordinator refuses it for good and counts its sequence. Otherwise it would block the outbox, or its sequence would
    be missing for ever.
    """
    pushed: list[rollout_pb2.PushGroupsRequest] = []
    together: list[bytes] = []
    num_bytes = FRAME_BYTES
    for sealed in groups:
        data = sealed.data
        if FRAME_BYTES + SIZE_BYTES + len(data) > limit_bytes:
            _LOG.error(
                "group %d of site %s is lost: it has %d bytes, the coordinator's max_message_bytes is %d; raise it",
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


def _push_of(groups: Sequence[bytes]) -> rollout_pb2.PushGroupsRequest:
    sizes = np.array([len(data) for data in groups], "<u4").tobytes()
    return rollout_pb2.PushGroupsRequest(groups=b"".join(groups), sizes=sizes)


def pushed_from_pb(message: rollout_pb2.PushGroupsRequest, *, limit_groups: int) -> list[rollout_pb2.Group]:
    """The groups of a push, in order.

    Raises InvalidRequest: the sizes do not fit, there are no or too many groups, or one cannot be read.
    """
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


def results_from_pb(messages: Sequence[evaluation_pb2.PromptResult]) -> tuple[PromptResult, ...]:
    """Convert results; raises InvalidRequest if a reward is not a number."""
    return tuple(
        to_value(
            PromptResult,
            message,
            samples=tuple(_sample(message.prompt_index, sample) for sample in message.samples),
            assignment=min(message.assignment, MAX_INT64),
        )
        for message in messages
    )


def evaluation_to_pb(value: Evaluation) -> evaluation_pb2.Evaluation:
    sites = [evaluation_pb2.SiteShare(site=site, num_prompts=count) for site, count in value.sites]
    message = to_message(evaluation_pb2.Evaluation, value, without={"summary"}, sites=sites)
    message.MergeFrom(to_message(evaluation_pb2.Evaluation, value.summary))
    return message


def evaluation_from_pb(message: evaluation_pb2.Evaluation) -> Evaluation:
    """Convert an evaluation; raises InvalidRequest for a missing state or invalid draws."""
    summary = to_value(EvaluationSummary, message)
    sites = tuple((SiteId(share.site), share.num_prompts) for share in message.sites)
    return to_value(Evaluation, message, summary=summary, sites=sites)


def _sample(index: int, message: evaluation_pb2.ScoredSample) -> ScoredSample:
    sample = to_value(ScoredSample, message)
    if sample.reward is not None and not abs(sample.reward) <= MAX_REWARD:
        raise InvalidRequest(f"results: a reward of prompt {index} is not a number of at most {MAX_REWARD:g}")
    return sample
