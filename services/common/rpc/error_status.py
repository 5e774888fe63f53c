"""Conversion between typed errors and gRPC statuses; details travel as ErrorDetail.

Our server always adds ErrorDetail, so a status without one comes from the transport, a proxy or an overloaded library.
It is retried with a growing delay and is never final, except for a message over a limit: a retry would be as large.
"""

import re

import grpc
import grpc.aio
from google.protobuf import any_pb2
from google.protobuf.message import DecodeError
from google.rpc import status_pb2
from grpc_status import rpc_status

from heterorl.common import errors
from heterorl.common.errors import HeterorlError, RemoteError
from heterorl.common.types.common import peer_seconds, peer_words
from heterorl.v1 import errors_pb2

_R = errors_pb2.ErrorReason
TABLE: dict[type[RemoteError], tuple[errors_pb2.ErrorReason.ValueType, grpc.StatusCode]] = {
    errors.InvalidRequest: (_R.ERROR_REASON_INVALID_REQUEST, grpc.StatusCode.INVALID_ARGUMENT),
    errors.ContractMismatch: (_R.ERROR_REASON_CONTRACT_MISMATCH, grpc.StatusCode.FAILED_PRECONDITION),
    errors.UnknownVersion: (_R.ERROR_REASON_UNKNOWN_VERSION, grpc.StatusCode.NOT_FOUND),
    errors.UnknownPayload: (_R.ERROR_REASON_UNKNOWN_PAYLOAD, grpc.StatusCode.NOT_FOUND),
    errors.UnknownSample: (_R.ERROR_REASON_UNKNOWN_SAMPLE, grpc.StatusCode.NOT_FOUND),
    errors.DigestMismatch: (_R.ERROR_REASON_DIGEST_MISMATCH, grpc.StatusCode.DATA_LOSS),
    errors.StaleEpoch: (_R.ERROR_REASON_STALE_EPOCH, grpc.StatusCode.ABORTED),
    errors.LeaseHeld: (_R.ERROR_REASON_LEASE_HELD, grpc.StatusCode.FAILED_PRECONDITION),
    errors.ParentNotHead: (_R.ERROR_REASON_PARENT_NOT_HEAD, grpc.StatusCode.FAILED_PRECONDITION),
    errors.StepConflict: (_R.ERROR_REASON_STEP_CONFLICT, grpc.StatusCode.ALREADY_EXISTS),
    errors.GroupNotAvailable: (_R.ERROR_REASON_GROUP_NOT_AVAILABLE, grpc.StatusCode.FAILED_PRECONDITION),
    errors.PayloadMissing: (_R.ERROR_REASON_PAYLOAD_MISSING, grpc.StatusCode.FAILED_PRECONDITION),
    errors.QuotaExceeded: (_R.ERROR_REASON_QUOTA_EXCEEDED, grpc.StatusCode.RESOURCE_EXHAUSTED),
    errors.MessageTooLarge: (_R.ERROR_REASON_MESSAGE_TOO_LARGE, grpc.StatusCode.RESOURCE_EXHAUSTED),
    errors.Draining: (_R.ERROR_REASON_DRAINING, grpc.StatusCode.UNAVAILABLE),
    errors.NotRegistered: (_R.ERROR_REASON_NOT_REGISTERED, grpc.StatusCode.FAILED_PRECONDITION),
    errors.RunFinished: (_R.ERROR_REASON_RUN_FINISHED, grpc.StatusCode.FAILED_PRECONDITION),
    errors.Unauthenticated: (_R.ERROR_REASON_UNAUTHENTICATED, grpc.StatusCode.UNAUTHENTICATED),
    errors.PermissionDenied: (_R.ERROR_REASON_PERMISSION_DENIED, grpc.StatusCode.PERMISSION_DENIED),
    errors.Quarantined: (_R.ERROR_REASON_QUARANTINED, grpc.StatusCode.FAILED_PRECONDITION),
    errors.StoreFull: (_R.ERROR_REASON_STORE_FULL, grpc.StatusCode.RESOURCE_EXHAUSTED),
    errors.Busy: (_R.ERROR_REASON_BUSY, grpc.StatusCode.UNAVAILABLE),
}
_CLASS_OF = {reason: error for error, (reason, _) in TABLE.items()}
_REFUSING_CODES = frozenset(
    {grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED}
)
"""Codes that a proxy or a foreign server answers at once, on every attempt."""
REFUSED_RETRY_S = 5.0
_TOO_LARGE = re.compile(r"message larger than max \(\d+ vs\. -?\d+\)")
"""gRPC's text for a message over a limit; it has no code of its own."""


