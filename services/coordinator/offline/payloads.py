"""Payloads of a history: are they there, whole and right, and do they lead to the states that the manifests state?

A replay holds one chunk of the model at a time, for as many versions as still have children to come, so a model of any
size can be checked in little memory. The tensor table is not in a data directory, but it is not needed:
a chunk is a run of integers, and how many follows from the manifest (`weights.manifest.chunks_of`).
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

from heterorl.common.errors import CorruptData, MalformedPayload
from heterorl.common.types.common import Digest
from heterorl.common.types.policy import Manifest, PayloadKind, PayloadRef
from heterorl.common.weights.arena import Chunk, IntArray, digest_integers, state_root, zeros
from heterorl.common.weights.codec import apply_chunk
from heterorl.common.weights.manifest import chunks_of
from heterorl.common.weights.payload import PayloadChunks, file_digest
from heterorl.coordinator.offline.history import History
from heterorl.coordinator.offline.verify import Check, Report

Advance = Callable[[int], None]


def check_payloads(
    history: History, manifests: Mapping[int, Manifest], *, report: Report, advance: Advance
) -> dict[str, Path]:
    """Hash every payload of these manifests; returns the files that are right, by digest.

    `advance` is told the bytes looked at.
    """
    right: dict[str, Path] = {}
    for version, manifest in sorted(manifests.items()):
        for payload in manifest.payloads:
            report.count(Check.PAYLOADS)
            problem = _check_payload(history, payload) if _is_in_place(payload, manifest) else "leads elsewhere"
            if problem:
                report.find(Check.PAYLOADS, version, f"{payload.kind.value} {payload.digest[:12]} {problem}")
            else:
                right[payload.digest] = history.payload(payload.digest)
            advance(payload.num_bytes)
    return right


def _is_in_place(payload: PayloadRef, manifest: Manifest) -> bool:
    start = manifest.parent_version if payload.kind is PayloadKind.DELTA else -1
    if payload.kind is PayloadKind.MERGED:
        return False
    return (payload.from_version, payload.to_version) == (start, manifest.version) and start < manifest.version


def _check_payload(history: History, payload: PayloadRef) -> str:
    path = history.payload(payload.digest)
    if not path.is_file():
        return "is not stored"
    if path.stat().st_size != payload.num_bytes:
        return f"has {path.stat().st_size} bytes, not {payload.num_bytes}"
    return "" if file_digest(path) == payload.digest else "has other bytes"


def num_rebuilt(manifests: Mapping[int, Manifest]) -> int:
    """Chunks that a replay decodes."""
    return sum(len(manifest.payloads) * len(manifest.chunk_digests) for manifest in manifests.values())


def replay(
    manifests: Mapping[int, Manifest],
    files: Mapping[str, Path],
    *,
    report: Report,
    advance: Advance,
) -> None:
    """Rebuild every state from its payloads, chunk by chunk, and compare chunk digests and state roots.

    Args:
        manifests: by version.
        files: payloads that passed `check_payloads`, by digest; others are skipped.
        report: takes the findings.
        advance: is told the chunks decoded.
    """
    for layout_id in dict.fromkeys(manifest.layout_id for manifest in manifests.values()):
        family = {version: manifest for version, manifest in manifests.items() if manifest.layout_id == layout_id}
        chunks: tuple[Chunk, ...] = ()
        for version, manifest in sorted(family.items()):
            try:
                found = chunks_of(manifest)
            except MalformedPayload as error:
                report.find(Check.REPLAY, version, str(error))
                del family[version]
                continue
            chunks = chunks or found
            if found != chunks:
                report.find(Check.REPLAY, version, "has other sizes than the versions before, and the same layout id")
                del family[version]
        if family:
            _Replay(family, files, layout_id, chunks, report, advance).run()


class _Replay:
    """One layout's versions."""

    def __init__(
        self,
        manifests: dict[int, Manifest],
        files: Mapping[str, Path],
        layout_id: Digest,
        chunks: tuple[Chunk, ...],
        report: Report,
        advance: Advance,
    ) -> None:
        self._manifests = manifests
        self._files = files
        self._layout_id = layout_id
        self._chunks = chunks
        self._report = report
        self._advance = advance
        in_place = (
            payload
            for _, manifest in sorted(manifests.items())
            for payload in manifest.payloads
            if _is_in_place(payload, manifest)
        )
        self._payloads = list(dict.fromkeys(in_place))
        self._digests: dict[PayloadRef, list[bytes]] = {}
        self._opened: dict[PayloadRef, PayloadChunks] = {}
        self._failed: set[PayloadRef] = set()

    def run(self) -> None:
        for payload in self._payloads:
            self._open(payload)
        for number in range(len(self._chunks)):
            self._rebuild_chunk(number)
        for payload in self._payloads:
            self._compare(payload)

    def _open(self, payload: PayloadRef) -> None:
        path = self._files.get(payload.digest)
        if path is None:
            # Found by check_payloads already.
            self._failed.add(payload)
            return
        root = None
        if payload.kind is PayloadKind.DELTA:
            if payload.from_version not in self._manifests:
                self._fail(payload, f"version {payload.from_version}, which it starts from, cannot be read")
                return
            root = self._manifests[payload.from_version].state_root
        try:
            self._opened[payload] = PayloadChunks(
                path, layout_id=self._layout_id, chunks=self._chunks, expected_from_root=root
            )
        except CorruptData as error:
            self._fail(payload, str(error))

    def _rebuild_chunk(self, number: int) -> None:
        children = Counter(payload.from_version for payload in self._payloads)
        states: dict[int, IntArray] = {}
        for payload in self._payloads:
            state = self._apply(payload, number, states)
            if state is not None and children[payload.to_version]:
                states[payload.to_version] = state
            self._advance(1)
            children[payload.from_version] -= 1
            if not children[payload.from_version]:
                states.pop(payload.from_version, None)

    def _apply(self, payload: PayloadRef, number: int, states: Mapping[int, IntArray]) -> IntArray | None:
        """The chunk after the payload, when it is the one that the manifest states."""
        if payload in self._failed:
            return None
        chunk = self._chunks[number]
        if payload.kind is PayloadKind.SNAPSHOT:
            state = zeros(chunk)
        elif payload.from_version in states:
            state = states[payload.from_version].copy()
        else:
            self._fail(payload, f"version {payload.from_version}, which it starts from, could not be rebuilt")
            return None
        try:
            method, data = self._opened[payload].read(number)
            apply_chunk(method, memoryview(data), state)
        except CorruptData as error:
            self._fail(payload, f"chunk {number}: {error}")
            return None
        digest = digest_integers(state)
        if digest != self._manifests[payload.to_version].chunk_digests[number]:
            self._fail(payload, f"leads to another chunk {number} than the manifest states")
            return None
        self._digests.setdefault(payload, []).append(digest)
        return state

    def _compare(self, payload: PayloadRef) -> None:
        self._report.count(Check.REPLAY)
        if payload in self._failed:
            return
        if state_root(self._layout_id, self._digests[payload]) != self._manifests[payload.to_version].state_root:
            self._fail(payload, "leads to another state root than the manifest states")

    def _fail(self, payload: PayloadRef, problem: str) -> None:
        self._failed.add(payload)
        self._report.find(Check.REPLAY, payload.to_version, f"{payload.kind.value}: {problem}")


