"""A version's weights, in an arena or sharded among the ranks."""

from __future__ import annotations

from pathlib import Path

from heterorl.common.weights import payload
from heterorl.common.weights.arena import Arena, Layout
from heterorl.common.weights.payload import PayloadChunks, PayloadInfo
from heterorl.common.weights.payload_file import NO_ROOT
from heterorl.learner.backends.ranks.sharded_backend import ShardedBackend
from heterorl.learner.backends.ranks.sharded_weights import ShardedArena, VersionEngine
from heterorl.learner.backends.train_backend import TrainBackend

Weights = Arena | ShardedArena


def maker_of(backend: TrainBackend, *, with_variants: bool) -> VersionEngine | None:
    """The engine that several ranks make versions with; None where rank 0 makes them, as it does variants."""
    if with_variants or not isinstance(backend, ShardedBackend) or not backend.is_divided:
        return None
    return backend.versions


def whole_of(weights: Weights) -> Arena:
    """All weights in this process; a copy of sharded ones, gathered while no step computes."""
    return weights if isinstance(weights, Arena) else weights.whole()


def write_snapshot(path: Path, weights: Weights, *, threads: int = 1) -> PayloadInfo:
    """As `payload.write_snapshot`; the file does not depend on where the weights are."""
    if isinstance(weights, Arena):
        return payload.write_snapshot(path, weights, threads=threads)
    return _write(path, None, weights, threads=threads)


def write_delta(path: Path, old: Weights, new: Weights, *, threads: int = 1) -> PayloadInfo:
    """As `payload.write_delta`; the file does not depend on where the weights are."""
    if isinstance(new, Arena) or isinstance(old, Arena):
        return payload.write_delta(path, whole_of(old), whole_of(new), threads=threads)
    return _write(path, old, new, threads=threads)


def read_snapshot(path: Path, layout: Layout, maker: VersionEngine | None) -> Weights:
    """The weights of a snapshot file, sharded where a backend has several ranks.

    Raises:
        CorruptData: it is broken, or of another model.
        OSError: it cannot be read.
    """
    if maker is None:
        arena = Arena(layout)
        payload.apply_payload(path, arena, expected_from_root=None)
        return arena
    chunks = PayloadChunks(path, layout_id=layout.layout_id, chunks=layout.chunks, expected_from_root=None)
    return maker.divide(chunks.read)


def _write(path: Path, old: ShardedArena | None, new: ShardedArena, *, threads: int) -> PayloadInfo:
    coded = new.code(old, threads=threads)
    try:
        from_root = NO_ROOT if old is None else old.state_root()
        return payload.write_coded(path, coded, layout=new.layout, from_root=from_root)
    finally:
        # Also after a full disk the other ranks must be through.
        for _ in coded:
            pass
