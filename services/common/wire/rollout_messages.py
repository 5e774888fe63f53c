"""Protobuf <-> work, groups, outcomes of pushes, failed checks, evaluations."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

import numpy as np
from google.protobuf.message import DecodeError

from heterorl.common.errors import InvalidRequest
from heterorl.common.types.common import SiteId, peer_words
from heterorl.common.types.evaluation import (
    MAX_TEXT,
    Estimate,
    Evaluation,
    EvaluationDraws,
    EvaluationSet,
    EvaluationSpec,
    EvaluationState,
    EvaluationSummary,
    PassEstimate,
    PromptResult,
    ScoredSample,
)
from heterorl.common.types.rollout import (
    MAX_REWARD,
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
from heterorl.common.wire.sealed_groups import open_group, read_sealed, shell_of
from heterorl.v1 import common_pb2, evaluation_pb2, rollout_pb2

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
    """Convert a group's outcome; a newer peer's status reads as RETRY."""
    status = _STATUS_OF.get(message.status, PushStatus.RETRY)
    reason = _REASON_OF.get(message.reason)
    return to_value(PushOutcome, message, id=group_id_from_pb(message.id), status=status, reason=reason)


def reason_to_pb(value: DropReason) -> rollout_pb2.DropReason.ValueType:
    return _REASON[value]


def reason_from_pb(message: rollout_pb2.DropReason.ValueType) -> DropReason | None:
    """Convert a drop reason; None if unstated or newer than this program."""
    return _REASON_OF.get(message)


def return_reason_to_pb(value: ReturnReason | None) -> rollout_pb2.ReturnReason.ValueType:
    return rollout_pb2.RETURN_REASON_UNSPECIFIED if value is None else _RETURN_REASON[value]


def return_reason_from_pb(message: rollout_pb2.ReturnReason.ValueType) -> ReturnReason | None:
    """Convert a return reason; None if unstated or newer than this program."""
    return _RETURN_REASON_OF.get(message)


def leased_to_pb(value: LeasedGroup) -> rollout_pb2.StreamGroupsResponse:
    """Leased group -> message, around its sealed bytes."""
    return to_message(rollout_pb2.StreamGroupsResponse, value, without={"sealed"}, group=value.sealed.data)


def queued_from_pb(message: rollout_pb2.StreamGroupsResponse) -> QueuedGroup:
    """Convert a queued group; raises MalformedPayload if it is no group."""
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
    """Convert a grant of work; raises InvalidRequest for invalid draws."""
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
    """Messages of groups in order, each with its number of groups.

    Small groups share a message. A group larger than any message is sent as its shell, without rollouts: the
    coordinator refuses it for good and counts its sequence. Otherwise it would block the outbox, or its sequence would
    be missing for ever.
    """
    pushed: list[tuple[rollout_pb2.PushGroupsRequest, int]] = []
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


def _push_of(groups: Sequence[bytes]) -> tuple[rollout_pb2.PushGroupsRequest, int]:
    sizes = np.array([len(data) for data in groups], "<u4").tobytes()
    return rollout_pb2.PushGroupsRequest(groups=b"".join(groups), sizes=sizes), len(groups)


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


_STATE = {state: evaluation_pb2.EvaluationState.Value(f"EVALUATION_STATE_{state.name}") for state in EvaluationState}
_STATE_OF = {pb: value for value, pb in _STATE.items()}


def draws_to_pb(value: EvaluationDraws) -> evaluation_pb2.EvaluationDraws:
    return to_message(evaluation_pb2.EvaluationDraws, value)


def draws_from_pb(message: evaluation_pb2.EvaluationDraws) -> EvaluationDraws:
    """Convert draws; raises InvalidRequest if a number is out of bounds."""
    value = to_value(EvaluationDraws, message)
    is_sound = (
        0 <= value.temperature < math.inf
        and 0 < value.top_p <= 1
        and value.num_samples
        and value.max_new_tokens
        and math.isfinite(value.pass_reward)
    )
    if not is_sound:
        raise InvalidRequest(f"draws: {value} cannot be drawn")
    return value


def sets_to_pb(values: Sequence[EvaluationSet]) -> list[evaluation_pb2.EvaluationSet]:
    return [to_message(evaluation_pb2.EvaluationSet, each) for each in values]


def sets_from_pb(messages: Sequence[evaluation_pb2.EvaluationSet]) -> tuple[EvaluationSet, ...]:
    return tuple(to_value(EvaluationSet, each) for each in messages)


def spec_to_pb(value: EvaluationSpec) -> evaluation_pb2.EvaluationSpec:
    return to_message(evaluation_pb2.EvaluationSpec, value, draws=draws_to_pb(value.draws))


def spec_from_pb(message: evaluation_pb2.EvaluationSpec) -> EvaluationSpec:
    """Convert a spec of held-out prompts; raises InvalidRequest for invalid draws."""
    return to_value(EvaluationSpec, message, draws=draws_from_pb(message.draws))


def results_to_pb(values: Sequence[PromptResult]) -> list[evaluation_pb2.PromptResult]:
    """Convert results; texts are cut to MAX_TEXT."""
    return [
        to_message(
            evaluation_pb2.PromptResult,
            value,
            samples=[
                to_message(evaluation_pb2.ScoredSample, sample, text=_cut(sample.text)) for sample in value.samples
            ],
            prompt=_cut(value.prompt),
            answer=_cut(value.answer),
        )
        for value in values
    ]


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
    summary = value.summary
    message = to_message(
        evaluation_pb2.Evaluation,
        value,
        without={"summary"},
        state=_STATE[value.state],
        draws=draws_to_pb(value.draws),
        average=None if summary.average is None else to_message(evaluation_pb2.Estimate, summary.average),
        passes=[
            evaluation_pb2.PassEstimate(k=entry.k, estimate=to_message(evaluation_pb2.Estimate, entry.estimate))
            for entry in summary.passes
        ],
        sites=[evaluation_pb2.SiteShare(site=site, num_prompts=count) for site, count in value.sites],
    )
    message.MergeFrom(to_message(evaluation_pb2.Evaluation, summary, without={"average", "passes"}))
    return message


def evaluation_from_pb(message: evaluation_pb2.Evaluation) -> Evaluation:
    """Convert an evaluation; raises InvalidRequest for a missing state or invalid draws."""
    state = _STATE_OF.get(message.state)
    if state is None:
        raise InvalidRequest("evaluation.state: not stated")
    summary = to_value(
        EvaluationSummary,
        message,
        average=to_value(Estimate, message.average) if message.HasField("average") else None,
        passes=tuple(PassEstimate(k=entry.k, estimate=to_value(Estimate, entry.estimate)) for entry in message.passes),
    )
    return to_value(
        Evaluation,
        message,
        state=state,
        draws=draws_from_pb(message.draws),
        summary=summary,
        sites=tuple((SiteId(share.site), share.num_prompts) for share in message.sites),
    )


def _cut(text: str) -> str:
    # A tokenizer may decode to a lone surrogate, which has no UTF-8.
    return text[:MAX_TEXT].encode("utf-8", "replace").decode("utf-8")


def _sample(index: int, message: evaluation_pb2.ScoredSample) -> ScoredSample:
    sample = to_value(ScoredSample, message)
    if sample.reward is not None and not abs(sample.reward) <= MAX_REWARD:
        raise InvalidRequest(f"results: a reward of prompt {index} is not a number of at most {MAX_REWARD:g}")
    return sample
