"""Protobuf <-> registrations, heartbeats, canaries, status."""

from __future__ import annotations

from heterorl.common.types.common import SiteId, peer_words
from heterorl.common.types.common import digest_field as digest_field
from heterorl.common.types.run import (
    CanaryReport,
    CanaryVerdict,
    Command,
    FlavourStatus,
    Heartbeat,
    LedgerCounts,
    PromptCounts,
    RegisterAnswer,
    Registration,
    RunStatus,
    SiteStatus,
)
from heterorl.common.wire.common import (
    contract_from_pb,
    contract_to_pb,
    progress_from_pb,
    progress_to_pb,
    report_from_pb,
    report_to_pb,
)
from heterorl.common.wire.rollout import (
    reason_from_pb,
    reason_to_pb,
    return_reason_from_pb,
    return_reason_to_pb,
)
from heterorl.v1 import run_pb2

_COMMAND = {command: run_pb2.Command.Value(f"COMMAND_{command.name}") for command in Command}


_COMMAND_OF = {pb: value for value, pb in _COMMAND.items()}


def registration_to_pb(value: Registration) -> run_pb2.RegisterRequest:
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
        work_ahead_s=value.work_ahead_s,
        held=None if value.held is None else run_pb2.HeldWork(assignments=value.held),
    )


def registration_from_pb(message: run_pb2.RegisterRequest) -> Registration:
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
        work_ahead_s=message.work_ahead_s,
        held=tuple(message.held.assignments) if message.HasField("held") else None,
    )


def register_answer_to_pb(value: RegisterAnswer) -> run_pb2.RegisterResponse:
    return run_pb2.RegisterResponse(
        run_id=value.run_id,
        head_version=value.head_version,
        next_sequence=value.next_sequence,
        max_staleness_versions=value.max_staleness_versions,
        max_message_bytes=value.max_message_bytes,
        push_groups=value.push_groups,
        work_ahead_s=value.work_ahead_s,
    )


def register_answer_from_pb(message: run_pb2.RegisterResponse) -> RegisterAnswer:
    return RegisterAnswer(
        run_id=message.run_id,
        head_version=message.head_version,
        next_sequence=message.next_sequence,
        max_staleness_versions=message.max_staleness_versions,
        max_message_bytes=message.max_message_bytes,
        push_groups=max(1, message.push_groups),
        work_ahead_s=message.work_ahead_s,
    )


def heartbeat_to_pb(value: Heartbeat) -> run_pb2.HeartbeatRequest:
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
    return run_pb2.HeartbeatResponse(commands=[_COMMAND[command] for command in commands])


def commands_from_pb(message: run_pb2.HeartbeatResponse) -> tuple[Command, ...]:
    """Convert the commands in a heartbeat's answer; those of a newer coordinator are skipped."""
    return tuple(_COMMAND_OF[command] for command in message.commands if command in _COMMAND_OF)


def canary_to_pb(value: CanaryReport) -> run_pb2.ReportCanaryRequest:
    return run_pb2.ReportCanaryRequest(
        site=value.site, incarnation=value.incarnation, version=value.version, logprobs=value.logprobs
    )


def canary_from_pb(message: run_pb2.ReportCanaryRequest) -> CanaryReport:
    return CanaryReport(
        site=SiteId(message.site),
        incarnation=message.incarnation,
        version=message.version,
        logprobs=tuple(message.logprobs),
    )


def verdict_to_pb(value: CanaryVerdict) -> run_pb2.ReportCanaryResponse:
    return run_pb2.ReportCanaryResponse(difference=value.difference, quarantine=value.quarantine)


def verdict_from_pb(message: run_pb2.ReportCanaryResponse) -> CanaryVerdict:
    return CanaryVerdict(
        difference=message.difference if message.HasField("difference") else None, quarantine=message.quarantine
    )


