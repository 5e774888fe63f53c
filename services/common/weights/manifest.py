"""Manifests: built for a version, checked against parent and state."""

from heterorl.common.errors import MalformedPayload, StateMismatch
from heterorl.common.types.policy import NO_VERSION, Manifest, PayloadRef
from heterorl.common.weights.arena import CHUNK_ELEMENTS, Arena, Chunk, Layout, chunk_length, cut, state_root
from heterorl.common.weights.payload import PayloadInfo


def build_manifest(
    *,
    run_id: str,
    epoch: int,
    version: int,
    parent_version: int,
    parent_digest: str,
    layout: Layout,
    step: int,
    info: PayloadInfo,
    payloads: tuple[PayloadRef, ...],
) -> Manifest:
    """Build a version's manifest; `info` is of the payload leading to it."""
    return Manifest(
        run_id=run_id,
        epoch=epoch,
        version=version,
        parent_version=parent_version,
        parent_digest=parent_digest,
        layout_id=layout.layout_id,
        chunk_digests=info.chunk_digests,
        state_root=info.to_root,
        step=step,
        num_changed=info.num_changed,
        num_elements=info.num_elements,
        full_bytes=layout.full_bytes,
        chunk_elements=layout.chunk_elements,
        num_byte_elements=layout.lengths[1],
        payloads=payloads,
    )


def verify_child(*, parent: Manifest | None, parent_digest: str, child: Manifest) -> None:
    """Check that `child` follows `parent`, or is first if that is None.

    Raises StateMismatch for another run, layout, parent or parent digest, or an order that goes back.
    """
    if child.parent_digest != parent_digest:
        raise StateMismatch(f"version {child.version} names another parent manifest")
    if parent is None:
        if child.parent_version != NO_VERSION:
            raise StateMismatch(f"version {child.version} follows version {child.parent_version}: not a first version")
        return
    verify_descendant(ancestor=parent, child=child)
    if child.parent_version != parent.version:
        raise StateMismatch(f"version {child.version} does not name version {parent.version} as its parent")


def verify_descendant(*, ancestor: Manifest, child: Manifest) -> None:
    """Check that a merged delta may lead from `ancestor` to `child`.

    `verify_state` checks the result. Raises StateMismatch for another run or layout, or an order that goes back.
    """
    if child.run_id != ancestor.run_id:
        raise StateMismatch(f"version {child.version} belongs to run {child.run_id}, not {ancestor.run_id}")
    if child.version <= ancestor.version or child.epoch < ancestor.epoch:
        raise StateMismatch(f"version {child.version} goes back in the lineage")
    if child.layout_id != ancestor.layout_id:
        raise StateMismatch(f"version {child.version} has another layout than version {ancestor.version}")


def verify_merged(payload: PayloadRef, before: Manifest | None, after: Manifest) -> None:
    """Check that a merged delta leads from `before` to `after`; raises StateMismatch."""
    if before is None or (payload.from_version, payload.to_version) != (before.version, after.version):
        raise StateMismatch(f"a merged delta from version {payload.from_version} to {payload.to_version} does not fit")
    verify_descendant(ancestor=before, child=after)


def verify_snapshot(payload: PayloadRef, manifest: Manifest) -> None:
    """Check the stated version of a snapshot, not its content; raises StateMismatch."""
    if (payload.from_version, payload.to_version) != (NO_VERSION, manifest.version):
        raise StateMismatch(f"a snapshot of version {payload.to_version} is not one of version {manifest.version}")


def chunks_of(manifest: Manifest) -> tuple[Chunk, ...]:
    """The chunks of a version's state, from sizes in its manifest.

    With n1 stated, n1 + n2 + n4 = num_elements and n1 + 2 n2 + 4 n4 = full_bytes, the widths have n4 = (full_bytes +
    n1) / 2 - num_elements and n2 = num_elements - n1 - n4 elements.

    Raises MalformedPayload: the sizes contradict each other or the number of chunk digests.
    """
    chunk_elements = manifest.chunk_elements or CHUNK_ELEMENTS
    narrow = manifest.num_byte_elements
    wide = (manifest.full_bytes + narrow) // 2 - manifest.num_elements
    lengths = {2: manifest.num_elements - narrow - wide, 4: wide, 1: narrow}
    num_chunks = sum(-(-length // chunk_length(width, chunk_elements)) for width, length in lengths.items())
    is_whole = (manifest.full_bytes + narrow) % 2 == 0
    # Before any chunk is made: the sizes are foreign.
    if min(lengths.values()) < 0 or not is_whole or num_chunks != len(manifest.chunk_digests):
        raise MalformedPayload(f"the sizes of version {manifest.version} do not add up")
    return cut(lengths, chunk_elements)


def verify_state(manifest: Manifest, arena: Arena, *, threads: int = 1) -> None:
    """Compare a state, computed again, with its manifest; raises StateMismatch."""
    if arena.layout.layout_id != manifest.layout_id:
        raise StateMismatch(f"version {manifest.version} has another layout")
    digests = arena.digests(threads=threads)
    if len(digests) != len(manifest.chunk_digests):
        raise StateMismatch(f"version {manifest.version} has {len(manifest.chunk_digests)} chunks, not {len(digests)}")
    for number, (mine, stated) in enumerate(zip(digests, manifest.chunk_digests, strict=True)):
        if mine != stated:
            raise StateMismatch(f"chunk {number} differs from version {manifest.version}")
    if state_root(arena.layout.layout_id, digests) != manifest.state_root:
        raise StateMismatch(f"the state root differs from version {manifest.version}")
