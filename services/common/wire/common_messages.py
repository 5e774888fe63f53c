"""Shared conversions: fields by name, contract, step reports, metric series, number limits."""

import dataclasses
import enum
import functools
import math
import typing
from collections.abc import Callable, Container, Iterator, Mapping
from types import NoneType
from typing import Any, TypeVar

import blake3
import numpy as np
from google.protobuf.descriptor import Descriptor, EnumDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from heterorl.common.errors import InvalidRequest
from heterorl.common.types.common import (
    NO_LORA,
    Contract,
    Digest,
    Float32Array,
    Int32Array,
    LearnerPhase,
    LearnerProgress,
    LoraSettings,
    SiteId,
    digest_field,
)
from heterorl.common.types.evaluation import EvaluationDraws
from heterorl.common.types.policy import PayloadRef
from heterorl.common.types.rollout import GroupId, RewardPart
from heterorl.common.types.sample import SampleRollout
from heterorl.v1 import common_pb2, evaluation_pb2, policy_pb2

MAX_INT32 = 2**31 - 1
MAX_INT64 = 2**63 - 1
MAX_RUN_ID = 256
ValueT = TypeVar("ValueT")
EnumT = TypeVar("EnumT", bound=enum.Enum)
MessageT = TypeVar("MessageT", bound=Message)
ReadT = TypeVar("ReadT", bound=Callable[[Any], Any])


_UNSTATED: Mapping[Any, Container[str]] = {
    RewardPart: {"weight", "signature"},
    SampleRollout: {"log_ratios", "token_ends", "spans"},
}
"""Fields that the messages of these values lack."""
_OTHER_NAMES = {
    "canary": "canary_logprobs",
    "sampler_logprobs": "logprobs",
    "server_time": "server_time_s",
    "step_id": "request_id",
}
"""Fields that messages name otherwise."""
_READERS: dict[type, Callable[[Any], Any]] = {}
_PLAIN = frozenset({int, float, bool, bytes, NoneType})
"""Types of values that messages take as they are."""


def reads(kind: type) -> Callable[[ReadT], ReadT]:
    """Let a function read each message of this kind inside another one.

    It checks or changes what came. All such functions are in this module: each process has them.
    """

    def registered(read: ReadT) -> ReadT:
        _READERS[kind] = read
        return read

    return registered


def to_message(kind: type[MessageT], value: Any, /, *, without: Container[str] = (), **changed: Any) -> MessageT:
    """A dataclass's message: fields of one name converted, others from `changed`.

    Raises ValueError: a defect: the message lacks a field of the value, and `without` does not name it.
    """
    names = [name for name in _names(type(value)) if name not in changed and name not in without]
    stated = {_name_in(kind.DESCRIPTOR, name): getattr(value, name) for name in names}
    return new_message(kind, **stated, **changed)


def new_message(kind: type[MessageT], /, **fields: Any) -> MessageT:
    """A message of domain values.

    A dataclass becomes a message, a member of an enumeration its number, an array a list. None leaves a field unset.
    Half a surrogate pair, which has no UTF-8, becomes a question mark.
    """
    return kind(**{name: _written(kind.DESCRIPTOR, name, value) for name, value in fields.items()})


def to_value(kind: type[ValueT], message: Message, /, **changed: Any) -> ValueT:
    """A message's dataclass: fields of one name converted, others from `changed`.

    A repeated field becomes a tuple or an array, an unset optional one None. Messages inside are read by the function
    of `reads`, else in this way. Other foreign values are checked by the caller, who passes them in `changed`. A number
    that no member of an enumeration has becomes None where the dataclass allows it.

    Raises:
        InvalidRequest: such a number, where there must be a member.
        KeyError: the message has no such field.
    """
    copied = [name for name in _names(kind) if name not in changed]
    return kind(**{name: _read(kind, message, name) for name in copied}, **changed)


def arguments(message: Message, /, **changed: Any) -> dict[str, Any]:
    """A request's fields as a call's arguments; `changed` are converted already.

    A repeated field becomes a tuple, an unset optional one None.
    """
    found: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        if field.name not in changed:
            value = getattr(message, field.name)
            is_single = isinstance(value, int | float | str | bytes | Message)
            is_unset = field.has_presence and not message.HasField(field.name)
            found[field.name] = None if is_unset else value if is_single else tuple(value)
    return found | changed


def _field_names(kind: Any) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind) if field.name not in _UNSTATED.get(kind, ()))


_names: Callable[[Any], tuple[str, ...]] = functools.cache(_field_names)


def _name_in(descriptor: Any, name: str) -> str:
    return name if name in descriptor.fields_by_name else _OTHER_NAMES.get(name, name)


def _written(descriptor: Any, name: str, value: Any) -> Any:
    if type(value) in _PLAIN:
        return value
    if isinstance(value, tuple | list) and _is_nested(descriptor, name):
        return [_written(descriptor, name, entry) for entry in value]
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, enum.Enum):
        return numbers_of(type(value), descriptor.fields_by_name[name].enum_type)[value]
    if isinstance(value, Contract):
        return contract_to_pb(value)
    if dataclasses.is_dataclass(value):
        return to_message(GetMessageClass(descriptor.fields_by_name[name].message_type), value)
    return value


@functools.cache
def _is_nested(descriptor: Descriptor, name: str) -> bool:
    field = descriptor.fields_by_name.get(name)
    return field is not None and (field.message_type is not None or field.enum_type is not None)


