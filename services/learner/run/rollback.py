"""An operator's order to go back to an earlier version.

The steps from version k to the head n are fetched, merged and negated; applied to the shadow they give the state of k,
which is compared with k's manifest chunk by chunk. If steps cannot be undone, k is rebuilt from a snapshot. Its
weights become the masters and version n + 1, with a new optimizer. The number of steps goes on, so a run never exceeds
max_steps.

Guarantees: before the commit only masters change, which a checkpoint restores. The order ends in the transaction of the
commit, so a crash repeats the work and never the effect.
"""

import functools
import logging
from dataclasses import dataclass
from pathlib import Path

from heterorl.common.errors import (
    CorruptData,
    NotReversible,
    StateMismatch,
    UnknownPayload,
    UnknownVersion,
    UntrustedVersion,
)
from heterorl.common.process.files import room
from heterorl.common.process.threads import in_thread
from heterorl.common.pull.fetcher import Fetcher
from heterorl.common.types.policy import LeaseGrant, Manifest, PayloadKind
from heterorl.common.weights.arena import Arena
from heterorl.common.weights.compose import MAX_PAYLOADS, compose, negate
from heterorl.common.weights.manifest import verify_state
from heterorl.common.weights.payload import apply_payload, max_file_bytes
from heterorl.common.wire.policy_messages import manifest_digest, manifest_from_bytes
from heterorl.learner.run.resume import Resumption

_LOG = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class Rollback:
    """Carries out an order; its files lie in the publisher's directory."""

    resumption: Resumption
    _refused: str | None = None
    """Id of the order refused last, which a renewal on its way may still state."""

    def is_due(self, grant: LeaseGrant) -> bool:
        """Whether an order is open and not refused."""
        return grant.rollback_to >= 0 and grant.rollback_id != self._refused

    async def resume(self, *, is_start: bool, step_of_head: int | None = None) -> int:
        """Resume at the head or at an ordered version.

        Returns the number of optimizer steps in the weights. Unless `is_start`, the masters hold steps of no version,
        or they are the head's, with `step_of_head` steps. Others are undone, or replaced by the ordered version: an
        older checkpoint would abandon versions.
        """
        step = await self.resumption.run() if is_start else None
        rolled = await self.run()
        if rolled is not None:
            return rolled
        step = step_of_head if step is None else step
        # The head's masters stay: published weights lack what the rounding left.
        step = await undo(self.resumption) if step is None else step
        # After an order, whose deltas a snapshot of the head would hide.
        await self.resumption.publisher.repeat_head(step=step, saved_by=self.resumption.backend)
        return step

    async def run(self) -> int | None:
        """Publish the ordered version.

        Returns the number of optimizer steps, which is the head's. Without an order, or where it is not possible,
        returns None; the run is then unchanged.
        """
        parts, publisher = self.resumption, self.resumption.publisher
        # Asked now: an earlier order may be carried out or withdrawn.
        grant = await publisher.backoff.retry(lambda: publisher.api.renew_lease(epoch=publisher.epoch))
        version = grant.rollback_to
        if not self.is_due(grant):
            # Whole copies of the weights that a dead process left.
            await in_thread(_remove_leftovers, publisher.directory)
            return None
        position = publisher.position
        head = await parts.published.manifest(position.head_version)
        if manifest_digest(head) != position.lineage_digest:
            raise StateMismatch(f"the manifest of version {position.head_version} is another than was published")
        try:
            arena = await self._content(await parts.published.manifest(version))
        except (UnknownVersion, UnknownPayload, UntrustedVersion, CorruptData) as error:
            self._refused = grant.rollback_id
            _LOG.error(
                "the learner cannot go back to version %d and trains on: %s (see `heterorl rollback --list`)",
                version,
                error,
            )
            renew = functools.partial(publisher.api.renew_lease, epoch=publisher.epoch)
            await publisher.backoff.retry(lambda: renew(refused_rollback=grant.rollback_id))
            return None
        _LOG.warning(
            "THE LEARNER GOES BACK by order: version %d has the weights of version %d; the optimizer is new",
            position.head_version + 1,
            version,
        )
        await in_thread(parts.backend.load_published, arena)
        step = manifest_from_bytes(head).step
        # With a checkpoint, at any cadence: an older one would lead back to the weights that were left.
        await publisher.publish(arena, step=step, saved_by=parts.backend, is_last=True)
        return step

    async def _content(self, data: bytes) -> Arena:
        parts, target = self.resumption, manifest_from_bytes(data)
        shadow = parts.publisher.position.shadow
        if shadow is None or target.layout_id != shadow.layout.layout_id:
            return await parts.published.rebuild(data)
        try:
            return await self._undo(target, await in_thread(shadow.whole))
        except (NotReversible, UnknownVersion, UnknownPayload, CorruptData) as error:
            _LOG.info("version %d is rebuilt from payloads: %s", target.version, error.args[0])
            return await parts.published.rebuild(data)

    async def _undo(self, target: Manifest, shadow: Arena) -> Arena:
        publisher = self.resumption.publisher
        api, backoff = publisher.api, publisher.backoff
        fetcher = Fetcher(
            api=api,
            spool=publisher.directory / "undo",
            clock=backoff.clock,
            max_bytes=max_file_bytes(shadow.layout.chunks),
        )
        plan = await backoff.retry(
            lambda: api.plan_pull(
                have_version=target.version,
                have_root=target.state_root,
                want_version=publisher.position.head_version,
                accept_merged=True,
            )
        )
        if any(payload.kind is PayloadKind.SNAPSHOT for payload in plan.payloads):
            raise NotReversible("no deltas lead from it to the head")
        fetcher.check_sizes(plan.payloads)
        fetcher.keep_only(plan.payloads)
        fetches = [functools.partial(fetcher.fetch, payload) for payload in plan.payloads]
        try:
            paths = [await backoff.retry(fetch) for fetch in fetches]
            arena = await in_thread(_undone, paths, shadow, target, publisher.directory)
        except (CorruptData, NotReversible, UnknownPayload):
            # A later order must not meet a damaged file again; an interrupted download continues.
            fetcher.keep_only(())
            raise
        fetcher.keep_only(())
        return arena


