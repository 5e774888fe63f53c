"""What another machine says reaches the log as one printable line, and a wait as a number with an end."""

import grpc
import grpc.aio
import pytest

from heterorl.common.errors import MalformedPayload, QuotaExceeded
from heterorl.common.rpc.error_status import from_rpc_error, to_status
from heterorl.common.types.common import MAX_ASKED_S, amount, peer_seconds, peer_words
from heterorl.common.types.policy import version_words
from heterorl.common.wire.policy_messages import manifest_from_bytes
from heterorl.v1 import policy_pb2

FORGED = "busy\n2026-01-01 00:00:00 CRITICAL services: the store failed\r\x1b[2J\u2028\x00" + "x" * 5000


def test_words_are_one_printable_line():
    line = peer_words(FORGED)
    assert line.startswith("busy 2026-01-01")
    assert line.isprintable()
    assert len(line) < 320
    assert peer_words("caf\u00e9 42") == "caf\u00e9 42"


@pytest.mark.parametrize("asked", [float("nan"), float("inf"), -1.0, 1e300, 5.0])
def test_refusal_of_a_peer_has_printable_words_and_a_wait_with_an_end(asked):
    code, message, trailers = to_status(QuotaExceeded(FORGED, action=FORGED, retry_after_s=asked))
    metadata = grpc.aio.Metadata(*trailers)
    error = from_rpc_error(grpc.aio.AioRpcError(code, grpc.aio.Metadata(), metadata, details=message))

    assert isinstance(error, QuotaExceeded)
    assert str(error).isprintable()
    assert 0.0 <= error.retry_after_s <= MAX_ASKED_S
    assert error.retry_after_s == peer_seconds(asked)


@pytest.mark.parametrize(
    "change",
    [
        {"run_id": "x" * 257}, {"state_root": "../x"}, {"layout_id": ""}, {"parent_digest": "/etc"},
        {"payloads": [policy_pb2.PayloadRef(kind=policy_pb2.PAYLOAD_KIND_DELTA, digest="../../x")]},
    ],
)  # fmt: skip
def test_manifest_with_a_field_that_is_no_digest_is_refused(change):
    fields = {"run_id": "run", "state_root": "a" * 64, "layout_id": "b" * 64, "parent_digest": ""}
    assert manifest_from_bytes(policy_pb2.Manifest(**fields).SerializeToString()).run_id == "run"

    with pytest.raises(MalformedPayload):
        manifest_from_bytes(policy_pb2.Manifest(**{**fields, **change}).SerializeToString())


def test_counted_nouns_and_versions():
    assert [amount(count, "version") for count in (0, 1, 2)] == ["0 versions", "1 version", "2 versions"]
    assert (version_words(-1), version_words(0)) == ("no version yet", "version 0")