def reason_of(error: HeterorlError) -> str:
    """Name of an error in metrics and logs: bounded, lower case."""
    entry = TABLE.get(type(error)) if isinstance(error, RemoteError) else None
    if entry is None:
        return "internal"
    return errors_pb2.ErrorReason.Name(entry[0]).removeprefix("ERROR_REASON_").lower()


def to_status(error: HeterorlError) -> tuple[grpc.StatusCode, str, tuple[tuple[str, bytes], ...]]:
    """Typed error -> (code, message, trailing metadata)."""
    reason, code = (
        TABLE.get(type(error), (_R.ERROR_REASON_UNSPECIFIED, grpc.StatusCode.INTERNAL))
        if isinstance(error, RemoteError)
        else (_R.ERROR_REASON_UNSPECIFIED, grpc.StatusCode.INTERNAL)
    )
    # gRPC drops a refusal whose metadata exceed 8 KiB. They hold the text twice; its reader keeps no more than this.
    message = peer_words(Exception.__str__(error))
    detail = errors_pb2.ErrorDetail(
        reason=reason,
        action=peer_words(error.action),
        retry_after_s=error.retry_after_s if isinstance(error, RemoteError) else 0.0,
    )
    packed = any_pb2.Any()
    packed.Pack(detail)
    status = rpc_status.to_status(status_pb2.Status(code=code.value[0], message=message, details=[packed]))
    return code, message, tuple(status.trailing_metadata)


def from_rpc_error(error: grpc.aio.AioRpcError) -> HeterorlError | None:
    """Error that the server raised; None for a failure of the transport."""
    detail = _detail_of(error)
    if detail is not None:
        error_class = _CLASS_OF.get(detail.reason)
        if error_class is not None:
            return error_class(
                peer_words(error.details() or ""),
                action=peer_words(detail.action) or None,
                retry_after_s=peer_seconds(detail.retry_after_s),
            )
        text = f"{error.code().name}: {error.details()}"
        return RemoteError(text, action="see the coordinator's log", retry_after_s=detail.retry_after_s)
    if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and _TOO_LARGE.search(error.details() or ""):
        return errors.MessageTooLarge(error.details() or "")
    if error.code() in _REFUSING_CODES:
        return RemoteError(
            f"{error.code().name}: {error.details()}",
            action="retried; if it stays, check that the address is the coordinator's, and its release",
            retry_after_s=REFUSED_RETRY_S,
        )
    # gRPC also answers a bare INTERNAL when the connection ends during a call, a bare RESOURCE_EXHAUSTED when it is
    # overloaded, and a bare UNKNOWN for a defect. Its client writes a bare INTERNAL over a refusal if it was sending a
    # message when the call ended (grpc/grpc#36066): the next attempt brings the refusal.
    return None


def _detail_of(error: grpc.aio.AioRpcError) -> errors_pb2.ErrorDetail | None:
    """Our server's detail; None without one that can be read."""
    try:
        # rpc_status reads only code(), details() and trailing_metadata(), which the aio error has too.
        status = rpc_status.from_call(error)
        for packed in status.details if status is not None else ():
            detail = errors_pb2.ErrorDetail()
            if packed.Unpack(detail):
                return detail
    except (ValueError, DecodeError):
        pass
    return None
