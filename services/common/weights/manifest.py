"""What a version is: building a manifest, and checking a child against its parent and a state against its manifest."""

from __future__ import annotations

from services.common.errors import StateMismatch
from services.common.types import Manifest, PayloadRef
from services.common.weights.arena import Arena, state_root
from services.common.weights.payload import PayloadInfo

NO_VERSION = -1


def build_manifest(
    *,
    run_id: str,
    epoch: int,
    version: int,
    parent_version: int,
    parent_digest: str,
    arena: Arena,
    step: int,
    info: PayloadInfo,
    payloads: tuple[PayloadRef, ...],
) -> Manifest:
    """State a version; `info` describes the payload that leads to `arena`."""
    return Manifest(
        run_id=run_id,
        epoch=epoch,
        version=version,
        parent_version=parent_version,
        parent_digest=parent_digest,
        layout_id=arena.layout.layout_id,
        chunk_digests=info.chunk_digests,
        state_root=info.to_root,
        step=step,
        num_changed=info.num_changed,
        num_elements=info.num_elements,
        full_bytes=arena.layout.full_bytes,
        payloads=payloads,
    )


def verify_child(*, parent: Manifest | None, parent_digest: str, child: Manifest) -> None:
    """Check that `child` follows `parent` in the lineage.

    Args:
        parent: what the child is to follow; None when it is to be the first version.
        parent_digest: digest of the parent's manifest bytes; empty when there is no parent.
        child: the manifest to check.

    Raises:
        StateMismatch: another run, layout, parent or parent digest, or an order that goes back.
    """
    if child.parent_digest != parent_digest:
        raise StateMismatch(f"version {child.version} names another parent manifest")
    if parent is None:
        if child.parent_version != NO_VERSION:
            raise StateMismatch(f"version {child.version} follows version {child.parent_version}, not nothing")
        return
    if child.run_id != parent.run_id:
        raise StateMismatch(f"version {child.version} belongs to run {child.run_id}, not {parent.run_id}")
    if child.parent_version != parent.version:
        raise StateMismatch(f"version {child.version} does not name version {parent.version} as its parent")
    if child.version <= parent.version or child.epoch < parent.epoch:
        raise StateMismatch(f"version {child.version} goes back in the lineage")
    if child.layout_id != parent.layout_id:
        raise StateMismatch(f"version {child.version} has another layout than version {parent.version}")


def verify_state(manifest: Manifest, arena: Arena) -> None:
    """Recompute the whole state and compare it with the manifest.

    Raises:
        StateMismatch: layout, a chunk or the root differs; names the first chunk.
    """
    if arena.layout.layout_id != manifest.layout_id:
        raise StateMismatch(f"version {manifest.version} has another layout")
    digests = arena.digests()
    if len(digests) != len(manifest.chunk_digests):
        raise StateMismatch(f"version {manifest.version} has {len(manifest.chunk_digests)} chunks, not {len(digests)}")
    for number, (mine, stated) in enumerate(zip(digests, manifest.chunk_digests, strict=True)):
        if mine != stated:
            raise StateMismatch(f"chunk {number} differs from version {manifest.version}")
    if state_root(arena.layout.layout_id, digests) != manifest.state_root:
        raise StateMismatch(f"the state root differs from version {manifest.version}")
