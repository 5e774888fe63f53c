"""Requests, answers and reports of the rpcs <-> domain values; groups and manifests are in `groups`."""

from __future__ import annotations

import xxhash

from heterorl.common.api import Command, Heartbeat, PlanKind, PullPlan, RegisterAnswer, Registration, WorkGrant
from heterorl.common.errors import InvalidRequest
from heterorl.common.process.words import peer_words
from heterorl.common.types.digests import digest_field as digest_field
from heterorl.common.types.values import (
    DropReason,
    LeaseGrant,
    PushOutcome,
    PushStatus,
    QueuedGroup,
    SiteId,
    StepReport,
    WorkAssignment,
)
from heterorl.common.wire.contract import contract_from_pb, contract_to_pb
from heterorl.common.wire.groups import (
    group_from_pb,
    group_id_from_pb,
    group_id_to_pb,
    group_to_pb,
    payload_from_pb,
    payload_to_pb,
)
from heterorl.v1 import common_pb2, policy_pb2, rollout_pb2, run_pb2

_STATUS = {status: rollout_pb2.PushStatus.Value(f"PUSH_STATUS_{status.name}") for status in PushStatus}
_REASON = {reason: rollout_pb2.DropReason.Value(f"DROP_REASON_{reason.name}") for reason in DropReason}
_PLAN = {kind: policy_pb2.PlanKind.Value(f"PLAN_KIND_{kind.name}") for kind in PlanKind}
_COMMAND = {command: run_pb2.Command.Value(f"COMMAND_{command.name}") for command in Command}
_STATUS_OF = {pb: value for value, pb in _STATUS.items()}
_REASON_OF = {pb: value for value, pb in _REASON.items()}
_PLAN_OF = {pb: value for value, pb in _PLAN.items()}
_COMMAND_OF = {pb: value for value, pb in _COMMAND.items()}


def frame_checksum(frame: bytes) -> int:
    """XXH3-64 of a frame: tells damage on the way at the frame it happened to, long before the payload's digest."""
    return xxhash.xxh3_64_intdigest(frame)


def report_to_pb(value: StepReport) -> common_pb2.StepReport:
    """Convert a step report; the fields have the same names on both sides."""
    message = common_pb2.StepReport(
        **{name: getattr(value, name) for name in StepReport.__slots__ if name != "evaluation_accuracy"}
    )
    if value.evaluation_accuracy is not None:
        message.evaluation_accuracy = value.evaluation_accuracy
    return message


def report_from_pb(message: common_pb2.StepReport) -> StepReport:
    """Convert a step report."""
    values = {name: getattr(message, name) for name in StepReport.__slots__ if name != "evaluation_accuracy"}
    accuracy = message.evaluation_accuracy if message.HasField("evaluation_accuracy") else None
    return StepReport(**values, evaluation_accuracy=accuracy)


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


def grant_from_pb(message: policy_pb2.AcquireLeaseResponse | policy_pb2.RenewLeaseResponse) -> LeaseGrant:
    """Convert a lease."""
    is_ordered = isinstance(message, policy_pb2.RenewLeaseResponse) and message.HasField("rollback_to")
    return LeaseGrant(
        epoch=message.epoch,
        holder=message.holder,
        ttl_s=message.ttl_s,
        head_version=message.head_version,
        rollback_to=message.rollback_to if is_ordered else -1,  # type: ignore[union-attr]
        max_message_bytes=message.max_message_bytes if isinstance(message, policy_pb2.AcquireLeaseResponse) else 0,
        max_staleness_versions=message.max_staleness_versions if message.HasField("max_staleness_versions") else -1,
    )


def plan_to_pb(value: PullPlan) -> policy_pb2.PlanPullResponse:
    """Convert a pull plan."""
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


def registration_to_pb(value: Registration) -> run_pb2.RegisterRequest:
    """Convert a registration."""
    return run_pb2.RegisterRequest(
        site=value.site,
        incarnation=value.incarnation,
        contract=contract_to_pb(value.contract),
        engine=value.engine,
        dtype=value.dtype,
        max_delay_versions=value.max_delay_versions,
        flavour=value.flavour,
        max_delay_s=value.max_delay_s,
        lowest_sequence=value.lowest_sequence,
    )


def registration_from_pb(message: run_pb2.RegisterRequest) -> Registration:
    """Convert a registration."""
    return Registration(
        site=SiteId(message.site),
        incarnation=message.incarnation,
        contract=contract_from_pb(message.contract),
        engine=message.engine,
        dtype=message.dtype,
        max_delay_versions=message.max_delay_versions,
        flavour=message.flavour,
        max_delay_s=message.max_delay_s,
        lowest_sequence=message.lowest_sequence,
    )


def register_answer_to_pb(value: RegisterAnswer) -> run_pb2.RegisterResponse:
    """Convert the answer to a registration."""
    return run_pb2.RegisterResponse(
        run_id=value.run_id,
        head_version=value.head_version,
        next_sequence=value.next_sequence,
        max_staleness_versions=value.max_staleness_versions,
        max_message_bytes=value.max_message_bytes,
    )


def register_answer_from_pb(message: run_pb2.RegisterResponse) -> RegisterAnswer:
    """Convert the answer to a registration."""
    return RegisterAnswer(
        run_id=message.run_id,
        head_version=message.head_version,
        next_sequence=message.next_sequence,
        max_staleness_versions=message.max_staleness_versions,
        max_message_bytes=message.max_message_bytes,
    )


def heartbeat_to_pb(value: Heartbeat) -> run_pb2.HeartbeatRequest:
    """Convert a heartbeat."""
    return run_pb2.HeartbeatRequest(
        site=value.site,
        incarnation=value.incarnation,
        policy_version=value.policy_version,
        state_root=value.state_root,
        tokens_per_s=value.tokens_per_s,
        outbox_groups=value.outbox_groups,
        apply_s=value.apply_s,
        problem=peer_words(value.problem),
    )


def heartbeat_from_pb(message: run_pb2.HeartbeatRequest) -> Heartbeat:
    """Convert a heartbeat."""
    return Heartbeat(
        site=SiteId(message.site),
        incarnation=message.incarnation,
        policy_version=message.policy_version,
        state_root=message.state_root,
        tokens_per_s=message.tokens_per_s,
        outbox_groups=message.outbox_groups,
        apply_s=message.apply_s,
        problem=peer_words(message.problem),
    )


def commands_to_pb(commands: tuple[Command, ...]) -> run_pb2.HeartbeatResponse:
    """Convert the commands in a heartbeat's answer."""
    return run_pb2.HeartbeatResponse(commands=[_COMMAND[command] for command in commands])


def commands_from_pb(message: run_pb2.HeartbeatResponse) -> tuple[Command, ...]:
    """Convert the commands in a heartbeat's answer; those of a newer coordinator are skipped."""
    return tuple(_COMMAND_OF[command] for command in message.commands if command in _COMMAND_OF)
