"""Reading a request's bytes before anything is made of them: bounds are asked first, at the cost of the tags alone.

protobuf makes an object of some forty bytes for an entry of two, so a legal message of megabytes becomes gigabytes
before a handler sees it. The scan walks the wire format by the message's descriptor, stops at the first field over its
bound, and counts as the parser will: entries of a repeated field add up, packed or not, also when a message inside is
merged.

Guarantees: what passes, the parser turns into memory of the same order as the message. Pure; raises nothing else.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from heterorl.common.errors import InvalidRequest
from heterorl.coordinator.rpc.bounds import Bound, bound_of, tags_of, text_problem

SOON_TAGS = 1024
"""Fields that are read in some milliseconds at worst."""
MAX_SAME = 4
"""Times that a message may state one field that is not repeated; no program of ours states it twice."""
MAX_UNKNOWN_BYTES = 1 << 16
"""Of fields that this program does not know, which a newer one may send."""
_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
_WIDTHS = {_FIXED64: 8, _FIXED32: 4}
_WIRE = {
    FieldDescriptor.TYPE_DOUBLE: _FIXED64,
    FieldDescriptor.TYPE_FIXED64: _FIXED64,
    FieldDescriptor.TYPE_SFIXED64: _FIXED64,
    FieldDescriptor.TYPE_FLOAT: _FIXED32,
    FieldDescriptor.TYPE_FIXED32: _FIXED32,
    FieldDescriptor.TYPE_SFIXED32: _FIXED32,
    FieldDescriptor.TYPE_MESSAGE: _LENGTH,
    FieldDescriptor.TYPE_STRING: _LENGTH,
    FieldDescriptor.TYPE_BYTES: _LENGTH,
}
"""Wire types; the others' is that of a varint."""


@dataclass(frozen=True, slots=True, eq=False)
class _Field:
    """What the scan needs of a field; `inner` are the fields of a message."""

    number: int
    name: str
    wire: int
    is_repeated: bool
    is_bytes: bool
    bound: Bound
    inner: Mapping[int, _Field] | None


_State = dict[int, Any]
"""Of one message: entries so far of its fields by number, states of its single inner messages by -number."""


def parse(data: bytes, descriptor: Descriptor) -> Message:
    """Make a message of its bytes.

    Raises:
        InvalidRequest: the bytes are no such message, or a field is over its bound; it names the field.
    """
    _Scan(data, tags_of(descriptor.name)).message(_fields(descriptor), 0, len(data), {}, "")
    return _made(data, descriptor)


def parse_soon(data: bytes, descriptor: Descriptor) -> Message | None:
    """Make a message of its bytes; None where it has so many fields that this takes time.

    Raises:
        InvalidRequest: see `parse`.
    """
    scan = _Scan(data, SOON_TAGS)
    try:
        scan.message(_fields(descriptor), 0, len(data), {}, "")
    except InvalidRequest:
        if scan.is_over:
            return None
        raise
    return _made(data, descriptor)


def _made(data: bytes, descriptor: Descriptor) -> Message:
    try:
        message: Message = GetMessageClass(descriptor).FromString(data)
    except DecodeError as error:
        raise InvalidRequest(f"not a {descriptor.name}: {error}") from error
    return message


@functools.cache
def has_repeated(descriptor: Descriptor) -> bool:
    """Whether a message of this kind can have many entries, so that reading a long one takes time."""
    return any(
        _is_repeated(each) or (each.message_type is not None and has_repeated(each.message_type))
        for each in descriptor.fields
    )


@functools.cache
def can_be_long(descriptor: Descriptor) -> bool:
    """Whether a message of this kind can have many entries or bytes."""
    return has_repeated(descriptor) or any(
        each.type == FieldDescriptor.TYPE_BYTES or (each.message_type is not None and can_be_long(each.message_type))
        for each in descriptor.fields
    )


@functools.cache
def _fields(descriptor: Descriptor) -> Mapping[int, _Field]:
    return {
        each.number: _Field(
            number=each.number,
            name=each.name,
            wire=_WIRE.get(each.type, _VARINT),
            is_repeated=_is_repeated(each),
            is_bytes=each.type == FieldDescriptor.TYPE_BYTES,
            bound=bound_of(descriptor.name, each.name),
            inner=None if each.message_type is None else _fields(each.message_type),
        )
        for each in descriptor.fields
    }


