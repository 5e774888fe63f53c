"""Requests parsed within bounds: their length is looked at before and their fields after, ahead of any handler.

A site's long requests are bytes, which parsing copies. Other requests are short, so that many small entries of one
message cannot take much memory.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from heterorl.common.errors import InvalidRequest
from heterorl.coordinator.rpc.bounds import FIELDS, LONG, MAX_FIELDS, SMALL_BYTES, bound_of, bytes_problem, text_problem


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


def _count(message: Message, left: int, path: str) -> int:
    """Hold the fields of one message against their bounds; how many there are, or more than `left`."""
    number = 0
    for field, value in message.ListFields():
        bound, name = bound_of(message.DESCRIPTOR.name, field.name), f"{path}{field.name}"
        entries = value if is_repeated(field) else (value,)
        if len(entries) > bound.count:
            raise InvalidRequest(f"{name}: more than {bound.count} entries")
        number += 1
        if field.type == field.TYPE_MESSAGE and not _is_map(field):
            for entry in entries:
                number += 1 + _count(entry, left - number, f"{name}.")
                if number > left:
                    return number
        elif field.type in (field.TYPE_STRING, field.TYPE_BYTES):
            number += len(entries)
            for entry in entries:
                problem = text_problem(entry, bound) if isinstance(entry, str) else bytes_problem(entry, bound)
                if problem:
                    raise InvalidRequest(f"{name}: {problem}")
        elif field.message_type is not None:
            number += len(entries)
            _check_map(field.message_type.name, value, name)
    return number


def _check_map(entry: str, entries: Mapping[str, str], name: str) -> None:
    key_bound, value_bound = bound_of(entry, "key"), bound_of(entry, "value")
    for key, value in entries.items():
        problem = text_problem(key, key_bound) or text_problem(value, value_bound)
        if problem:
            raise InvalidRequest(f"{name}: {problem}")


def is_repeated(field: FieldDescriptor) -> bool:
    """Whether a field has entries; protobuf 6.31 says so and warns of `label`, and stubs run with earlier ones."""
    known = getattr(field, "is_repeated", None)
    return bool(getattr(field, "label", 0) == FieldDescriptor.LABEL_REPEATED) if known is None else bool(known)


def _is_map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and bool(field.message_type.GetOptions().map_entry)


@functools.cache
def can_be_long(descriptor: Descriptor) -> bool:
    """Whether a message of this kind can have many entries or bytes."""
    return any(
        is_repeated(field)
        or field.type == FieldDescriptor.TYPE_BYTES
        or (field.message_type is not None and can_be_long(field.message_type))
        for field in descriptor.fields
    )
