"""The protos as their descriptors tell: services, rpcs, fields; and bytes of messages as a hostile peer writes them."""

import importlib
import pkgutil

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.internal import encoder, wire_format
from grpc_health.v1 import health_pb2

import heterorl.v1

PROTOS = [
    importlib.import_module(f"heterorl.v1.{module.name}")
    for module in pkgutil.iter_modules(heterorl.v1.__path__)
    if module.name.endswith("_pb2")
]
METHODS = {
    f"/{service.full_name}/{method.name}": method
    for module in (*PROTOS, health_pb2)
    for service in module.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}
NOT_SERVED = {"/grpc.health.v1.Health/List", "/grpc.health.v1.Health/Watch"}
"""Come with the package of health checks."""
REQUESTS = [
    method.input_type
    for module in PROTOS
    for service in module.DESCRIPTOR.services_by_name.values()
    for method in service.methods
]


def is_repeated(field):
    return field.is_repeated if hasattr(field, "is_repeated") else field.label == field.LABEL_REPEATED


def fields(descriptor, path=()):
    """Every field that can hold more than a number, with the way to it."""
    for field in descriptor.fields:
        if is_repeated(field) or field.type in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES):
            yield (*path, field)
        if field.message_type is not None:
            yield from fields(field.message_type, (*path, field))


def wrapped(way, content):
    """The bytes of a message with `content`, the bytes of the last field, at the end of the way."""
    for field in reversed(way[:-1]):
        content = encoder.TagBytes(field.number, wire_format.WIRETYPE_LENGTH_DELIMITED) + _length(content) + content
    return content


def _length(content):
    parts = []
    encoder._EncodeVarint(parts.append, len(content))
    return b"".join(parts)


def bytes_field(field, content):
    return encoder.TagBytes(field.number, wire_format.WIRETYPE_LENGTH_DELIMITED) + _length(content) + content


def entries(field, count):
    """`count` entries as cheap as they come, as a peer with bad intentions writes them."""
    if field.type in (FieldDescriptor.TYPE_MESSAGE, FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES):
        return bytes_field(field, b"") * count
    width = {FieldDescriptor.TYPE_FLOAT: 4, FieldDescriptor.TYPE_DOUBLE: 8}.get(field.type, 1)
    return bytes_field(field, bytes(width * count))
