"""A version's payload files and manifest: encoded, uploaded, committed, pulled.

A payload is streamed to the coordinator from any byte on. A commit is asked until there is an answer, and never sent
again before its result is known.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from pathlib import Path

from heterorl.common.api import LearnerApi
from heterorl.common.errors import DigestMismatch, PayloadMissing, RemoteError, StateMismatch
from heterorl.common.process.backoff import Backoff, is_transient
from heterorl.common.process.metrics import BYTES
from heterorl.common.pull.puller import TrustedPuller
from heterorl.common.types.common import Digest
from heterorl.common.types.policy import NO_VERSION, Manifest, PayloadKind, PayloadRef, PublishRequest
from heterorl.common.weights import payload as payload_file
from heterorl.common.weights.arena import Arena
from heterorl.common.weights.manifest import build_manifest
from heterorl.common.weights.payload import FRAME_BYTES, NO_ROOT, FrameCutter, PayloadInfo
from heterorl.common.wire.policy_messages import manifest_digest, manifest_from_bytes, manifest_to_bytes
from heterorl.learner.backends.ranks.sharded_weights import ShardedArena
from heterorl.learner.backends.train_backend import Weights


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PublishedHead:
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
    """A version ready to be published: manifest and payload files."""

    manifest: Manifest
    manifest_bytes: bytes
    files: tuple[tuple[PayloadRef, Path], ...]
    encode_s: float

    @property
    def snapshot(self) -> Path | None:
        return next((path for ref, path in self.files if ref.kind is PayloadKind.SNAPSHOT), None)


def encode_version(
    position: PublishedHead,
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
        layout=arena.layout,
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


_LOG = logging.getLogger(__name__)
MAX_MISMATCHES = 3
"""Complete uploads with another digest at the coordinator; after these the learner's disk is to blame."""
MAX_REPAIRS = 3
"""Uploads per payload that begin again because the coordinator misses one or has wrong bytes: each answer names one,
and a power cut at the coordinator may have spoiled them all."""


async def upload_all(
    api: LearnerApi, files: Sequence[tuple[PayloadRef, Path]], *, epoch: int, backoff: Backoff
) -> None:
    """Upload one payload after another; see `upload`."""
    for payload, path in files:
        await upload(api, payload, path, epoch=epoch, backoff=backoff)


async def upload(api: LearnerApi, payload: PayloadRef, path: Path, *, epoch: int, backoff: Backoff) -> None:
    """Upload until every byte is durable at the coordinator.

    Raises:
        StaleEpoch: the lease is lost.
        DigestMismatch: the file does not have the digest of its name.
    """
    num_mismatches, before, is_answered = 0, -1, False
    while True:
        durable = await _durable(api, payload.digest, before, backoff)
        if durable >= payload.num_bytes:
            return
        if durable <= before and is_answered:
            # An answered upload without progress must not repeat without a wait.
            kept = f"it keeps only {durable} of {payload.num_bytes} bytes of payload {payload.digest[:12]}"
            await backoff.wait(RemoteError(kept, action="look at the coordinator's log"))
        before, is_answered = max(before, durable), True
        try:
            # Also when the call ends early: the generator holds an open file.
            async with contextlib.aclosing(_frames(path, payload, durable)) as frames:
                await api.upload_payload(
                    epoch=epoch, digest=payload.digest, num_bytes=payload.num_bytes, offset=durable, frames=frames
                )
        except DigestMismatch:
            num_mismatches += 1
            if num_mismatches == MAX_MISMATCHES:
                raise
        except (RemoteError, TimeoutError) as error:
            is_answered = False
            await backoff.wait(error)


async def _durable(api: LearnerApi, digest: Digest, before: int, backoff: Backoff) -> int:
    """Bytes of a payload that the coordinator keeps.
    Resets the backoff only above `before`: a full disk answers queries too."""
    durable = await backoff.retry(lambda: api.query_upload(digest=digest), resets=False)
    if durable > before:
        backoff.reset()
    return durable


