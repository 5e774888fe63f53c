"""Shared conversions: fields by name, contract, step reports, metric series, number limits."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Container, Iterable, Sequence
from typing import Any, TypeVar

import blake3
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message

from heterorl.common.errors import InvalidRequest
from heterorl.common.types.common import (
    NO_LORA,
    CompletionNumbers,
    Contract,
    Digest,
    LearnerPhase,
    LearnerProgress,
    LogprobMode,
    LoraSettings,
    PartMean,
    SamplingSemantics,
    Series,
    SiteTokens,
    SourceReport,
    StepReport,
    StepTimes,
)
from heterorl.v1 import common_pb2, metrics_pb2

MAX_INT32 = 2**31 - 1
MAX_INT64 = 2**63 - 1
MAX_RUN_ID = 256
ValueT = TypeVar("ValueT")
MessageT = TypeVar("MessageT", bound=Message)


def to_message(kind: type[MessageT], value: Any, /, *, without: Container[str] = (), **changed: Any) -> MessageT:
    """A dataclass's message: fields of one name copied, others from `changed`.

    None leaves a field unset. Raises ValueError: a defect: the message lacks a field of the value, and `without` does
    not name it.
    """
    names = [name for name in _names(type(value)) if name not in changed and name not in without]
    return kind(**{name: getattr(value, name) for name in names}, **changed)


def to_value(kind: type[ValueT], message: Message, /, **changed: Any) -> ValueT:
    """A message's dataclass: fields of one name copied, others from `changed`.

    A repeated field becomes a tuple, an unset optional one None. The caller checks foreign values and passes them
    in `changed`.

    Raises:
        KeyError: the message has no such field.
        TypeError: a defect: the field holds a message, and `changed` does not set it.
    """
    copied = [name for name in _names(kind) if name not in changed]
    return kind(**{name: _read(message, name) for name in copied}, **changed)


def _names(kind: Any) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind))


def _read(message: Message, name: str) -> Any:
    if _is_optional(message.DESCRIPTOR, name) and not message.HasField(name):
        return None
    value = getattr(message, name)
    return value if isinstance(value, int | float | str | bytes) else tuple(value)


@functools.cache
def _is_optional(descriptor: Descriptor, name: str) -> bool:
    field = descriptor.fields_by_name[name]
    if field.message_type is not None:
        raise TypeError(f"{descriptor.full_name}.{name} holds messages, which have a conversion of their own")
    return field.has_presence


def bytes_digest(data: bytes) -> Digest:
    """blake3 of bytes, lower-case hex."""
    return Digest(blake3.blake3(data).hexdigest())


def contract_to_bytes(value: Contract) -> bytes:
    """Serialise a contract for the store."""
    return contract_to_pb(value).SerializeToString(deterministic=True)


def contract_from_bytes(data: bytes) -> Contract:
    """Read the bytes of `contract_to_bytes`."""
    return contract_from_pb(common_pb2.Contract.FromString(data))


_MODE = {mode: common_pb2.LogprobMode.Value(f"LOGPROB_MODE_{mode.name}") for mode in LogprobMode}
_MODE_OF = {pb: value for value, pb in _MODE.items()}


def contract_to_pb(value: Contract) -> common_pb2.Contract:
    sampling = to_message(common_pb2.SamplingSemantics, value.sampling, logprob_mode=_MODE[value.sampling.logprob_mode])
    return to_message(
        common_pb2.Contract,
        value,
        sampling=sampling,
        # Absent where there are no adapters.
        lora=to_message(common_pb2.LoraSettings, value.lora) if value.lora.rank else None,
        # A single token goes into the old field, so earlier programs read equal bytes. They see none of several, so
        # an earlier coordinator judges no ending instead of refusing right ones.
        eos_token_id=value.end_token_ids[0] if len(value.end_token_ids) == 1 else None,
        end_token_ids=value.end_token_ids if len(value.end_token_ids) > 1 else (),
    )


def contract_from_pb(message: common_pb2.Contract) -> Contract:
    """Convert a contract; an earlier program's lacks adapters, turns, several end tokens.

    Raises InvalidRequest if the log-prob mode is not stated, or a duration is not finite.
    """
    mode = _MODE_OF.get(message.sampling.logprob_mode)
    if mode is None:
        raise InvalidRequest("contract.sampling.logprob_mode: not stated")
    if not 0 <= message.trajectory_s < math.inf:
        raise InvalidRequest(f"contract.trajectory_s: {message.trajectory_s} is not a number of seconds")
    only = [message.eos_token_id] if message.HasField("eos_token_id") else []
    return to_value(
        Contract,
        message,
        sampling=to_value(SamplingSemantics, message.sampling, logprob_mode=mode),
        lora=to_value(LoraSettings, message.lora) if message.lora.rank else NO_LORA,
        end_token_ids=tuple(sorted({*message.end_token_ids, *only})),
        max_turns=max(1, message.max_turns),
    )


def report_to_pb(value: StepReport) -> common_pb2.StepReport:
    completions = value.completions
    return to_message(
        common_pb2.StepReport,
        value,
        completions=None
        if completions is None
        else to_message(
            common_pb2.CompletionNumbers,
            completions,
            reward_parts=[to_message(common_pb2.PartMean, part) for part in completions.reward_parts],
            sites=[to_message(common_pb2.SiteTokens, site) for site in completions.sites],
            endings=[to_message(common_pb2.PartMean, part) for part in completions.endings],
        ),
        times=None if value.times is None else to_message(common_pb2.StepTimes, value.times),
        sources=[to_message(common_pb2.SourceReport, source) for source in value.sources],
    )


def report_from_pb(message: common_pb2.StepReport) -> StepReport:
    return to_value(
        StepReport,
        message,
        completions=_completions_from_pb(message.completions) if message.HasField("completions") else None,
        times=to_value(StepTimes, message.times) if message.HasField("times") else None,
        sources=tuple(to_value(SourceReport, source) for source in message.sources),
    )


def _completions_from_pb(message: common_pb2.CompletionNumbers) -> CompletionNumbers:
    return to_value(
        CompletionNumbers,
        message,
        reward_parts=tuple(to_value(PartMean, part) for part in message.reward_parts),
        sites=tuple(to_value(SiteTokens, site) for site in message.sites),
        endings=tuple(to_value(PartMean, part) for part in message.endings),
    )


_PHASE = {phase: common_pb2.LearnerPhase.Value(f"LEARNER_PHASE_{phase.name}") for phase in LearnerPhase}
_PHASE_OF = {pb: phase for phase, pb in _PHASE.items()}


def progress_to_pb(value: LearnerProgress | None) -> common_pb2.LearnerProgress | None:
    return None if value is None else to_message(common_pb2.LearnerProgress, value, phase=_PHASE[value.phase])


def progress_from_pb(message: common_pb2.LearnerProgress) -> LearnerProgress | None:
    """Convert a learner's progress; None for a phase of a newer program."""
    phase = _PHASE_OF.get(message.phase)
    return None if phase is None else to_value(LearnerProgress, message, phase=phase)


def series_to_pb(series: Sequence[Series]) -> list[metrics_pb2.MetricSeries]:
    return [to_message(metrics_pb2.MetricSeries, one) for one in series]


def series_from_pb(messages: Iterable[metrics_pb2.MetricSeries]) -> list[Series]:
    """Convert series; their reader checks them."""
    return [to_value(Series, one) for one in messages]
