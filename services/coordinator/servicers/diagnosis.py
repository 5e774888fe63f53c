"""What the coordinator tells a node that asks about its link: facts of the run, its clock, bytes to measure with.

Guarantees: reads only; an answer is short enough that whoever asks and does not read costs little memory.
"""

from __future__ import annotations

import platform
import sqlite3
from typing import Any

import grpc
import grpc.aio

from heterorl import __version__
from heterorl.common.errors import InvalidRequest
from heterorl.common.rpc.diagnosis import MAX_ANSWER_BYTES, Diagnosis, diagnosis_to_pb
from heterorl.common.types.common import Contract
from heterorl.coordinator.core import Coordinator
from heterorl.coordinator.versions import lineage
from heterorl.v1 import diagnosis_pb2, diagnosis_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]


class DiagnosisServicer(diagnosis_pb2_grpc.DiagnosisServiceServicer):
    """heterorl.v1.DiagnosisService."""

    def __init__(self, core: Coordinator) -> None:
        self._core = core

    async def Diagnose(
        self,
        request: diagnosis_pb2.DiagnoseRequest,
        context: Context,
    ) -> diagnosis_pb2.DiagnoseResponse:
        """Answer one question about the link."""
        if request.answer_bytes > MAX_ANSWER_BYTES:
            raise InvalidRequest(f"answer_bytes: {request.answer_bytes}, at most {MAX_ANSWER_BYTES} are sent back")

        def operation(connection: sqlite3.Connection) -> tuple[int, int, Contract | None]:
            row = connection.execute(
                "SELECT version, bytes_full FROM versions ORDER BY version DESC LIMIT 1"
            ).fetchone()
            version, size = row or (lineage.NONE, 0)
            return version, size, lineage.read_contract(connection)

        head, size, contract = await self._core.database.run(operation)
        diagnosis = Diagnosis(
            server_time=self._core.clock.wall(),
            run_id=self._core.config.run_id,
            heterorl_version=__version__,
            python_version=platform.python_version(),
            grpc_version=grpc.__version__,
            max_message_bytes=self._core.config.max_message_bytes,
            head_version=head,
            bytes_full=size,
            contract=contract,
        )
        return diagnosis_to_pb(diagnosis, padding=bytes(request.answer_bytes))
