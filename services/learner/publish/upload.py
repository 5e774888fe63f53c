"""Sending a payload: what the coordinator has is asked first, so that no byte is sent twice after a broken link."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from heterorl.common.api import LearnerApi
from heterorl.common.errors import DigestMismatch, RemoteError, Unreachable
from heterorl.common.process.metrics import BYTES
from heterorl.common.process.patience import Patience
from heterorl.common.types.policy import PayloadRef
from heterorl.common.weights.container import FRAME_BYTES

MAX_MISMATCHES = 3
"""Complete uploads of which the coordinator says that the bytes are others; then the disk is to blame."""


async def upload_all(
    api: LearnerApi, files: Sequence[tuple[PayloadRef, Path]], *, epoch: int, patience: Patience
) -> None:
    """Upload one payload after another; see `upload`."""
    for payload, path in files:
        await upload(api, payload, path, epoch=epoch, patience=patience)


async def upload(api: LearnerApi, payload: PayloadRef, path: Path, *, epoch: int, patience: Patience) -> None:
    """Upload until every byte is durable at the coordinator.

    Raises:
        StaleEpoch: the lease is lost.
        DigestMismatch: the file does not have the digest that it was named with.
    """
    num_mismatches, before = 0, -1
    while True:
        durable = await patience.insist(lambda: api.query_upload(digest=payload.digest))
        if durable >= payload.num_bytes:
            return
        if durable == before:
            # An upload that was answered and brought nothing: never as fast as the link allows, again and again.
            await patience.wait(Unreachable(f"of payload {payload.digest[:12]} no more than {durable} bytes are kept"))
        before = durable
        try:
            await api.upload_payload(
                epoch=epoch,
                digest=payload.digest,
                num_bytes=payload.num_bytes,
                offset=durable,
                frames=_frames(path, durable, payload),
            )
        except DigestMismatch:
            num_mismatches += 1
            if num_mismatches == MAX_MISMATCHES:
                raise
        except (RemoteError, TimeoutError) as error:
            await patience.wait(error)


async def _frames(path: Path, offset: int, payload: PayloadRef) -> AsyncIterator[bytes]:
    with path.open("rb") as file:
        file.seek(offset)
        while frame := await asyncio.to_thread(file.read, FRAME_BYTES):
            BYTES.labels(payload.kind.value, "out").inc(len(frame))
            yield frame
