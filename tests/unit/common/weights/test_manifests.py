"""Manifests state a version; children follow parents; a state is what its manifest says or is refused."""

from dataclasses import replace

import pytest

from heterorl.common.errors import MalformedPayload, StateMismatch
from heterorl.common.types.common import Digest
from heterorl.common.types.policy import Manifest, PayloadKind, PayloadRef
from heterorl.common.weights.arena import Arena, Layout, TensorSpec
from heterorl.common.weights.manifest import build_manifest, chunks_of, verify_child, verify_descendant, verify_state
from heterorl.common.weights.payload import write_delta, write_snapshot
from tests.support.arenas import SPECS, changed_arena, random_arena, small_layout

PARENT_DIGEST = "ab" * 32


@pytest.fixture
def lineage(tmp_path):
    """Two arenas and their manifests; versions 0 and 1."""
    first = random_arena(small_layout(), seed=1)
    second = changed_arena(first, seed=2)
    infos = [write_snapshot(tmp_path / "s", first), write_delta(tmp_path / "d", first, second)]
    manifests = [
        build_manifest(
            run_id="run",
            epoch=3,
            version=version,
            parent_version=version - 1,
            parent_digest=PARENT_DIGEST if version else "",
            layout=arena.layout,
            step=10 * version,
            info=info,
            payloads=(
                PayloadRef(
                    kind=kind,
                    from_version=version - 1,
                    to_version=version,
                    digest=info.digest,
                    num_bytes=info.num_bytes,
                ),
            ),
        )
        for version, arena, info, kind in zip(
            (0, 1), (first, second), infos, (PayloadKind.SNAPSHOT, PayloadKind.DELTA), strict=True
        )
    ]
    return (first, second), manifests, infos


def test_manifest_states_the_arena_and_what_its_payload_changed(lineage):
    (_, second), (_, manifest), (_, info) = lineage

    assert manifest.layout_id == second.layout.layout_id
    assert manifest.chunk_digests == second.digests()
    assert manifest.state_root == second.state_root()
    assert (manifest.num_changed, manifest.num_elements) == (info.num_changed, 256)
    assert manifest.full_bytes == 2 * 222 + 4 * 34
    assert (manifest.version, manifest.parent_version, manifest.step, manifest.epoch) == (1, 0, 10, 3)
    assert manifest.payloads[0].digest == info.digest


def test_child_follows_its_parent_and_the_first_follows_nothing(lineage):
    _, (first, second), _ = lineage

    verify_child(parent=None, parent_digest="", child=first)
    verify_child(parent=first, parent_digest=PARENT_DIGEST, child=second)
    verify_child(parent=first, parent_digest=PARENT_DIGEST, child=replace(second, version=9, epoch=4))


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"parent_digest": "cd" * 32}, "parent manifest"),
        ({"run_id": "other"}, "run other"),
        ({"parent_version": 7}, "does not name version 0"),
        ({"version": 0}, "goes back"),
        ({"epoch": 2}, "goes back"),
        ({"layout_id": Digest("00" * 32)}, "layout"),
    ],
)
def test_stranger_is_no_child(lineage, changes, match):
    _, (first, second), _ = lineage

    with pytest.raises(StateMismatch, match=match):
        verify_child(parent=first, parent_digest=PARENT_DIGEST, child=replace(second, **changes))


@pytest.mark.parametrize("changes", [{"parent_digest": PARENT_DIGEST}, {"parent_version": 0}])
def test_first_version_with_a_parent_is_refused(lineage, changes):
    _, (first, _), _ = lineage

    with pytest.raises(StateMismatch):
        verify_child(parent=None, parent_digest="", child=replace(first, **changes))


def test_state_is_what_its_manifest_says(lineage):
    arenas, manifests, _ = lineage

    for arena, manifest in zip(arenas, manifests, strict=True):
        verify_state(manifest, arena)


def test_any_flipped_bit_of_a_state_is_found_in_its_chunk(lineage):
    (first, _), (manifest, _), _ = lineage

    for number in range(first.num_chunks):
        chunk = first.chunk(number)
        for element in range(chunk.size):
            chunk[element] ^= 1 << (element % 8)
            with pytest.raises(StateMismatch, match=f"chunk {number} differs"):
                verify_state(manifest, first)
            chunk[element] ^= 1 << (element % 8)
    verify_state(manifest, first)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"layout_id": Digest("00" * 32)}, "another layout"),
        ({"chunk_digests": ()}, "has 0 chunks, not 7"),
        ({"state_root": Digest("00" * 32)}, "state root"),
    ],
)
def test_manifest_that_contradicts_itself_is_refused(lineage, changes, match):
    (first, _), (manifest, _), _ = lineage

    with pytest.raises(StateMismatch, match=match):
        verify_state(replace(manifest, **changes), first)


def stated(layout, **changes):
    arena = Arena(layout)
    values = {
        "run_id": "run", "epoch": 1, "version": 5, "parent_version": 4, "parent_digest": "", "step": 5,
        "layout_id": layout.layout_id, "chunk_digests": arena.digests(), "state_root": arena.state_root(),
        "num_changed": 0, "num_elements": layout.num_elements, "full_bytes": layout.full_bytes, "payloads": (),
        "chunk_elements": layout.chunk_elements, "num_byte_elements": layout.lengths[1],
    }  # fmt: skip
    return Manifest(**{**values, **changes})


@pytest.mark.parametrize("chunk_elements", [1, 7, 50, 1000])
def test_chunks_are_known_from_the_sizes_alone(chunk_elements):
    layout = small_layout(chunk_elements=chunk_elements)

    assert chunks_of(stated(layout)) == layout.chunks


@pytest.mark.parametrize("chunk_elements", [1, 7, 1000])
def test_chunks_of_elements_of_one_byte_are_known_too(chunk_elements):
    narrow = [TensorSpec(name="q", dtype="fp8_e4m3", shape=(61,)), TensorSpec(name="r", dtype="int8", shape=(4, 5))]

    for specs in (narrow, [*SPECS, *narrow]):
        layout = small_layout(specs=specs, chunk_elements=chunk_elements)
        assert chunks_of(stated(layout)) == layout.chunks
        with pytest.raises(MalformedPayload):
            chunks_of(stated(layout, num_byte_elements=82))


def test_chunks_have_the_usual_length_when_a_manifest_does_not_state_it():
    layout = Layout.build(SPECS)

    assert chunks_of(stated(layout, chunk_elements=0)) == layout.chunks


@pytest.mark.parametrize(
    "changes",
    [{"num_elements": 10**9}, {"full_bytes": 579}, {"full_bytes": 0}, {"full_bytes": 2**60}, {"chunk_digests": ()},
     {"chunk_elements": 200}, {"num_elements": 0}],
)  # fmt: skip
def test_sizes_that_do_not_add_up_are_refused(changes):
    with pytest.raises(MalformedPayload):
        chunks_of(stated(small_layout(), **changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"run_id": "other"}, "run other"),
        ({"version": 2}, "goes back"),
        ({"version": 1}, "goes back"),
        ({"epoch": 0}, "goes back"),
        ({"layout_id": "0" * 64}, "another layout"),
        ({}, ""),
    ],
)
def test_merged_delta_leads_forward_within_a_run_and_layout(changes, message):
    ancestor = stated(small_layout(), version=2, parent_version=1)
    child = stated(small_layout(), **changes)

    if message:
        with pytest.raises(StateMismatch, match=message):
            verify_descendant(ancestor=ancestor, child=child)
    else:
        verify_descendant(ancestor=ancestor, child=child)