def with_offered(history: History, manifests: Mapping[int, Manifest]) -> dict[int, Manifest]:
    """Manifests that name what the store offers: without what was deleted, with the coordinator's own snapshots.

    Those name also what was deleted since. A version that nothing leads to any more is stated by its manifest alone.
    """
    offered = {(payload.to_version, payload.kind): payload for payload in history.offered}
    digests = {payload.digest for payload in history.offered}
    kept: dict[int, Manifest] = {}
    for version, manifest in manifests.items():
        # A delta is nobody's but the learner's: one that the store offers under another name is a fault to be found.
        payloads = [
            payload
            for payload in manifest.payloads
            if payload.digest in digests or (payload.kind is PayloadKind.DELTA and (version, payload.kind) in offered)
        ]
        snapshot = offered.get((version, PayloadKind.SNAPSHOT))
        if snapshot is not None and all(snapshot.digest != payload.digest for payload in payloads):
            payloads.append(snapshot)
        kept[version] = dataclasses.replace(manifest, payloads=tuple(payloads))
    return kept


def rebuildable(manifests: Mapping[int, Manifest], kept: Mapping[int, Manifest]) -> dict[int, Manifest]:
    """Of `kept`, the manifests without deltas from versions that deletion left without a way."""
    lost: set[int] = set()
    found: dict[int, Manifest] = {}
    for version, manifest in sorted(kept.items()):
        payloads = tuple(p for p in manifest.payloads if p.kind is PayloadKind.SNAPSHOT or p.from_version not in lost)
        is_less = len(payloads) < len(manifest.payloads) or not set(manifests[version].payloads) <= set(payloads)
        if not payloads and is_less:
            lost.add(version)
        found[version] = dataclasses.replace(manifest, payloads=payloads)
    return found
