"""Protobuf <-> registrations, heartbeats, canaries, status."""

from __future__ import annotations

from heterorl.common.types.common import peer_words
from heterorl.common.types.run import (
    CanaryReport,
    CanaryVerdict,
    Command,
    Heartbeat,
    LedgerCounts,
    PromptCounts,
    RegisterAnswer,
    Registration,
    RunStatus,
    SiteStatus,
    VariantStatus,
)
from heterorl.common.wire.common_messages import (
    contract_from_pb,
    contract_to_pb,
    progress_from_pb,
    progress_to_pb,
    report_from_pb,
    report_to_pb,
    to_message,
    to_value,
)
from heterorl.common.wire.rollout_messages import (
    reason_from_pb,
    reason_to_pb,
    return_reason_from_pb,
    return_reason_to_pb,
)
from heterorl.v1 import run_pb2

_COMMAND = {command: run_pb2.Command.Value(f"COMMAND_{command.name}") for command in Command}
_COMMAND_OF = {pb: value for value, pb in _COMMAND.items()}


def registration_to_pb(value: Registration) -> run_pb2.RegisterRequest:
    held = None if value.held is None else run_pb2.HeldWork(assignments=value.held)
    return to_message(run_pb2.RegisterRequest, value, contract=contract_to_pb(value.contract), held=held)


def registration_from_pb(message: run_pb2.RegisterRequest) -> Registration:
    held = tuple(message.held.assignments) if message.HasField("held") else None
    return to_value(Registration, message, contract=contract_from_pb(message.contract), held=held)


def register_answer_to_pb(value: RegisterAnswer) -> run_pb2.RegisterResponse:
    return to_message(run_pb2.RegisterResponse, value)


def register_answer_from_pb(message: run_pb2.RegisterResponse) -> RegisterAnswer:
    return to_value(RegisterAnswer, message, push_groups=max(1, message.push_groups))


def heartbeat_to_pb(value: Heartbeat) -> run_pb2.HeartbeatRequest:
    return to_message(run_pb2.HeartbeatRequest, value, problem=peer_words(value.problem))


def heartbeat_from_pb(message: run_pb2.HeartbeatRequest) -> Heartbeat:
    return to_value(Heartbeat, message, problem=peer_words(message.problem))


def commands_to_pb(commands: tuple[Command, ...]) -> run_pb2.HeartbeatResponse:
    return run_pb2.HeartbeatResponse(commands=[_COMMAND[command] for command in commands])


def commands_from_pb(message: run_pb2.HeartbeatResponse) -> tuple[Command, ...]:
    """Convert a heartbeat's commands; skips unknown ones of a newer coordinator."""
    return tuple(_COMMAND_OF[command] for command in message.commands if command in _COMMAND_OF)


def canary_to_pb(value: CanaryReport) -> run_pb2.ReportCanaryRequest:
    return to_message(run_pb2.ReportCanaryRequest, value)


def canary_from_pb(message: run_pb2.ReportCanaryRequest) -> CanaryReport:
    return to_value(CanaryReport, message)


def verdict_to_pb(value: CanaryVerdict) -> run_pb2.ReportCanaryResponse:
    return to_message(run_pb2.ReportCanaryResponse, value)


def verdict_from_pb(message: run_pb2.ReportCanaryResponse) -> CanaryVerdict:
    return to_value(CanaryVerdict, message)


def status_to_pb(value: RunStatus) -> run_pb2.GetStatusResponse:
    ledger = value.ledger
    return to_message(
        run_pb2.GetStatusResponse,
        value,
        without={"ledger"},
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
        sites=[to_message(run_pb2.SiteStatus, site) for site in value.sites],
        last_report=report_to_pb(value.last_report) if value.last_report else None,
        snapshot_version=value.snapshot_version if value.snapshot_version >= 0 else None,
        variants=[to_message(run_pb2.VariantStatus, entry) for entry in value.variants],
        rollback_to=value.rollback_to if value.rollback_to >= 0 else None,
        facts=dict(value.facts),
        progress=progress_to_pb(value.progress),
        prompts=None if value.prompts is None else to_message(run_pb2.PromptCounts, value.prompts),
    )


def status_from_pb(message: run_pb2.GetStatusResponse) -> RunStatus:
    """Convert a status; leaves out counts by reasons of newer programs."""
    drops = ((reason_from_pb(entry.reason), entry.count) for entry in message.dropped)
    returns = ((return_reason_from_pb(entry.reason), entry.count) for entry in message.closed)
    ledger = to_value(
        LedgerCounts,
        message,
        dropped={reason: count for reason, count in drops if reason is not None},
        closed={reason: count for reason, count in returns if reason is not None},
    )
    return to_value(
        RunStatus,
        message,
        ledger=ledger,
        sites=tuple(to_value(SiteStatus, site) for site in message.sites),
        last_report=report_from_pb(message.last_report) if message.HasField("last_report") else None,
        snapshot_version=message.snapshot_version if message.HasField("snapshot_version") else -1,
        variants=tuple(to_value(VariantStatus, entry) for entry in message.variants),
        rollback_to=message.rollback_to if message.HasField("rollback_to") else -1,
        facts=dict(message.facts),
        progress=progress_from_pb(message.progress) if message.HasField("progress") else None,
        prompts=to_value(PromptCounts, message.prompts) if message.HasField("prompts") else None,
    )
