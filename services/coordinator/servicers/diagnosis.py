"""What the coordinator tells a node that asks about its link: facts of the run, its clock, bytes to measure with.

Guarantees: reads only; an answer is short enough that whoever asks and does not read costs little memory.
"""

from __future__ import annotations

import platform
from typing import Any

import grpc
import grpc.aio

from heterorl import __version__
from heterorl.common.errors import InvalidRequest
from heterorl.common.rpc.diagnosis import MAX_ANSWER_BYTES, Diagnosis, diagnosis_to_pb
from heterorl.common.types.common import Contract
from heterorl.common.types.policy import NO_VERSION
from heterorl.coordinator.parts import Parts
from heterorl.coordinator.store.connection import Connection
from heterorl.coordinator.versions import lineage
from heterorl.coordinator.versions.lineage import read_statement
from heterorl.v1 import diagnosis_pb2, diagnosis_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]


class DiagnosisServicer(diagnosis_pb2_grpc.DiagnosisServiceServicer):
    """heterorl.v1.DiagnosisService."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    async def Diagnose(
        self,
        request: diagnosis_pb2.DiagnoseRequest,
        context: Context,
    ) -> diagnosis_pb2.DiagnoseResponse:
        """Answer one question about the link."""
        if request.answer_bytes > MAX_ANSWER_BYTES:
            raise InvalidRequest(f"answer_bytes: {request.answer_bytes}, at most {MAX_ANSWER_BYTES} are sent back")

        def operation(connection: Connection) -> tuple[lineage.Head | None, Contract | None, bytes]:
            return lineage.read_head(connection), lineage.read_contract(connection), read_statement(connection)

        head, contract, statement = await self._parts.database.run(operation)
        diagnosis = Diagnosis(
            server_time=self._parts.clock.wall(),
            run_id=self._parts.config.run_id,
            heterorl_version=__version__,
            python_version=platform.python_version(),
            grpc_version=grpc.__version__,
            max_message_bytes=self._parts.config.max_message_bytes,
            head_version=NO_VERSION if head is None else head.version,
            bytes_full=0 if head is None else head.full_bytes,
            contract=contract,
            statement=statement,
        )
        return diagnosis_to_pb(diagnosis, padding=bytes(request.answer_bytes))
