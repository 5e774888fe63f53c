"""Committing a version: asked until there is an answer, and never anew before the fate of what was sent is known."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from heterorl.common.api import LearnerApi
from heterorl.common.errors import DigestMismatch, PayloadMissing, RemoteError
from heterorl.common.process.patience import Patience, is_transient
from heterorl.common.types.policy import PayloadRef, PublishRequest
from heterorl.learner.publish.upload import upload_all

MAX_REPAIRS = 3
"""Times a payload that uploads begin again because the coordinator says that one is missing or wrong: each answer names
one, and a power cut at the coordinator may have spoiled them all."""


async def commit(
    api: LearnerApi, request: PublishRequest, files: Sequence[tuple[PayloadRef, Path]], *, patience: Patience
) -> None:
    """Have a version committed whose payloads are at the coordinator.

    Raises:
        GroupNotAvailable, ParentNotHead, StaleEpoch: it never will be.
        PayloadMissing, DigestMismatch: the coordinator loses its payloads as fast as they are sent.
    """
    num_repairs = 0
    while True:
        try:
            await api.publish_version(request)
        except (PayloadMissing, DigestMismatch):
            # Wrong is as good as missing: the coordinator removed what it found, and the files are still here.
            num_repairs += 1
            if num_repairs > MAX_REPAIRS * len(files):
                raise
            await upload_all(api, files, epoch=request.epoch, patience=patience)
        except (RemoteError, TimeoutError) as error:
            if not is_transient(error):
                raise
            # The answer may be lost while the version is there: ask before anything else.
            known = await patience.insist(lambda: api.get_step(step_id=request.step_id))
            if known is not None:
                return
            await patience.wait(error)
        else:
            return