@functools.cache
def numbers_of(kind: type[EnumT], descriptor: EnumDescriptor) -> dict[EnumT, Any]:
    """The number of each member, whose name ends the number's name."""
    prefix = descriptor.values_by_number[0].name.removesuffix("UNSPECIFIED")
    return {member: descriptor.values_by_name[f"{prefix}{member.name}"].number for member in kind}


@functools.cache
def members_of(kind: type[EnumT], descriptor: EnumDescriptor) -> dict[int, EnumT]:
    """The member of each number; numbers of newer programs have none."""
    return {number: member for member, number in numbers_of(kind, descriptor).items()}


def _read(kind: type, message: Message, name: str) -> Any:
    stated = _name_in(message.DESCRIPTOR, name)
    has_none, read = _reader(kind, message.DESCRIPTOR, name)
    if has_none and not message.HasField(stated):
        return None
    value = getattr(message, stated)
    if isinstance(value, int | float | str | bytes | Message) or read in _ARRAYS.values():
        return value if read is None else read(value)
    return tuple(value) if read is None else tuple(map(read, value))


@functools.cache
def _reader(kind: type, descriptor: Descriptor, name: str) -> tuple[bool, Callable[[Any], Any] | None]:
    """Whether an unset field is None, and what reads one value.

    Without a reader a value is taken as it is.
    """
    field, hint = descriptor.fields_by_name[_name_in(descriptor, name)], typing.get_type_hints(kind)[name]
    if field.message_type is None and field.enum_type is None:
        return field.has_presence, _ARRAYS.get(hint)
    parts = set(_parts(hint))
    may_lack = NoneType in parts
    (part,) = parts - {NoneType}
    if field.enum_type is None:
        return field.has_presence and may_lack, _READERS.get(part) or functools.partial(to_value, part)
    members = members_of(part, field.enum_type)

    def member(number: int) -> enum.Enum | None:
        if number not in members and not may_lack:
            raise InvalidRequest(f"{descriptor.name}.{name}: {number} is no {part.__name__} that this release knows")
        return members.get(number)

    return field.has_presence and may_lack, member


def _parts(hint: Any) -> Iterator[type]:
    """The types inside a type: SiteStatus of tuple[SiteStatus, ...]."""
    arguments = [entry for entry in typing.get_args(hint) if entry is not ...]
    if not arguments:
        yield hint
    for argument in arguments:
        yield from _parts(argument)


def floats(values: Any) -> Float32Array:
    return np.array(values, np.float32)


def ids(values: Any) -> Int32Array:
    """Whole numbers of a message; one beyond int32 is clamped."""
    return np.minimum(np.array(values, np.int64), MAX_INT32).astype(np.int32)


_ARRAYS: Mapping[Any, Callable[[Any], Any]] = {Float32Array: floats, Int32Array: ids}
"""Readers of repeated numbers, at once."""


@reads(GroupId)
def group_id_from_pb(message: common_pb2.GroupId) -> GroupId:
    return GroupId(
        site=SiteId(message.site), incarnation=message.incarnation, sequence=min(message.sequence, MAX_INT64)
    )


@reads(PayloadRef)
def payload_from_pb(message: policy_pb2.PayloadRef) -> PayloadRef:
    """Convert a payload's reference; raises InvalidRequest for a bad field."""
    if message.num_bytes > MAX_INT64:
        raise InvalidRequest(f"payload.num_bytes: {message.num_bytes} is beyond any file")
    # The only place where a payload's name enters; it becomes a file name.
    return to_value(PayloadRef, message, digest=digest_field("payload.digest", message.digest))


@reads(EvaluationDraws)
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


def bytes_digest(data: bytes) -> Digest:
    """blake3 of bytes, lower-case hex."""
    return Digest(blake3.blake3(data).hexdigest())


def contract_to_bytes(value: Contract) -> bytes:
    return contract_to_pb(value).SerializeToString(deterministic=True)


def contract_from_bytes(data: bytes) -> Contract:
    return contract_from_pb(common_pb2.Contract.FromString(data))


def contract_to_pb(value: Contract) -> common_pb2.Contract:
    return to_message(
        common_pb2.Contract,
        value,
        # Absent where there are no adapters.
        lora=to_message(common_pb2.LoraSettings, value.lora) if value.lora.rank else None,
        # A single token goes into the old field, so earlier programs read equal bytes. They see none of several, so
        # an earlier coordinator judges no ending instead of refusing right ones.
        eos_token_id=value.end_token_ids[0] if len(value.end_token_ids) == 1 else None,
        end_token_ids=value.end_token_ids if len(value.end_token_ids) > 1 else (),
    )


@reads(Contract)
def contract_from_pb(message: common_pb2.Contract) -> Contract:
    """Convert a contract; an earlier program's lacks adapters, turns, several end tokens.

    Raises InvalidRequest if the log-prob mode is not stated, or a duration is not finite.
    """
    if not 0 <= message.trajectory_s < math.inf:
        raise InvalidRequest(f"contract.trajectory_s: {message.trajectory_s} is not a number of seconds")
    only = [message.eos_token_id] if message.HasField("eos_token_id") else []
    return to_value(
        Contract,
        message,
        lora=to_value(LoraSettings, message.lora) if message.lora.rank else NO_LORA,
        end_token_ids=tuple(sorted({*message.end_token_ids, *only})),
        max_turns=max(1, message.max_turns),
    )


@reads(LearnerProgress)
def progress_from_pb(message: common_pb2.LearnerProgress) -> LearnerProgress | None:
    """Convert a learner's progress; None for a phase of a newer program."""
    phases = members_of(LearnerPhase, common_pb2.LearnerPhase.DESCRIPTOR)
    return to_value(LearnerProgress, message) if message.phase in phases else None