def _remove_leftovers(directory: Path) -> None:
    for path in [*directory.glob("undo/*"), *directory.glob("undo.*")]:
        path.unlink(missing_ok=True)


def _undone(paths: list[Path], shadow: Arena, target: Manifest, directory: Path) -> Arena:
    """The shadow minus the steps of `paths`, compared with `target`."""
    arena = shadow.copy()
    layout = shadow.layout
    merged, back = directory / "undo.merged", directory / "undo.back"
    try:
        for start in reversed(range(0, len(paths), MAX_PAYLOADS)):
            with room(directory):
                steps = paths[start : start + MAX_PAYLOADS]
                compose(steps, merged, layout_id=layout.layout_id, chunks=layout.chunks)
                negate(merged, back, layout_id=layout.layout_id, chunks=layout.chunks)
            apply_payload(back, arena, expected_from_root=arena.state_root())
        verify_state(target, arena)
    finally:
        merged.unlink(missing_ok=True)
        back.unlink(missing_ok=True)
    return arena


async def undo(parts: Resumption) -> int:
    """Make the head the masters' state again; returns its number of steps.

    Exact where the head has a checkpoint. Else from the published weights, and the optimizer keeps its moments: an
    older checkpoint would be exact, but would abandon sound versions. After a failed restore, which may have left
    moments in parts, the optimizer is new.
    """
    position = parts.publisher.position
    shadow = position.shadow
    assert shadow is not None, "a training loop begins with a published version"
    root = await in_thread(shadow.state_root)
    keep_optimizer, why = True, "has no checkpoint"
    for path in await in_thread(parts.publisher.store.paths):
        cursor = await parts.read(path)
        if cursor is not None and (cursor.version, cursor.state_root) == (position.head_version, root):
            try:
                await parts.restore(path, cursor)
            except (CorruptData, OSError) as error:
                _LOG.error("checkpoint %s cannot be restored, published weights take its place: %s", path, error)
                parts.publisher.store.keep_unreadable(path)
                keep_optimizer, why = False, "has no checkpoint that can be restored"
            else:
                _LOG.info(
                    "the learner is back at version %d: checkpoint %s, any later step is gone",
                    cursor.version,
                    path.name,
                )
                return cursor.step
    _LOG.warning(
        "version %d %s: its published weights become the masters, any later step is gone, the optimizer %s",
        position.head_version,
        why,
        "keeps its moments" if keep_optimizer else "is new",
    )
    await in_thread(parts.backend.load_published, await in_thread(shadow.whole), keep_optimizer=keep_optimizer)
    return manifest_from_bytes(await parts.published.manifest(position.head_version)).step
