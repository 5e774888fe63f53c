"""Base classes of payload storage: files in data_dir; the bucket overrides them.

`bucket_storage` and `bucket_cache` derive from both classes. `BlobStore` calls the storage before it reports a payload
complete, and when it deletes one. Readers of files ask the cache first.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from enum import Enum
from pathlib import Path

from heterorl.common.types.common import Digest


class PayloadStorage:
    """Payloads are the files of the data directory."""

    @property
    def used_bytes(self) -> int | None:
        """Bytes of all payloads; None if the files are the payloads."""
        return None

    def size(self, digest: Digest) -> int | None:  # noqa: ARG002 - of no payload
        return None

    def digests(self) -> frozenset[Digest]:
        return frozenset()

    async def reserve(self, num_bytes: int) -> None:
        """Make room for a payload. Raises StoreFull: there is no room."""

    async def keep(self, digest: Digest, path: Path) -> None:
        """Store a complete, verified file durably.
        Raises Busy: retry later; the file stays."""

    async def erase(self, digest: Digest) -> int:  # noqa: ARG002 - none is there
        """Delete a payload; returns its bytes, 0 if missing.
        Raises Busy: it cannot be deleted now."""
        return 0

    async def set_aside(self, digest: Digest) -> None:
        """Move a damaged payload out of the way.
        Raises Busy: it cannot be moved now."""

    async def urls(self, digests: Sequence[Digest]) -> list[str]:
        """A presigned URL for each payload, or empty texts."""
        return [""] * len(digests)


class Repair(Enum):
    """Outcome of a repair of a missing or wrong file."""

    CURED = "cured"
    RIGHT = "right"
    """The file is right, for example because another reader had it replaced."""
    LOST = "lost"
    """There is no other copy."""


class PayloadCache:
    """Payload files, all present unless damaged."""

    @asynccontextmanager
    async def at_hand(self, digests: Iterable[Digest]) -> AsyncIterator[None]:  # noqa: ARG002 - all are
        """Keep the files of payloads while the context is open.
        Raises Busy: retry later."""
        yield

    async def make_room(self, missing_bytes: int) -> None:
        """Delete unused copies of payloads, until so many bytes are free."""

    async def heal(self, digest: Digest) -> Repair:  # noqa: ARG002 - there is no other
        """Replace a missing or damaged file. Raises Busy: retry later."""
        return Repair.LOST
