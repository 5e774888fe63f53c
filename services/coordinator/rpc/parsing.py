"""Requests parsed within bounds: their length is looked at before and their fields after, ahead of any handler.

A site's long requests are bytes, which parsing copies. Other requests are short, so that many small entries of one
message cannot take much memory.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from heterorl.common.errors import InvalidRequest
from heterorl.coordinator.rpc.bounds import (
    FIELDS,
    LONG,
    MAX_FIELDS,
    SMALL_BYTES,
    Bound,
    bound_of,
    bytes_problem,
    text_problem,
)


def parse(data: bytes, descriptor: Descriptor) -> Message:
    """Make a message of its bytes, and hold it against the bounds.

    Raises:
        InvalidRequest: the bytes are no such message, or a field is over its bound; it names the field.
    """
    name = descriptor.name
    if len(data) > SMALL_BYTES and name not in LONG:
        raise InvalidRequest(f"{name}: {len(data)} bytes, at most {SMALL_BYTES} are taken")
    try:
        message: Message = GetMessageClass(descriptor).FromString(data)
    except DecodeError as error:
        raise InvalidRequest(f"not a {name}: {error}") from error
    check(message)
    return message


def check(message: Message) -> None:
    """Hold a message against the bounds.

    Raises:
        InvalidRequest: a field is over its bound; it names the field.
    """
    left = FIELDS.get(message.DESCRIPTOR.name, MAX_FIELDS)
    if _count(message, left, "") > left:
        raise InvalidRequest(f"{message.DESCRIPTOR.name}: more than {left} fields in one message")


@dataclass(frozen=True, slots=True)
class _Field:
    """A field that has something to check."""

    name: str
    bound: Bound
    is_repeated: bool
    is_message: bool
    is_text: bool
    of_map: tuple[Bound, Bound] | None
    """Bounds of keys and values."""


@functools.cache
def _fields(descriptor: Descriptor) -> tuple[_Field, ...]:
    """The fields of a message but for single numbers."""
    found = []
    for field in descriptor.fields:
        entry = field.message_type
        is_map = entry is not None and entry.GetOptions().map_entry
        is_text = field.type in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)
        if is_repeated(field) or is_text or entry is not None:
            of_map = (bound_of(entry.name, "key"), bound_of(entry.name, "value")) if entry and is_map else None
            bound = bound_of(descriptor.name, field.name)
            is_message = entry is not None and not is_map
            found.append(_Field(field.name, bound, is_repeated(field), is_message, is_text, of_map))
    return tuple(found)


def _count(message: Message, left: int, path: str) -> int:
    """Hold the fields of one message against their bounds; how many entries there are, or more than `left`."""
    number = 1
    for field in _fields(message.DESCRIPTOR):
        value = getattr(message, field.name)
        if field.is_repeated:
            if len(value) > field.bound.count:
                raise InvalidRequest(f"{path}{field.name}: more than {field.bound.count} entries")
            entries = value
        elif field.is_message:
            entries = (value,) if message.HasField(field.name) else ()
        else:
            entries = (value,)
        if field.is_message:
            for entry in entries:
                number += _count(entry, left - number, f"{path}{field.name}.")
                if number > left:
                    return number
        elif field.is_text:
            number += len(entries)
            for entry in entries:
                problem = (
                    text_problem(entry, field.bound) if isinstance(entry, str) else bytes_problem(entry, field.bound)
                )
                if problem:
                    raise InvalidRequest(f"{path}{field.name}: {problem}")
        elif field.of_map is not None:
            number += len(entries)
            for key, text in value.items():
                problem = text_problem(key, field.of_map[0]) or text_problem(text, field.of_map[1])
                if problem:
                    raise InvalidRequest(f"{path}{field.name}: {problem}")
    return number


def is_repeated(field: FieldDescriptor) -> bool:
    """Whether a field has entries; protobuf 6.31 says so and warns of `label`, and stubs run with earlier ones."""
    known = getattr(field, "is_repeated", None)
    return bool(getattr(field, "label", 0) == FieldDescriptor.LABEL_REPEATED) if known is None else bool(known)


@functools.cache
def can_be_long(descriptor: Descriptor) -> bool:
    """Whether a message of this kind can have many entries or bytes."""
    return any(
        is_repeated(field)
        or field.type == FieldDescriptor.TYPE_BYTES
        or (field.message_type is not None and can_be_long(field.message_type))
        for field in descriptor.fields
    )
