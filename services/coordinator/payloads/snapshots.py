"""Snapshots: schedule, composition from deltas, verification of a delta chain.

Both work chunk by chunk, so memory does not grow with the model. The proof rebuilds each state and compares the chunk
digests with the version's manifest, which also locates a damaged payload.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from heterorl.common.errors import CorruptData, StateMismatch
from heterorl.common.types.policy import NO_VERSION, Manifest, PayloadKind, PayloadRef
from heterorl.common.weights.arena import Chunk, digest_integers, state_root, zeros
from heterorl.common.weights.codec import apply_chunk
from heterorl.common.weights.compose import compose
from heterorl.common.weights.manifest import chunks_of
from heterorl.common.weights.payload import NO_ROOT, PayloadChunks, read_roots


class DamagedPayload(CorruptData):
    """A payload does not lead to the state in its version's manifest."""

    def __init__(self, index: int, problem: str) -> None:
        super().__init__(problem)
        self.index = index


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A path from a snapshot; `payloads[i]` leads to the version of `manifests[i]`."""

    payloads: tuple[PayloadRef, ...]
    manifests: tuple[Manifest, ...]


def decide_snapshot(way: Sequence[PayloadRef], *, snapshot_ratio: float, window: int) -> tuple[bool, str]:
    """Whether a snapshot of the head is due, and why.

    `way` is the path of a new sampler: a snapshot, then deltas. A snapshot is due when the deltas cost more than
    `snapshot_ratio` of the bytes of `way[0]`. Beyond `window` versions it is due in any case, since the deltas could
    not be deleted.
    """
    if not way or way[0].kind is not PayloadKind.SNAPSHOT:
        return False, "there is no snapshot to start from"
    deltas = way[1:]
    if not deltas:
        return False, "the head has a snapshot"
    cost = sum(payload.num_bytes for payload in deltas)
    limit = snapshot_ratio * way[0].num_bytes
    versions = deltas[-1].to_version - way[0].to_version
    if cost > limit:
        return True, f"{len(deltas)} deltas cost {cost} bytes, the snapshot {way[0].num_bytes}"
    if versions > window:
        return True, f"the newest snapshot is {versions} versions old, {window} are kept"
    return False, f"{len(deltas)} deltas cost {cost} bytes, {limit:.0f} are the bound"


def verify_way(paths: Sequence[Path], manifests: Sequence[Manifest], *, on_chunk: Callable[[], None]) -> None:
    """Rebuild a path's states from its snapshot; compare them with the manifests.

    The first and last are compared; if the last is wrong, all, to find the payload. Files are open only while they are
    read. `on_chunk` may stop it by raising.
    Raises DamagedPayload: the first payload that is damaged or leads to another state; FileNotFoundError: one is gone.
    """
    chunks = chunks_of(manifests[-1])
    payloads: list[PayloadChunks] = []
    before = NO_ROOT
    for index, (path, manifest) in enumerate(zip(paths, manifests, strict=True)):
        try:
            roots = read_roots(path)
            payload = PayloadChunks(path, layout_id=manifest.layout_id, chunks=chunks, expected_from_root=roots[0])
            if roots != (before, manifest.state_root):
                raise StateMismatch(f"it leads from {roots[0][:12]} to {roots[1][:12]}")
            if state_root(manifest.layout_id, manifest.chunk_digests) != manifest.state_root:
                raise StateMismatch(f"the manifest of version {manifest.version} contradicts itself")
        except CorruptData as error:
            raise DamagedPayload(index, str(error)) from error
        payloads.append(payload)
        before = manifest.state_root
    for number, chunk in enumerate(chunks):
        on_chunk()
        if _rebuild_chunk(payloads, number, chunk, manifests, compares_all=False) is not None:
            wrong = _rebuild_chunk(payloads, number, chunk, manifests, compares_all=True)
            index = len(paths) - 1 if wrong is None else wrong
            raise DamagedPayload(index, f"chunk {number} differs from version {manifests[index].version}")


def _rebuild_chunk(
    payloads: Sequence[PayloadChunks], number: int, chunk: Chunk, manifests: Sequence[Manifest], *, compares_all: bool
) -> int | None:
    """Index of the first compared payload with a wrong chunk, or None."""
    values = zeros(chunk)
    for index, (payload, manifest) in enumerate(zip(payloads, manifests, strict=True)):
        try:
            method, data = payload.read(number)
            apply_chunk(method, memoryview(data), values)
        except CorruptData as error:
            raise DamagedPayload(index, str(error)) from error
        is_compared = compares_all or index in (0, len(payloads) - 1)
        if is_compared and digest_integers(values) != manifest.chunk_digests[number]:
            return index
    return None


def write_snapshot(paths: Sequence[Path], target: Path, work: Work, on_chunk: Callable[[], None]) -> PayloadRef:
    """Compose a path into one durable snapshot, and prove it.
    Raises DamagedPayload: a payload of the path is damaged; OSError: one is gone, or the disk is full."""
    last = work.manifests[-1]
    try:
        composed = compose(paths, target, layout_id=last.layout_id, chunks=chunks_of(last), on_chunk=on_chunk)
        verify_way([target], [last], on_chunk=on_chunk)
    except CorruptData as error:
        target.unlink(missing_ok=True)
        # The composition is wrong: find the wrong payload.
        verify_way(paths, work.manifests, on_chunk=on_chunk)
        raise OSError(f"the snapshot of version {last.version} is wrong although its parts are right") from error
    return PayloadRef(
        kind=PayloadKind.SNAPSHOT,
        from_version=NO_VERSION,
        to_version=last.version,
        digest=composed.digest,
        num_bytes=composed.num_bytes,
    )