def status_to_pb(value: RunStatus) -> run_pb2.GetStatusResponse:
    ledger = value.ledger
    return run_pb2.GetStatusResponse(
        run_id=value.run_id,
        head_version=value.head_version,
        epoch=value.epoch,
        learner=value.learner,
        is_draining=value.is_draining,
        uptime_s=value.uptime_s,
        acked=ledger.acked,
        pending=ledger.pending,
        leased=ledger.leased,
        consumed=ledger.consumed,
        dropped=[
            run_pb2.DropCount(reason=reason_to_pb(reason), count=count) for reason, count in ledger.dropped.items()
        ],
        closed=[
            run_pb2.ClosedCount(reason=return_reason_to_pb(reason), count=count)
            for reason, count in ledger.closed.items()
        ],
        bytes_full=value.bytes_full,
        bytes_last=value.bytes_last,
        changed_fraction=value.changed_fraction,
        sites=[
            run_pb2.SiteStatus(**{name: getattr(site, name) for name in SiteStatus.__slots__}) for site in value.sites
        ],
        last_report=report_to_pb(value.last_report) if value.last_report else None,
        is_head_signed=value.is_head_signed,
        store_bytes=value.store_bytes,
        store_limit_bytes=value.store_limit_bytes,
        snapshot_version=value.snapshot_version if value.snapshot_version >= 0 else None,
        snapshot_age_s=value.snapshot_age_s,
        reclaimed_bytes=value.reclaimed_bytes,
        delta_bytes=value.delta_bytes,
        snapshot_bytes=value.snapshot_bytes,
        encode_s=value.encode_s,
        flavours=[
            run_pb2.FlavourStatus(**{name: getattr(entry, name) for name in FlavourStatus.__slots__})
            for entry in value.flavours
        ],
        rollback_to=value.rollback_to if value.rollback_to >= 0 else None,
        facts=dict(value.facts),
        store_problem=value.store_problem,
        progress=progress_to_pb(value.progress),
        progress_age_s=value.progress_age_s,
        prompts=None
        if value.prompts is None
        else run_pb2.PromptCounts(**{name: getattr(value.prompts, name) for name in PromptCounts.__slots__}),
    )


def status_from_pb(message: run_pb2.GetStatusResponse) -> RunStatus:
    reasons = ((reason_from_pb(entry.reason), entry.count) for entry in message.dropped)
    dropped = {reason: count for reason, count in reasons if reason is not None}
    returns = ((return_reason_from_pb(entry.reason), entry.count) for entry in message.closed)
    return RunStatus(
        run_id=message.run_id,
        head_version=message.head_version,
        epoch=message.epoch,
        learner=message.learner,
        is_draining=message.is_draining,
        uptime_s=message.uptime_s,
        ledger=LedgerCounts(
            acked=message.acked,
            pending=message.pending,
            leased=message.leased,
            consumed=message.consumed,
            dropped=dropped,
            closed={reason: count for reason, count in returns if reason is not None},
        ),
        bytes_full=message.bytes_full,
        bytes_last=message.bytes_last,
        changed_fraction=message.changed_fraction,
        sites=tuple(
            SiteStatus(
                site=SiteId(site.site),
                incarnation=site.incarnation,
                policy_version=site.policy_version,
                state_root=site.state_root,
                last_seen_s=site.last_seen_s,
                groups_accepted=site.groups_accepted,
                groups_dropped=site.groups_dropped,
                tokens_per_s=site.tokens_per_s,
                work_leased=site.work_leased,
                canary_difference=site.canary_difference if site.HasField("canary_difference") else None,
                quarantine=site.quarantine,
                apply_s=site.apply_s,
                flavour=site.flavour,
                groups_failed=site.groups_failed,
                groups_refused=site.groups_refused,
                quota_used=site.quota_used,
                problem=site.problem,
                work_away=site.work_away,
                work_ahead_s=site.work_ahead_s,
            )
            for site in message.sites
        ),
        last_report=report_from_pb(message.last_report) if message.HasField("last_report") else None,
        is_head_signed=message.is_head_signed,
        store_bytes=message.store_bytes,
        store_limit_bytes=message.store_limit_bytes,
        snapshot_version=message.snapshot_version if message.HasField("snapshot_version") else -1,
        snapshot_age_s=message.snapshot_age_s,
        reclaimed_bytes=message.reclaimed_bytes,
        delta_bytes=message.delta_bytes,
        snapshot_bytes=message.snapshot_bytes,
        encode_s=message.encode_s,
        flavours=tuple(
            FlavourStatus(**{name: getattr(entry, name) for name in FlavourStatus.__slots__})
            for entry in message.flavours
        ),
        rollback_to=message.rollback_to if message.HasField("rollback_to") else -1,
        facts=dict(message.facts),
        store_problem=message.store_problem,
        progress=progress_from_pb(message.progress) if message.HasField("progress") else None,
        progress_age_s=message.progress_age_s,
        prompts=PromptCounts(**{name: getattr(message.prompts, name) for name in PromptCounts.__slots__})
        if message.HasField("prompts")
        else None,
    )
