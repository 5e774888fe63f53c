"""Taking a checkpoint from the disk: read a few times, restored, and compared with what it published."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from heterorl.common.errors import CorruptStore
from heterorl.common.process.patience import Patience
from heterorl.common.process.threads import in_thread
from heterorl.common.weights.arena import Arena
from heterorl.learner.backends.backend import TrainBackend
from heterorl.learner.backends.weights import Weights, maker_of, read_snapshot
from heterorl.learner.publish.checkpoint import PUBLISHED_FILE, CheckpointStore, read_all_scales, read_checkpoint
from heterorl.learner.publish.cursor import Cursor
from heterorl.learner.publish.flavours import Flavours

_LOG = logging.getLogger(__name__)
NUM_READS = 3
"""Times that a checkpoint is read which the disk does not give, before the one before it is taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restorer:
    """Fills a backend from a store of checkpoints, and the flavours with their scales."""

    backend: TrainBackend
    store: CheckpointStore
    patience: Patience
    flavours: Flavours | None = None

    async def read(self, path: Path) -> Cursor | None:
        """The cursor of a checkpoint; None when it is damaged, or the disk does not give it."""
        for number in range(NUM_READS):
            if number:
                await self.patience.clock.sleep(self.patience.base_s)
            try:
                return await in_thread(read_checkpoint, path)
            except CorruptStore as error:
                _LOG.warning("%s", error)
                return None
            except OSError as error:
                problem = error
        _LOG.error(
            "CHECKPOINT %s CANNOT BE READ and is left as it is; the one before it is tried: %s (compare its owner and"
            " mode with this process's; an input/output error is the disk's)",
            path,
            problem,
        )
        self.store.keep_unreadable(path)
        return None

    async def restore(self, path: Path, cursor: Cursor) -> Weights:
        """Take a checkpoint's masters and optimizer; returns what was published.

        Raises:
            CorruptData: it restores to another state.
            OSError: the disk does not give it.
        """
        await in_thread(self.backend.restore, self.store.backend_directory(path))
        maker = maker_of(self.backend, with_flavours=self.flavours is not None)
        published = await in_thread(read_snapshot, path / PUBLISHED_FILE, self.backend.layout, maker)
        if self.flavours is not None:
            self.flavours.offer_scales(await in_thread(read_all_scales, path, self.flavours.layouts))
        # On top of what was published, or a dead band could not be told from damage.
        if isinstance(published, Arena):
            await in_thread(self.backend.store, published, published=published)
        elif maker is not None:
            published = await in_thread(maker.stage, published=published)
        root = await in_thread(published.state_root)
        if root != cursor.state_root:
            raise CorruptStore(f"{path} restores to state {root[:12]}, not to {cursor.state_root[:12]}")
        return published
