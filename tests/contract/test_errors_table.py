"""Every typed refusal crosses the wire as itself."""

import base64
from urllib.parse import quote

import grpc
import grpc.aio
import pytest
from google.protobuf import any_pb2
from google.rpc import status_pb2

from heterorl.common import errors
from heterorl.common.errors import HeterorlError, RemoteError
from heterorl.common.process.backoff import is_transient
from heterorl.common.rpc.error_status import TABLE, from_rpc_error, reason_of, to_status
from heterorl.common.rpc.transport_options import link_options
from heterorl.v1 import errors_pb2

LOCAL = {errors.Unreachable}
"""Raised by the caller itself when there is no answer."""


def _received(error: HeterorlError) -> HeterorlError | None:
    code, message, trailers = to_status(error)
    return from_rpc_error(
        grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailers), details=message)
    )


def _all_below(error: type[HeterorlError]) -> set[type[HeterorlError]]:
    return {each for below in error.__subclasses__() for each in (below, *_all_below(below))}


# Others are raised by a caller and caught by it.
KNOWN = {each for each in _all_below(RemoteError) if each.__module__ == errors.__name__}


def test_table_has_every_refusal_and_every_reason():
    assert set(TABLE) == KNOWN - LOCAL
    reasons = {reason for reason, _ in TABLE.values()}
    assert reasons == set(errors_pb2.ErrorReason.values()) - {errors_pb2.ERROR_REASON_UNSPECIFIED}


@pytest.mark.parametrize("error_class", sorted(TABLE, key=lambda item: item.__name__))
def test_refusal_keeps_type_message_action_and_delay_across_the_wire(error_class):
    received = _received(error_class("the text", retry_after_s=2.5))

    assert type(received) is error_class
    assert str(received) == f"the text ({error_class.action})"
    assert received.retry_after_s == 2.5
    assert reason_of(received) != "internal"


@pytest.mark.parametrize("character", ["a", "%", "\n", "\u00e9", "\U0001f600"])
def test_refusal_of_any_length_fits_what_grpc_carries(character):
    limit = dict(link_options(1 << 20))["grpc.max_metadata_size"]
    text = "begin" + character * 10_000
    _, message, trailers = to_status(errors.InvalidRequest(text, action=text))
    escaped = quote(message, safe=" !\"#$&'()*+,/:;<=>?@[\\]^`{|}")
    binary = sum(len(base64.b64encode(value)) for _, value in trailers)

    assert len(escaped) + binary + 512 < limit
    assert str(_received(errors.InvalidRequest(text))).startswith("begin")


def test_unknown_error_is_internal_and_a_broken_link_is_not_typed():
    internal = _received(errors.CorruptStore("row 7"))

    assert type(internal) is RemoteError
    assert "row 7" in str(internal)
    broken = grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata())
    assert from_rpc_error(broken) is None


def test_internal_without_our_detail_is_the_transports():
    core = grpc.aio.AioRpcError(
        grpc.StatusCode.INTERNAL, grpc.aio.Metadata(), grpc.aio.Metadata(), details="Internal error from Core"
    )

    assert from_rpc_error(core) is None


WAITABLE = {
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.UNAUTHENTICATED,
}
"""Statuses whose cause may pass without the caller; of any other one a repetition is refused again."""
DELAYS = [0.0, 2.5]


@pytest.mark.parametrize("error_class", sorted(KNOWN, key=lambda item: item.__name__))
def test_every_refusal_states_itself_whether_waiting_helps(error_class):
    assert "is_transient" in vars(error_class), "inherited is not decided"
    for delay_s in DELAYS:
        assert isinstance(error_class("x", retry_after_s=delay_s).is_transient, bool)
    assert not error_class.is_overload or error_class("x", retry_after_s=1.0).is_transient


@pytest.mark.parametrize("error_class", sorted(TABLE, key=lambda item: item.__name__))
def test_table_and_refusals_agree_on_what_may_pass(error_class):
    _, code = TABLE[error_class]
    for delay_s in DELAYS:
        error = error_class("x", retry_after_s=delay_s)
        assert is_transient(error) is is_transient(_received(error)) is error.is_transient
        assert code in WAITABLE or not error.is_transient
        assert code is not grpc.StatusCode.UNAVAILABLE or error.is_transient
    if error_class.is_overload:
        assert code in {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED}


def _bare(code, details):
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details=details)


@pytest.mark.parametrize("who", ["SERVER: Sent", "SERVER: Received", "CLIENT: Sent", "CLIENT: Received"])
def test_message_over_a_limit_has_an_error_of_its_own(who):
    refused = _bare(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{who} message larger than max (2097176 vs. 2097152)")

    error = from_rpc_error(refused)

    assert type(error) is errors.MessageTooLarge
    assert "max_message_bytes" in str(error)
    assert not is_transient(error)


@pytest.mark.parametrize("code", [code for code in grpc.StatusCode if code is not grpc.StatusCode.OK])
def test_no_status_without_our_detail_is_final(code):
    error = from_rpc_error(_bare(code, "Concurrent RPC limit exceeded!"))

    assert is_transient(error or errors.Unreachable("no answer", retry_after_s=1.0))
    assert not isinstance(error, errors.QuotaExceeded)


@pytest.mark.parametrize("is_status_whole", [False, True])
def test_detail_that_cannot_be_read_is_the_transports(is_status_whole):
    # Field 3 ends before its text, as a detail or as the whole status.
    data = b"\x1a\x7f"
    if is_status_whole:
        packed = any_pb2.Any(type_url="type.googleapis.com/heterorl.v1.ErrorDetail", value=data)
        data = status_pb2.Status(code=14, message="x", details=[packed]).SerializeToString()
    trailers = grpc.aio.Metadata(("grpc-status-details-bin", data))
    refused = grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), trailers, details="x")

    assert from_rpc_error(refused) is None
