"""Messages <-> backups."""

from __future__ import annotations

from typing import Any

import grpc.aio

from heterorl.common.rpc.backup import backup_to_pb
from heterorl.coordinator.payloads.backup import Backups
from heterorl.v1 import backup_pb2, backup_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]


class BackupServicer(backup_pb2_grpc.BackupServiceServicer):
    """heterorl.v1.BackupService."""

    def __init__(self, backups: Backups) -> None:
        self._backups = backups

    async def Backup(
        self,
        request: backup_pb2.BackupRequest,
        context: Context,
    ) -> backup_pb2.BackupResponse:
        """Make a backup."""
        return backup_to_pb(await self._backups.make(request.name))
