"""Getting a version: plan, fetch, apply to a staging copy, verify the whole state; nobody ever sees it half done.

Guarantees: what is returned has exactly the manifest's state; what was held is never changed; a fetch goes on from the
bytes on disk, also after a restart; a stalled link fails in bounded time; anything that fails its check is thrown away
and the version is built again: without merged deltas, if there were any, and at last from a snapshot. Never repeats a
call: whoever asked decides when to ask again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from services.common import metrics
from services.common.api import CoordinatorApi, PlanKind, PullPlan
from services.common.clock import Clock
from services.common.errors import (
    CorruptData,
    StateMismatch,
    UnknownPayload,
)
from services.common.fetch import Fetcher
from services.common.types import Digest, Manifest, PayloadKind, PayloadRef
from services.common.weights.arena import Arena, Layout
from services.common.weights.manifest import verify_child, verify_descendant, verify_state
from services.common.weights.payload import apply_payload
from services.common.wire import manifest_digest, manifest_from_bytes

_LOG = logging.getLogger(__name__)
Admit = Callable[[PullPlan], Awaitable[None]]
"""Looks at the manifests of a plan other than SAME and raises when the version is not to be built."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PulledVersion:
    """A verified state with its manifest."""

    arena: Arena
    manifest: Manifest
    manifest_digest: Digest

    @property
    def version(self) -> int:
        """Number of the version."""
        return self.manifest.version


class Puller:
    """Builds versions of one layout in one spool directory, which is its own."""

    def __init__(
        self,
        *,
        api: CoordinatorApi,
        spool: Path,
        layout: Layout,
        clock: Clock,
        num_streams: int = 1,
        threads: int = 1,
    ) -> None:
        self._threads = threads
        self._api = api
        self._layout = layout
        self._clock = clock
        self.fetcher = Fetcher(api=api, spool=spool, clock=clock, num_streams=num_streams)
        self._is_held_distrusted = False
        self._are_merged_distrusted = False
        self._has_merged = False

    async def pull(self, *, held: PulledVersion | None, want_version: int, admit: Admit | None = None) -> PulledVersion:
        """Build `want_version` (-1: the head) from what is held; `admit` may refuse a plan before a byte is fetched.

        Raises:
            UntrustedVersion: `admit` refused it; nothing has changed.
            UnknownVersion: no such version, or no payloads lead to it.
            Unreachable: the link broke or stalled; calling again goes on from the bytes received.
            CorruptData: even the snapshot fails its checks.
        """
        start = None if self._is_held_distrusted else held
        while True:
            try:
                pulled = await self._pull(start, want_version, admit)
                break
            except UnknownPayload as error:
                # Only of a merged delta: the coordinator may delete one at any time.
                _LOG.info("version %d is built from single deltas: %s", want_version, error)
                self._are_merged_distrusted = True
            except CorruptData as error:
                self._discard(error)
                if start is None and not self._has_merged:
                    raise
                # Each next way is dearer and depends on less. Remembered, since it may take several calls; the way that
                # failed would only fail again in between.
                if self._has_merged:
                    self._are_merged_distrusted, way = True, "from single deltas"
                else:
                    self._is_held_distrusted, start, way = True, None, "from a snapshot"
                _LOG.error("version %d failed its checks, building it %s: %s", want_version, way, error)
        self._is_held_distrusted = self._are_merged_distrusted = False
        return pulled

    def _discard(self, error: CorruptData) -> None:
        metrics.DIGEST_MISMATCHES.inc()
        _LOG.debug("discarding what was fetched: %s", error)
        self.fetcher.keep_only(())

    async def _pull(self, held: PulledVersion | None, want_version: int, admit: Admit | None) -> PulledVersion:
        self._has_merged = False
        plan = await self._api.plan_pull(
            have_version=-1 if held is None else held.version,
            have_root="" if held is None else held.manifest.state_root,
            want_version=want_version,
            accept_merged=not self._are_merged_distrusted,
        )
        _check_plan(plan, held=held, want_version=want_version)
        if plan.kind is PlanKind.SAME and held is not None:
            return held
        _LOG.debug("version %d: %s", plan.target_version, plan.reason)
        self._has_merged = any(payload.kind is PayloadKind.MERGED for payload in plan.payloads)
        if admit is not None:
            await admit(plan)
        self.fetcher.keep_only(plan.payloads)
        started = self._clock.monotonic()
        paths = [await self.fetcher.fetch(payload) for payload in plan.payloads]
        fetched = self._clock.monotonic()
        metrics.PULL_SECONDS.observe(fetched - started)
        pulled = await asyncio.to_thread(self._apply, plan, paths, held)
        metrics.APPLY_SECONDS.observe(self._clock.monotonic() - fetched)
        self.fetcher.keep_only(())
        return pulled

    def _apply(self, plan: PullPlan, paths: list[Path], held: PulledVersion | None) -> PulledVersion:
        from_snapshot = plan.payloads[0].kind is PayloadKind.SNAPSHOT
        before = None if from_snapshot or held is None else held
        staging = Arena(self._layout) if before is None else before.arena.copy()
        parent = None if before is None else before.manifest
        parent_digest = "" if before is None else before.manifest_digest
        for payload, data, path in zip(plan.payloads, plan.manifests, paths, strict=True):
            manifest = manifest_from_bytes(data)
            if manifest.layout_id != self._layout.layout_id:
                raise StateMismatch(f"version {manifest.version} has another layout", action="check model_dir")
            if payload.kind is PayloadKind.MERGED:
                _verify_merged(payload, parent, manifest)
            elif payload not in manifest.payloads:
                raise StateMismatch(f"the manifest of version {manifest.version} does not name this payload")
            elif parent is not None:
                verify_child(parent=parent, parent_digest=parent_digest, child=manifest)
            from_root = None if parent is None else parent.state_root
            apply_payload(path, staging, expected_from_root=from_root, threads=self._threads)
            parent, parent_digest = manifest, manifest_digest(data)
        assert parent is not None, "the plan was checked"
        if parent.version != plan.target_version:
            raise StateMismatch(f"the plan leads to version {parent.version}, not {plan.target_version}")
        verify_state(parent, staging, threads=self._threads)
        return PulledVersion(arena=staging, manifest=parent, manifest_digest=Digest(parent_digest))


def _check_plan(plan: PullPlan, *, held: PulledVersion | None, want_version: int) -> None:
    """Refuse a plan that does not lead from what is held to what is wanted."""
    if want_version >= 0 and plan.target_version != want_version:
        raise StateMismatch(f"the plan leads to version {plan.target_version}, not {want_version}")
    if plan.kind is PlanKind.SAME:
        if held is None or held.version != plan.target_version:
            raise StateMismatch(f"the plan says that version {plan.target_version} is held already")
    elif not plan.payloads or len(plan.payloads) != len(plan.manifests):
        raise StateMismatch(f"the plan has {len(plan.payloads)} payloads and {len(plan.manifests)} manifests")


def _verify_merged(payload: PayloadRef, before: Manifest | None, after: Manifest) -> None:
    if before is None or (payload.from_version, payload.to_version) != (before.version, after.version):
        raise StateMismatch(f"a merged delta from version {payload.from_version} to {payload.to_version} does not fit")
    verify_descendant(ancestor=before, child=after)
