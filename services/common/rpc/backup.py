"""Asking a coordinator for a backup."""

from __future__ import annotations

from dataclasses import dataclass

from heterorl.common.rpc.calls import Calls
from heterorl.v1 import backup_pb2

BACKUP_TIMEOUT_S = 3600.0
"""Copying between disks takes its time; the same name may be asked for again meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Backup:
    """A copy of a run; `path` is on the coordinator's machine, `made_s` seconds since the epoch."""

    path: str
    head_version: int
    num_payloads: int
    num_bytes: int
    made_s: float
    audit_digest: str


def backup_to_pb(value: Backup) -> backup_pb2.BackupResponse:
    """Convert a backup."""
    return backup_pb2.BackupResponse(**{name: getattr(value, name) for name in Backup.__slots__})


def backup_from_pb(message: backup_pb2.BackupResponse) -> Backup:
    """Convert a backup."""
    return Backup(**{name: getattr(message, name) for name in Backup.__slots__})


class BackupClient(Calls):
    """heterorl.v1.BackupService at an address."""

    async def backup(self, *, name: str) -> Backup:
        """Have the run as it is written into a directory of this name; repeating the call is harmless."""
        request = backup_pb2.BackupRequest(name=name)
        return backup_from_pb(await self._call("Backup", request, timeout_s=BACKUP_TIMEOUT_S))
