"""Getting a version: plan, fetch, apply to a staging copy, verify the whole state; nobody ever sees it half done.

Guarantees: what is returned has exactly the manifest's state; a fetch resumes from the bytes on disk, also after a
restart; anything that fails its check is thrown away and the version is built again: without merged deltas, if there
were any, and at last from a snapshot.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from services.common import metrics
from services.common.api import CoordinatorApi, PlanKind, PullPlan
from services.common.clock import Clock
from services.common.errors import (
    CorruptData,
    Draining,
    LimitExceeded,
    MalformedPayload,
    StateMismatch,
    UnknownPayload,
    Unreachable,
)
from services.common.types import Digest, Manifest, PayloadKind, PayloadRef
from services.common.weights.arena import Arena, Layout
from services.common.weights.manifest import verify_child, verify_descendant, verify_state
from services.common.weights.payload import apply_payload, file_digest
from services.common.wire import manifest_digest, manifest_from_bytes

_LOG = logging.getLogger(__name__)
RETRY_S = 1.0


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
    """Builds versions of one layout in one spool directory."""

    def __init__(self, *, api: CoordinatorApi, spool: Path, layout: Layout, clock: Clock) -> None:
        self._api = api
        self._spool = spool
        self._layout = layout
        self._clock = clock
        spool.mkdir(parents=True, exist_ok=True)

    async def pull(self, *, held: PulledVersion | None, want_version: int) -> PulledVersion:
        """Build `want_version` (-1: the head) from what is held.

        Raises:
            UnknownVersion: no such version, or no payloads lead to it.
            CorruptData: even the snapshot fails its checks.
        """
        accept_merged = True
        while True:
            plan = await self._api.plan_pull(
                have_version=-1 if held is None else held.version,
                have_root="" if held is None else held.manifest.state_root,
                want_version=want_version,
                accept_merged=accept_merged,
            )
            if plan.kind is PlanKind.SAME:
                assert held is not None, "nothing cannot be the wanted version"
                return held
            _LOG.debug("version %d: %s", plan.target_version, plan.reason)
            has_merged = any(payload.kind is PayloadKind.MERGED for payload in plan.payloads)
            try:
                return await self._build(plan, held)
            except UnknownPayload as error:
                # Only of a merged delta: the coordinator may delete one at any time.
                _LOG.info("version %d is built from single deltas: %s", plan.target_version, error)
            except CorruptData as error:
                metrics.DIGEST_MISMATCHES.inc()
                self._clear()
                if held is None and not has_merged:
                    raise
                # Each next way is dearer and depends on less: single deltas, then a snapshot.
                if not has_merged:
                    held = None
                way = "from single deltas" if has_merged else "from a snapshot"
                _LOG.error("version %d failed its checks, building it %s: %s", plan.target_version, way, error)
            accept_merged = False

    async def _build(self, plan: PullPlan, held: PulledVersion | None) -> PulledVersion:
        started = time.perf_counter()
        paths = [await self._fetch(payload) for payload in plan.payloads]
        metrics.PULL_SECONDS.observe(time.perf_counter() - started)
        started = time.perf_counter()
        pulled = await asyncio.to_thread(self._apply, plan, paths, held)
        metrics.APPLY_SECONDS.observe(time.perf_counter() - started)
        self._clear()
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
            apply_payload(path, staging, expected_from_root=None if parent is None else parent.state_root)
            parent, parent_digest = manifest, manifest_digest(data)
        assert parent is not None, "a plan other than SAME has payloads"
        if parent.version != plan.target_version:
            raise StateMismatch(f"the plan leads to version {parent.version}, not {plan.target_version}")
        verify_state(parent, staging)
        return PulledVersion(arena=staging, manifest=parent, manifest_digest=Digest(parent_digest))

    async def _fetch(self, payload: PayloadRef) -> Path:
        path = self._spool / payload.digest
        while True:
            have = path.stat().st_size if path.exists() else 0
            if have == payload.num_bytes:
                break
            if have > payload.num_bytes:
                path.unlink()
                raise LimitExceeded(f"payload {payload.digest[:12]} is longer than its {payload.num_bytes} bytes")
            try:
                await self._append(payload, path, have)
            except (Unreachable, Draining, UnknownPayload) as error:
                if isinstance(error, UnknownPayload):
                    if payload.kind is PayloadKind.MERGED:
                        raise
                    raise MalformedPayload(f"payload {payload.digest[:12]} is gone") from error
                _LOG.debug("fetching waits: %s", error)
                await self._clock.sleep(RETRY_S)
        if await asyncio.to_thread(file_digest, path) != payload.digest:
            path.unlink()
            raise MalformedPayload(f"payload {payload.digest[:12]} arrived with another digest")
        return path

    async def _append(self, payload: PayloadRef, path: Path, offset: int) -> None:
        with path.open("ab") as file:
            try:
                async for frame in self._api.read_payload(digest=payload.digest, offset=offset):
                    offset += len(frame)
                    if offset > payload.num_bytes:
                        raise LimitExceeded(f"payload {payload.digest[:12]} is longer than stated")
                    file.write(frame)
                    metrics.BYTES.labels(payload.kind.value, "in").inc(len(frame))
            finally:
                await asyncio.to_thread(_sync, file)
        if offset < payload.num_bytes:
            raise Unreachable(f"payload {payload.digest[:12]} ended after {offset} bytes", retry_after_s=RETRY_S)

    def _clear(self) -> None:
        for path in self._spool.iterdir():
            path.unlink()


def _verify_merged(payload: PayloadRef, before: Manifest | None, after: Manifest) -> None:
    if before is None or (payload.from_version, payload.to_version) != (before.version, after.version):
        raise StateMismatch(f"a merged delta from version {payload.from_version} to {payload.to_version} does not fit")
    verify_descendant(ancestor=before, child=after)


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
