"""Sending a payload: what the coordinator has is asked first, so that no byte is sent twice after a broken link.

Where the coordinator has a place for it, the payload is put there in one request, and the coordinator takes it from
there. Otherwise, and when that fails, it is streamed to the coordinator, which can be gone on with from any byte.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

from heterorl.common.api import LearnerApi
from heterorl.common.errors import DigestMismatch, PayloadMissing, RemoteError, StaleEpoch, Unreachable
from heterorl.common.process.metrics import BYTES
from heterorl.common.process.patience import Patience
from heterorl.common.types.policy import PayloadRef
from heterorl.common.weights.container import FRAME_BYTES

_LOG = logging.getLogger(__name__)
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
    num_mismatches, before, may_put = 0, -1, True
    while True:
        durable = await patience.insist(lambda: api.query_upload(digest=payload.digest))
        if durable >= payload.num_bytes:
            return
        # What was streamed in part is gone on with.
        if may_put and not durable:
            may_put = False
            if await _put(api, payload, path, epoch=epoch, patience=patience):
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


async def _put(api: LearnerApi, payload: PayloadRef, path: Path, *, epoch: int, patience: Patience) -> bool:
    """Send a payload in one request, beside the coordinator; False where it is to be streamed instead.

    Raises:
        StaleEpoch: the lease is lost.
    """
    how: dict[str, Any] = {"epoch": epoch, "digest": payload.digest, "num_bytes": payload.num_bytes}
    frames = _frames(path, 0, payload)
    try:
        if not await api.put_payload(**how, frames=frames):
            return False
        while True:
            try:
                # Also when the coordinator was away meanwhile: what was put is still there.
                if await api.take_payload(**how) >= payload.num_bytes:
                    return True
                raise Unreachable("the coordinator took a part of the payload")
            except (RemoteError, TimeoutError) as error:
                if isinstance(error, PayloadMissing):
                    raise
                await patience.wait(error)
    except StaleEpoch:
        raise
    except (RemoteError, TimeoutError) as error:
        _LOG.warning(
            "payload %s goes through the coordinator, nothing is lost: it could not be put into the bucket: %s",
            payload.digest[:12],
            error,
        )
        return False
    finally:
        await frames.aclose()


async def _frames(path: Path, offset: int, payload: PayloadRef) -> AsyncGenerator[bytes, None]:
    with path.open("rb") as file:
        file.seek(offset)
        while frame := await asyncio.to_thread(file.read, FRAME_BYTES):
            BYTES.labels(payload.kind.value, "out").inc(len(frame))
            yield frame