async def _frames(path: Path, payload: PayloadRef, offset: int) -> AsyncGenerator[bytes, None]:
    with path.open("rb") as file:
        file.seek(offset)
        cutter = FrameCutter()
        while block := await asyncio.to_thread(file.read, min(FRAME_BYTES, payload.num_bytes - offset)):
            offset += len(block)
            for frame in cutter.cut(block):
                BYTES.labels(payload.kind.value, "out").inc(len(frame))
                yield frame


async def commit(
    api: LearnerApi, request: PublishRequest, files: Sequence[tuple[PayloadRef, Path]], *, backoff: Backoff
) -> None:
    """Commit a version whose payloads are at the coordinator.

    Raises:
        GroupNotAvailable, ParentNotHead, StaleEpoch: it never will be.
        PayloadMissing, DigestMismatch: the coordinator loses payloads as fast as they are sent.
    """
    num_repairs = 0
    while True:
        try:
            await api.publish_version(request)
        except (PayloadMissing, DigestMismatch):
            # The coordinator removed a wrong payload, and the files are still here.
            num_repairs += 1
            if num_repairs > MAX_REPAIRS * len(files):
                raise
            await upload_all(api, files, epoch=request.epoch, backoff=backoff)
        except (RemoteError, TimeoutError) as error:
            if not is_transient(error):
                raise
            # The answer may be lost while the version is there: ask before anything else.
            known = await backoff.retry(lambda: api.get_step(step_id=request.step_id), resets=False)
            if known is not None:
                break
            await backoff.wait(error)
        else:
            break
    backoff.reset()


class PublishedVersions(TrustedPuller):
    """A variant's versions from the coordinator; `spool` is for their payloads only."""

    async def manifest(self, version: int) -> bytes:
        """A version's manifest, which the next one names as its parent.

        Raises:
            UnknownVersion: the variant lacks it.
            UntrustedVersion: no trusted key signed it.
            StateMismatch: it is another version's.
        """
        signed = await self.backoff.retry(lambda: self.api.get_signed_manifest(version=version, variant=self.variant))
        self.trust.check(signed.data, signed.signature, version=version)
        stated = manifest_from_bytes(signed.data).version
        if stated != version:
            raise StateMismatch(f"the manifest of version {version} names version {stated}")
        return signed.data

    async def digest(self, version: int) -> str:
        """Digest of a version's manifest; empty for NO_VERSION."""
        return "" if version == NO_VERSION else manifest_digest(await self.manifest(version))

    async def rebuild(self, data: bytes) -> Arena:
        """A version's weights as samplers have them, from the coordinator only.
        `data` is its manifest. Raises StateMismatch if the coordinator leads to another signed version."""
        version = manifest_from_bytes(data).version
        where = f" in variant {self.variant}" if self.variant else ""
        _LOG.info("version %d%s is pulled from the coordinator", version, where)
        pulled = await self.build(version)
        # A key may have signed two histories: the next delta starts from these weights and names this manifest.
        if pulled.manifest_digest != manifest_digest(data):
            raise StateMismatch(f"version {version}{where} was rebuilt with another manifest than was shown")
        return pulled.arena


def write_snapshot(path: Path, weights: Weights, *, threads: int = 1) -> PayloadInfo:
    """As `payload.write_snapshot`; the file does not depend on where the weights are."""
    if isinstance(weights, Arena):
        return payload_file.write_snapshot(path, weights, threads=threads)
    return _write(path, None, weights, threads=threads)


def write_delta(path: Path, old: Weights, new: Weights, *, threads: int = 1) -> PayloadInfo:
    """As `payload.write_delta`; the file does not depend on where the weights are."""
    if isinstance(new, Arena) or isinstance(old, Arena):
        return payload_file.write_delta(path, old.whole(), new.whole(), threads=threads)
    return _write(path, old, new, threads=threads)


def _write(path: Path, old: ShardedArena | None, new: ShardedArena, *, threads: int) -> PayloadInfo:
    coded = new.code(old, threads=threads)
    try:
        from_root = NO_ROOT if old is None else old.state_root()
        return payload_file.write_coded(path, coded, layout=new.layout, from_root=from_root)
    finally:
        # Also after a full disk the other ranks must be through.
        for _ in coded:
            pass
