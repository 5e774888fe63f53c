"""Protobuf <-> registrations, heartbeats, canaries, status."""

from heterorl.common.types.common import peer_words
from heterorl.common.types.run import Command, Heartbeat, LedgerCounts, RegisterAnswer, Registration, RunStatus
from heterorl.common.wire.common_messages import members_of, new_message, to_message, to_value
from heterorl.common.wire.rollout_messages import REASON_OF, RETURN_REASON_OF
from heterorl.v1 import run_pb2

_COMMAND_OF = members_of(Command, run_pb2.Command.DESCRIPTOR)


def registration_to_pb(value: Registration) -> run_pb2.RegisterRequest:
    held = None if value.held is None else run_pb2.HeldWork(assignments=value.held)
    return to_message(run_pb2.RegisterRequest, value, held=held)


def registration_from_pb(message: run_pb2.RegisterRequest) -> Registration:
    held = tuple(message.held.assignments) if message.HasField("held") else None
    return to_value(Registration, message, held=held)


def register_answer_from_pb(message: run_pb2.RegisterResponse) -> RegisterAnswer:
    return to_value(RegisterAnswer, message, push_groups=max(1, message.push_groups))


def heartbeat_to_pb(value: Heartbeat) -> run_pb2.HeartbeatRequest:
    return to_message(run_pb2.HeartbeatRequest, value, problem=peer_words(value.problem))


def heartbeat_from_pb(message: run_pb2.HeartbeatRequest) -> Heartbeat:
    return to_value(Heartbeat, message, problem=peer_words(message.problem))


def commands_from_pb(message: run_pb2.HeartbeatResponse) -> tuple[Command, ...]:
    """Convert a heartbeat's commands; skips unknown ones of a newer coordinator."""
    return tuple(_COMMAND_OF[command] for command in message.commands if command in _COMMAND_OF)


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
        dropped=[new_message(run_pb2.DropCount, reason=each, count=count) for each, count in ledger.dropped.items()],
        closed=[new_message(run_pb2.ClosedCount, reason=each, count=count) for each, count in ledger.closed.items()],
        snapshot_version=value.snapshot_version if value.snapshot_version >= 0 else None,
        rollback_to=value.rollback_to if value.rollback_to >= 0 else None,
        facts=dict(value.facts),
    )


def status_from_pb(message: run_pb2.GetStatusResponse) -> RunStatus:
    """Convert a status; leaves out counts by reasons of newer programs."""
    drops = ((REASON_OF.get(entry.reason), entry.count) for entry in message.dropped)
    returns = ((RETURN_REASON_OF.get(entry.reason), entry.count) for entry in message.closed)
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
        snapshot_version=message.snapshot_version if message.HasField("snapshot_version") else -1,
        rollback_to=message.rollback_to if message.HasField("rollback_to") else -1,
        facts=dict(message.facts),
    )