class _Scan:
    """One pass over one message's bytes."""

    def __init__(self, data: bytes, most_tags: int) -> None:
        self._data = data
        self._most_tags = most_tags
        self._num_tags = 0
        self._unknown_bytes = 0

    @property
    def is_over(self) -> bool:
        """Whether the message has more fields than were to be read."""
        return self._num_tags > self._most_tags

    def message(self, fields: Mapping[int, _Field], position: int, end: int, state: _State, path: str) -> None:
        """Walk the fields of one message in [position, end)."""
        data = self._data
        while position < end:
            self._num_tags += 1
            if self._num_tags > self._most_tags:
                raise InvalidRequest(f"{path or 'message'}: more than {self._most_tags} fields in one message")
            tag, start = data[position], position + 1
            if tag > 127:
                tag, start = self._varint(position, end)
            wire = tag & 7
            if wire == _LENGTH:
                length, start = self._varint(start, end)
                stop = start + length
            elif wire == _VARINT:
                stop = self._varint(start, end)[1]
            elif wire in _WIDTHS:
                stop = start + _WIDTHS[wire]
            else:
                raise InvalidRequest(f"{path or 'message'}: malformed at byte {position}")
            if stop > end:
                raise InvalidRequest(f"{path or 'message'}: malformed, a field ends behind its message")
            known = fields.get(tag >> 3)
            if known is None or not self._field(known, wire, start, stop, state, path):
                self._unknown_bytes += stop - position
                if self._unknown_bytes > MAX_UNKNOWN_BYTES:
                    raise InvalidRequest(f"{path or 'message'}: more than {MAX_UNKNOWN_BYTES} bytes of unknown fields")
            position = stop

    def _field(self, known: _Field, wire: int, start: int, stop: int, state: _State, path: str) -> bool:
        """Hold one occurrence of a field against its bound; False where the parser takes it for an unknown one."""
        is_packed = wire == _LENGTH and known.wire != _LENGTH and known.is_repeated
        if wire != known.wire and not is_packed:
            return False
        if not known.is_repeated:
            count = state.get(known.number, 0) + 1
            if count > MAX_SAME:
                raise InvalidRequest(f"{_join(path, known)}: more than {MAX_SAME} times in one message")
            state[known.number] = count
        # Each entry has a byte at least: a list whose bound is beyond the message's length need not be counted.
        if known.is_repeated and known.bound.count < len(self._data):
            count = state.get(known.number, 0) + (self._packed(known, start, stop) if is_packed else 1)
            if count > known.bound.count:
                raise InvalidRequest(f"{_join(path, known)}: more than {known.bound.count} entries")
            state[known.number] = count
        if known.inner is not None:
            inner = {} if known.is_repeated else state.setdefault(-known.number, {})
            self.message(known.inner, start, stop, inner, _join(path, known))
        elif wire == _LENGTH and not is_packed:
            self._content(known, start, stop, path)
        return True

    def _content(self, known: _Field, start: int, stop: int, path: str) -> None:
        bound, name = known.bound, _join(path, known)
        if known.is_bytes:
            if stop - start > bound.length:
                raise InvalidRequest(f"{name}: {stop - start} bytes, at most {bound.length} are taken")
            return
        # A character has at most four bytes: a longer text is never decoded.
        if stop - start > 4 * bound.length:
            raise InvalidRequest(f"{name}: more than {bound.length} characters")
        try:
            text = self._data[start:stop].decode()
        except UnicodeDecodeError as error:
            raise InvalidRequest(f"{name}: not UTF-8") from error
        problem = text_problem(text, bound)
        if problem:
            raise InvalidRequest(f"{name}: {problem}")

    def _packed(self, known: _Field, start: int, stop: int) -> int:
        if known.wire in _WIDTHS:
            return (stop - start) // _WIDTHS[known.wire]
        # Each varint ends with a byte below 128.
        return int(np.count_nonzero(np.frombuffer(self._data, np.uint8, stop - start, start) < 128))

    def _varint(self, position: int, end: int) -> tuple[int, int]:
        if position < end and (value := self._data[position]) < 128:
            return value, position + 1
        value = shift = 0
        while position < end and shift < 70:
            byte = self._data[position]
            position += 1
            value |= (byte & 127) << shift
            if byte < 128:
                return value, position
            shift += 7
        raise InvalidRequest("message: malformed, a number does not end")


def _join(path: str, known: _Field) -> str:
    return f"{path}.{known.name}" if path else known.name


def _is_repeated(each: FieldDescriptor) -> bool:
    # protobuf 6.31 has `is_repeated` and warns of `label`; the generated stubs also run with earlier ones.
    known = getattr(each, "is_repeated", None)
    return bool(getattr(each, "label", 0) == FieldDescriptor.LABEL_REPEATED) if known is None else bool(known)
