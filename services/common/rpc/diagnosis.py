"""What a coordinator states about itself to whoever is about to join, and how large a message gets through."""

from __future__ import annotations

from dataclasses import dataclass

from heterorl.common.rpc.calls import Calls
from heterorl.common.types.common import Contract
from heterorl.common.wire.common import contract_from_pb, contract_to_pb
from heterorl.v1 import diagnosis_pb2

OVERHEAD_BYTES = 4096
"""Room in a message for everything but its padding."""
MAX_ANSWER_BYTES = 1 << 20
"""Largest padding of an answer: every role may ask, and what nobody reads stays in the coordinator's memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """A coordinator's own facts; `server_time` is seconds since the epoch, `contract` None until a learner stated it.

    Example:
        Diagnosis(server_time=0.0, run_id="run", heterorl_version="0.9", python_version="3.12.1", grpc_version="1.85",
            max_message_bytes=1 << 24, head_version=-1, bytes_full=0, contract=None)
    """

    server_time: float
    run_id: str
    heterorl_version: str
    python_version: str
    grpc_version: str
    max_message_bytes: int
    head_version: int
    bytes_full: int
    contract: Contract | None
    statement: bytes = b""
    """Of the configuration behind the contract (heterorl.common.wire.statement); empty where none was stated."""


class DiagnosisClient(Calls):
    """A coordinator at an address, asked about itself by a node of any role."""

    async def diagnose(self, *, send_bytes: int = 0, answer_bytes: int = 0, timeout_s: float = 5.0) -> Diagnosis:
        """Ask, with padding of the given sizes in request and answer.

        Raises:
            HeterorlError: the coordinator's refusal, or Unreachable.
        """
        request = diagnosis_pb2.DiagnoseRequest(padding=bytes(send_bytes), answer_bytes=answer_bytes)
        return diagnosis_from_pb(await self._call("Diagnose", request, timeout_s=timeout_s))


def diagnosis_to_pb(value: Diagnosis, *, padding: bytes = b"") -> diagnosis_pb2.DiagnoseResponse:
    """Convert a diagnosis."""
    return diagnosis_pb2.DiagnoseResponse(
        server_time_s=value.server_time,
        run_id=value.run_id,
        heterorl_version=value.heterorl_version,
        python_version=value.python_version,
        grpc_version=value.grpc_version,
        max_message_bytes=value.max_message_bytes,
        head_version=value.head_version,
        bytes_full=value.bytes_full,
        contract=None if value.contract is None else contract_to_pb(value.contract),
        padding=padding,
        statement=value.statement,
    )


def diagnosis_from_pb(message: diagnosis_pb2.DiagnoseResponse) -> Diagnosis:
    """Convert a diagnosis."""
    return Diagnosis(
        server_time=message.server_time_s,
        run_id=message.run_id,
        heterorl_version=message.heterorl_version,
        python_version=message.python_version,
        grpc_version=message.grpc_version,
        max_message_bytes=message.max_message_bytes,
        head_version=message.head_version,
        bytes_full=message.bytes_full,
        contract=contract_from_pb(message.contract) if message.HasField("contract") else None,
        statement=message.statement,
    )
