"""The background worker that merges deltas, one at a time.

It has a thread of lowest priority. Requested spans come first, then the blocks that most pulls use. A new version or a
plan pokes it. A failure harms no caller: plans use the payloads that exist.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass

from heterorl.common.errors import CorruptData, LimitExceeded
from heterorl.common.types.common import Digest
from heterorl.common.types.policy import PayloadKind, PayloadRef
from heterorl.common.weights.arena import CHUNK_ELEMENTS
from heterorl.common.weights.compose import MAX_PAYLOADS, compose
from heterorl.common.weights.manifest import chunks_of
from heterorl.common.wire.policy_messages import manifest_from_bytes
from heterorl.coordinator.payloads.garbage_collector import Stores, stored_of
from heterorl.coordinator.payloads.merged_deltas import Span, due_blocks
from heterorl.coordinator.store.background import BackgroundWorker
from heterorl.coordinator.store.database import Connection
from heterorl.coordinator.versions import lineage, published_variants
from heterorl.coordinator.versions.chain import Chain, Into
from heterorl.coordinator.versions.pull_plans import cheapest_way

_LOG = logging.getLogger(__name__)
MAX_REQUESTS = 16
MAX_CHUNK_ELEMENTS = 4 * CHUNK_ELEMENTS


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """Payloads to merge into one over `span`, and the resulting manifest."""

    span: Span
    payloads: tuple[PayloadRef, ...]
    manifest: bytes


@dataclass(kw_only=True, eq=False, repr=False)
class DeltaMerger(BackgroundWorker, Stores):
    """Makes merged deltas. Belongs to the event loop."""

    leased: Callable[[], frozenset[Digest]]
    may_write: Callable[[], bool]

    def __post_init__(self) -> None:
        super().__init__("delta_merger", self.clock)
        self._budget_bytes = self.config.merged_bytes
        self._window = self.config.merge_window_versions
        self._requests: dict[Span, None] = {}
        self._skipped: frozenset[Span] = frozenset()
        """Spans not to try: impossible, failed, or evicted to keep the budget."""
        self._current: Span | None = None

    def request(self, span: Span) -> None:
        """Request a merged delta over a span.
        Ignored if it exists, is in progress or impossible, or MAX_REQUESTS wait."""
        is_known = span in self._requests or span in self._skipped or span in self.merges.spans
        if self._budget_bytes and not is_known and span != self._current and len(self._requests) < MAX_REQUESTS:
            self._requests[span] = None
            self.poke()

    async def run(self) -> None:
        """Compose what is due until cancelled.
        Returns when the store ends, or when merging is off."""
        if not self._budget_bytes:
            return

        async def work() -> None:
            while self.may_write() and await self._work():
                self._wake.clear()

        try:
            await self._loop(work)
        finally:
            await self.close()

    async def _work(self) -> bool:
        requests, skipped, have = tuple(self._requests), self._skipped, self.merges.spans
        choice = await self.database.run(
            lambda connection: self._choose(connection, requests=requests, skipped=skipped, have=have)
        )
        if choice is None:
            return False
        job, head, impossible = choice
        self._skipped = frozenset(span for span in self._skipped | impossible if span.stop > head - self._window)
        if job is None:
            # No due block would shorten the paths of the remaining requests.
            for span in requests:
                self._requests.pop(span, None)
            return False
        self._current = job.span
        self._requests.pop(job.span, None)
        try:
            async with self.cache.at_hand(stored_of(job.payloads)):
                payload = await self._in_thread(functools.partial(self._compose, job))
        except CorruptData as error:
            _LOG.warning(
                "versions %d to %d cannot be merged, sites pull single deltas: %s",
                job.span.start, job.span.stop, error,
            )  # fmt: skip
            self._skipped |= {job.span}
            return True
        except OSError as error:
            return await self._after(error, job.span)
        finally:
            self._current = None
        self.merges.add(payload, job.span.variant)
        _LOG.debug("versions %d to %d are merged", payload.from_version, payload.to_version)
        # An evicted block would be due again at once.
        self._skipped |= set(
            await self.merges.evict(head=head, window=self._window, budget_bytes=self._budget_bytes, leased=self.leased)
        )
        return True

    async def _after(self, error: OSError, span: Span) -> bool:
        if await self.merges.forget_missing():
            return True
        _LOG.warning(
            "versions %d to %d cannot be merged now, sites pull single deltas: %s", span.start, span.stop, error
        )
        if isinstance(error, FileNotFoundError):
            self._skipped |= {span}
            return True
        # A full disk: the next version is the next attempt.
        return False

    def _choose(
        self, connection: Connection, *, requests: tuple[Span, ...], skipped: frozenset[Span], have: frozenset[Span]
    ) -> tuple[_Job | None, int, set[Span]] | None:
        """Choose the next job, as a read-only store operation.
        Returns the job, if any, the head, and spans that no composition serves; None while there is no version."""
        head = lineage.head_version(connection)
        if head is None:
            return None
        impossible: set[Span] = set()
        blocks = [
            span
            for variant in published_variants.stored(connection)
            for span in due_blocks(head=head, window=self._window, have=have | skipped, variant=variant)
        ]
        for span in (*requests, *blocks):
            if span in have:
                continue
            chain = Chain(connection, span.variant)
            path = _path_over(chain, span, functools.partial(self.merges.into, variant=span.variant))
            if len(path) < 2:
                impossible.add(span)
            elif len(path) <= MAX_PAYLOADS:
                return _Job(span=span, payloads=path, manifest=chain.manifest(span.stop)), head, impossible
            # Else: the path gets shorter once the blocks are made.
        return None, head, impossible

    def _compose(self, job: _Job) -> PayloadRef:
        manifest = manifest_from_bytes(job.manifest)
        if manifest.chunk_elements > MAX_CHUNK_ELEMENTS:
            raise LimitExceeded(f"chunks of {manifest.chunk_elements} elements, {MAX_CHUNK_ELEMENTS} are the most")
        paths, scratch = self.paths_of(job.payloads), self.merges.scratch()
        composed = compose(
            paths, scratch, layout_id=manifest.layout_id, chunks=chunks_of(manifest), on_chunk=self._check_stop
        )
        payload = PayloadRef(
            kind=PayloadKind.MERGED,
            from_version=job.span.start,
            to_version=job.span.stop,
            digest=composed.digest,
            num_bytes=composed.num_bytes,
        )
        self.merges.name(scratch, payload)
        return payload


def _path_over(chain: Chain, span: Span, merged_into: Into) -> tuple[PayloadRef, ...]:
    """Cheapest deltas over a span, with merged ones; empty without a path."""

    def into(version: int) -> list[PayloadRef]:
        payloads = [*chain.into(version), *merged_into(version)]
        return [p for p in payloads if p.kind is not PayloadKind.SNAPSHOT and p.from_version >= span.start]

    if not chain.is_in_lineage(span.stop):
        return ()
    return cheapest_way(into, have_version=span.start, want_version=span.stop)
