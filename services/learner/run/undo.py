"""Taking back steps that are in no version: a refused version's, or those that an order interrupted."""

from __future__ import annotations

import logging

from heterorl.common.errors import CorruptData
from heterorl.common.process.threads import in_thread
from heterorl.common.wire.policy import manifest_from_bytes
from heterorl.learner.run.resume import Resumption

_LOG = logging.getLogger(__name__)


async def undo(resumption: Resumption) -> int:
    """Make the head the masters' state again; returns the number of steps in it.

    Exactly so where the head has a checkpoint. Else from what was published, and the optimizer keeps its moments: an
    older checkpoint would be exact too, but would abandon versions that are sound and used.
    """
    position, backend = resumption.publisher.position, resumption.backend
    shadow = position.shadow
    assert shadow is not None, "a session begins with a published version"
    root = await in_thread(shadow.state_root)
    for path in await in_thread(resumption.store.paths):
        cursor = await resumption.read(path)
        if cursor is not None and (cursor.version, cursor.state_root) == (position.head_version, root):
            try:
                await resumption.restore(path, cursor)
            except (CorruptData, OSError) as error:
                _LOG.error("%s cannot be restored: %s", path, error)
            else:
                _LOG.info("back at version %d: checkpoint %s, any later step is gone", cursor.version, path.name)
                return cursor.step
    _LOG.warning(
        "version %d has no checkpoint: its published weights become the masters, any later step is gone,"
        " the optimizer keeps its moments",
        position.head_version,
    )
    await in_thread(backend.load_published, shadow, keep_optimizer=True)
    return manifest_from_bytes(await resumption.manifest(position.head_version)).step
