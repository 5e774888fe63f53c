"""Diagnosis and backup of a coordinator: values, messages and clients."""

from dataclasses import dataclass
from typing import Any

from heterorl.common.rpc.calls import Calls
from heterorl.common.types.common import Contract
from heterorl.common.wire.common_messages import to_value

OVERHEAD_BYTES = 4096
"""Room in a message for everything but its padding."""
MAX_ANSWER_BYTES = 1 << 20
"""Largest padding of an answer: every role may ask, and unread answers stay in the coordinator's memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Facts of a coordinator; `contract` is None before a learner states one.

    `server_time` is in seconds since the epoch.
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
    """Configuration behind the contract (heterorl.common.wire.statement); empty if none was stated."""
    groups_per_version: int = 0
    """Groups of one version as pacing counts them; 0 from an earlier coordinator."""


class DiagnosisClient(Calls):
    """Client of the diagnosis service, for a node of any role."""

    async def diagnose(self, *, send_bytes: int = 0, answer_bytes: int = 0, timeout_s: float = 5.0) -> Diagnosis:
        """Ask the coordinator, with padding in request and answer."""
        asked: dict[str, Any] = {"padding": bytes(send_bytes), "answer_bytes": answer_bytes}
        return to_value(Diagnosis, await self._call("Diagnose", timeout_s=timeout_s, **asked))


BACKUP_TIMEOUT_S = 3600.0
"""A copy between disks takes long; the same name may be asked for again meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Backup:
    """A copy of a run, at `path` on the coordinator's machine."""

    path: str
    head_version: int
    num_payloads: int
    num_bytes: int
    audit_digest: str
    existed_since: float = 0.0
    """When it was made, if it was there before the request, seconds since the epoch; 0: it is new."""


class BackupClient(Calls):
    """Client of the backup service."""

    async def backup(self, *, name: str) -> Backup:
        """Write the run into a directory of this name; repeating is harmless."""
        return to_value(Backup, await self._call("Backup", name=name, timeout_s=BACKUP_TIMEOUT_S))
