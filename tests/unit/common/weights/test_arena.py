"""Layouts and arenas: one place for each element, one identity for each state."""

import blake3
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from heterorl.common.weights.arena import CHUNK_ELEMENTS, Arena, Layout, TensorSpec, digest_integers, state_root
from tests.support.arenas import SPECS, random_arena, small_layout


def spec(name="a", dtype="bf16", shape=(2, 3), alias_of=""):
    return TensorSpec(name=name, dtype=dtype, shape=shape, alias_of=alias_of)


def test_layout_places_tensors_by_name_and_width_and_aliases_nowhere():
    layout = small_layout()

    # Two bytes: embed (217), norm (5). Four bytes: gate (33), scale (1).
    assert layout.offsets == {"embed": 0, "norm": 217, "gate": 0, "scale": 33}
    assert layout.lengths == {2: 222, 4: 34, 1: 0}
    assert layout.num_elements == 256
    assert layout.full_bytes == 2 * 222 + 4 * 34


def test_chunks_cover_each_width_once_in_order_regardless_of_tensor_borders():
    layout = small_layout(chunk_elements=50)

    assert [(chunk.width, chunk.start, chunk.stop) for chunk in layout.chunks] == [
        (2, 0, 50),
        (2, 50, 100),
        (2, 100, 150),
        (2, 150, 200),
        (2, 200, 222),
        (4, 0, 25),
        (4, 25, 34),
    ]
    assert [chunk.num_bytes for chunk in layout.chunks] == [100, 100, 100, 100, 44, 100, 36]


def test_layout_id_is_the_same_for_the_same_table_in_any_order():
    assert small_layout(specs=SPECS[::-1]).layout_id == small_layout().layout_id


@pytest.mark.parametrize(
    "specs",
    [
        [spec(name="b"), spec(name="z")],
        [spec(dtype="fp16"), spec(name="z")],
        [spec(shape=(3, 2)), spec(name="z")],
        [spec(shape=(6,)), spec(name="z")],
        [spec(), spec(name="z", alias_of="a")],
        [spec()],
    ],
)
def test_layout_id_differs_when_anything_of_the_table_does(specs):
    assert Layout.build(specs).layout_id != Layout.build([spec(), spec(name="z")]).layout_id


def test_layout_id_differs_when_chunks_are_cut_elsewhere():
    assert small_layout(chunk_elements=50).layout_id != small_layout(chunk_elements=51).layout_id


@pytest.mark.parametrize(
    "specs",
    [
        [spec(), spec()],
        [spec(dtype="fp64")],
        [spec(shape=(2, -1))],
        [spec(alias_of="missing")],
        [spec(alias_of="a")],
        [spec(), spec(name="b", shape=(3, 2), alias_of="a")],
        [spec(), spec(name="b", dtype="fp16", alias_of="a")],
        [spec(), spec(name="b", alias_of="a"), spec(name="c", alias_of="b")],
    ],
    ids=["twice", "dtype", "shape", "missing", "itself", "other shape", "other dtype", "alias of alias"],
)
def test_layout_refuses_an_impossible_table(specs):
    with pytest.raises(ValueError, match=r"repeat|cannot be"):
        Layout.build(specs)


def test_layout_refuses_a_chunk_without_elements():
    with pytest.raises(ValueError, match="0 elements"):
        small_layout(chunk_elements=0)


def test_layout_without_tensors_has_no_chunks():
    layout = Layout.build([])

    assert (layout.num_elements, layout.chunks, Arena(layout).digests()) == (0, (), ())
    assert CHUNK_ELEMENTS == 4 * 1024 * 1024


def test_spec_resolves_an_alias_and_refuses_a_stranger():
    layout = small_layout()

    assert layout.spec("head") == layout.spec("embed") == SPECS[0]
    with pytest.raises(KeyError):
        layout.spec("stranger")


def test_view_writes_reach_the_alias_the_chunk_and_nothing_else():
    arena = Arena(small_layout())

    arena.view("head")[7, 2] = -5

    # Row 7 of 7 columns, column 2: element 51, the second of the second chunk.
    assert arena.view("embed")[7, 2] == -5
    assert arena.chunk(1)[1] == -5
    assert sum(np.count_nonzero(arena.chunk(number)) for number in range(arena.num_chunks)) == 1
    assert arena.view("scale").shape == ()
    assert arena.view("gate").dtype == np.int32


def test_copy_has_the_same_bits_and_another_storage():
    arena = random_arena(small_layout(), seed=1)
    other = arena.copy()

    assert other.digests() == arena.digests()
    other.view("norm")[0] ^= 1
    assert other.digests() != arena.digests()


def test_digests_are_of_little_endian_bytes_and_the_root_of_layout_and_digests():
    arena = random_arena(small_layout(), seed=2)

    expected = tuple(
        blake3.blake3(b"".join(int(v).to_bytes(c.dtype.itemsize, "little", signed=True) for v in c)).digest(length=16)
        for c in (arena.chunk(number) for number in range(arena.num_chunks))
    )
    assert arena.digests() == expected
    assert arena.state_root() == state_root(arena.layout.layout_id, expected)
    assert arena.state_root() == blake3.blake3(arena.layout.layout_id.encode() + b"".join(expected)).hexdigest()


@given(st.binary(max_size=64).map(lambda data: data[: len(data) // 2 * 2]))
def test_digest_does_not_depend_on_byte_order_or_stride(data):
    little = np.frombuffer(data, "<i2")
    big = little.astype(">i2")
    strided = np.repeat(little, 2)[::2]

    assert digest_integers(little) == digest_integers(big) == digest_integers(strided)
    assert digest_integers(little) == blake3.blake3(data).digest(length=16)
