"""The payload files and the manifest of one version. Runs in a thread."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from heterorl.common.types.policy import Manifest, PayloadKind, PayloadRef
from heterorl.common.weights.manifest import build_manifest
from heterorl.common.weights.payload import PayloadInfo
from heterorl.common.wire.policy_messages import manifest_to_bytes
from heterorl.learner.backends.version_weights import Weights, write_delta, write_snapshot


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Position:
    """The run's position as the coordinator has acknowledged it.

    `lineage_version` is the version that the next one follows: the head, or an older one when the versions in between
    are to be abandoned; `lineage_digest` is the digest of its manifest. `shadow` has its weights as samplers have them;
    None when there are none or no delta may start from them.
    """

    head_version: int
    lineage_version: int
    lineage_digest: str
    shadow: Weights | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """A version ready to be published: manifest, and the file of every payload that it names."""

    manifest: Manifest
    manifest_bytes: bytes
    files: tuple[tuple[PayloadRef, Path], ...]
    encode_s: float

    @property
    def snapshot(self) -> Path | None:
        """File of the snapshot, if there is one."""
        return next((path for ref, path in self.files if ref.kind is PayloadKind.SNAPSHOT), None)


def encode_version(
    position: Position,
    arena: Weights,
    *,
    directory: Path,
    run_id: str,
    epoch: int,
    step: int,
    with_snapshot: bool,
    threads: int = 1,
) -> Encoded:
    """Encode `arena` as the successor of a position.

    A delta starts from the shadow, as samplers have it, never from the masters. A snapshot is written where no delta
    can be (no shadow, another layout, abandoned versions), and also `with_snapshot`. It replaces a delta that is
    not smaller, since it leads to the version from anywhere. A delta of less than half the weights needs no comparison:
    a snapshot's coding saves about a third.
    """
    # Not the run's clock, which may be simulated: this measures the machine's work.
    started = time.perf_counter()
    version = position.head_version + 1
    shadow = position.shadow
    files: list[tuple[PayloadRef, Path]] = []
    infos: list[PayloadInfo] = []
    if shadow is not None and shadow.layout.layout_id == arena.layout.layout_id:
        path = directory / f"v{version:08d}.delta"
        infos.append(write_delta(path, shadow, arena, threads=threads))
        files.append((_ref(infos[-1], PayloadKind.DELTA, position.lineage_version, version), path))
    if with_snapshot or not files or infos[0].num_bytes > arena.layout.full_bytes // 2:
        path = directory / f"v{version:08d}.snapshot"
        infos.append(write_snapshot(path, arena, threads=threads))
        files.append((_ref(infos[-1], PayloadKind.SNAPSHOT, -1, version), path))
    if len(files) == 2:
        is_delta_smaller = infos[0].num_bytes < infos[1].num_bytes
        if not is_delta_smaller or not with_snapshot:
            files.pop(1 if is_delta_smaller else 0)[1].unlink()
    manifest = build_manifest(
        run_id=run_id,
        epoch=epoch,
        version=version,
        parent_version=position.lineage_version,
        parent_digest=position.lineage_digest,
        arena=arena,
        step=step,
        # Also of an unpublished delta: it counts what changed.
        info=infos[0],
        payloads=tuple(ref for ref, _ in files),
    )
    return Encoded(
        manifest=manifest,
        manifest_bytes=manifest_to_bytes(manifest),
        files=tuple(files),
        encode_s=time.perf_counter() - started,
    )


def _ref(info: PayloadInfo, kind: PayloadKind, from_version: int, to_version: int) -> PayloadRef:
    return PayloadRef(
        kind=kind, from_version=from_version, to_version=to_version, digest=info.digest, num_bytes=info.num_bytes
    )
