"""Where payloads are at home, and how their files come to hand: here, both are the files of the data directory.

Whoever keeps payloads elsewhere (heterorl.coordinator.store.bucket) derives from these three classes. A `BlobStore`
asks its home before it says that a payload is complete and after it deleted one; whoever reads files asks for copies
first.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from enum import Enum
from pathlib import Path

from heterorl.common.errors import PayloadMissing
from heterorl.common.types.common import Digest
from heterorl.common.types.policy import NO_PLACE, PutPlace


class PayloadStorage:
    """Files are the payloads: there is nothing elsewhere."""

    @property
    def used_bytes(self) -> int | None:
        """Bytes of all payloads there; None where the files are all there is."""
        return None

    def size(self, digest: Digest) -> int | None:  # noqa: ARG002 - of no payload
        return None

    def digests(self) -> frozenset[Digest]:
        return frozenset()

    async def reserve(self, num_bytes: int) -> None:
        """Make room for a payload. Raises StoreFull: there is none."""

    async def keep(self, digest: Digest, path: Path) -> None:
        """Take a complete, verified file; durable when this returns.
        Raises Busy: it cannot be taken now; the file stays."""

    async def erase(self, digest: Digest) -> int:  # noqa: ARG002 - none is there
        """Delete a payload; returns its bytes, 0 where it is not there. Raises Busy: it cannot be deleted now."""
        return 0

    async def set_aside(self, digest: Digest) -> None:
        """Move a damaged payload out of the way. Raises Busy: it cannot be moved now."""

    async def urls(self, digests: Sequence[Digest]) -> list[str]:
        """An address for each payload from which a node may read it for a while, empty where there is none."""
        return [""] * len(digests)


class Repair(Enum):
    """What a look at a file that a reader found gone or wrong came to."""

    CURED = "cured"
    """It was replaced."""
    RIGHT = "right"
    """It has the bytes of its name, as when another reader had it replaced."""
    LOST = "lost"
    """There is no other to replace it by."""


class PayloadCache:
    """Files of payloads: they are all there, until one is damaged."""

    @asynccontextmanager
    async def at_hand(self, digests: Iterable[Digest]) -> AsyncIterator[None]:  # noqa: ARG002 - all are
        """While files of these payloads are there, as far as they can be had. Raises Busy: nobody can tell now."""
        yield

    async def heal(self, digest: Digest) -> Repair:  # noqa: ARG002 - there is no other
        """Replace a file that is gone or has other bytes than its name says. Raises Busy: nobody can tell now."""
        return Repair.LOST


class DirectUploads:
    """What learners put beside the coordinator, until it has taken it: there is no place for it."""

    async def place(self, digest: Digest, num_bytes: int) -> PutPlace:  # noqa: ARG002 - for no payload
        """Where the first piece of a payload that is missing may be put for a while.
        Raises Busy: nobody can tell now."""
        return NO_PLACE

    async def frames(self, digest: Digest, num_bytes: int, offset: int = 0) -> AsyncIterator[bytes]:  # noqa: ARG002 - of no payload
        """Yield what was put as a payload from a byte on, which nobody has compared with its name yet.

        Raises:
            PayloadMissing: nothing was, or it is no longer there.
            DigestMismatch: it has another size, and is deleted.
            Busy: it cannot be read now.
        """
        raise PayloadMissing(f"payload {digest[:12]} was not put anywhere")
        yield b""

    async def drop(self, digest: Digest) -> None:
        """Delete what was put as a payload, as far as that is possible now."""

    async def run(self) -> None:
        """Delete now and then what nobody took, until cancelled."""
