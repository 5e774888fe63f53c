"""Versions that ranks make together are, bit for bit, those of one process, however tensors and chunks are cut."""

import numpy as np
import pytest
import torch

from heterorl.common.errors import ConfigError
from heterorl.common.model import tensors
from heterorl.common.weights.arena import Arena, Layout, TensorSpec, digest_integers
from heterorl.common.weights.payload import NO_ROOT, write_coded, write_delta, write_snapshot
from heterorl.learner.backends.ranks.sharded_state import Piece
from heterorl.learner.backends.ranks.sharded_weights import ShardedVersions
from tests.support.thread_ranks import on_all_ranks

SHAPES = {"a": (7, 5), "b": (), "c": (0, 4), "d": (3,), "e": (11, 3), "table": (2, 2)}
CHUNK = 16


class _State:
    """Tensors cut anywhere, as flat buffers of an engine may be."""

    def __init__(self, values, cuts, rank):
        self._values, self._rank = values, rank
        self.tables = [
            {name: Piece(start=cuts[name][number], size=cuts[name][number + 1] - cuts[name][number]) for name in values}
            for number in range(len(cuts["a"]) - 1)
        ]
        self.pieces = self

    def read(self, name, key, *, start, size):
        piece = self.tables[self._rank][name]
        assert start + size <= piece.size
        return self._values[name].reshape(-1)[piece.start + start : piece.start + start + size]


def _values(seed, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) * scale for name, shape in SHAPES.items()}


def _cuts(seed, world_size):
    random = np.random.default_rng(seed)
    cuts = {}
    for name, shape in SHAPES.items():
        size = int(np.prod(shape))
        inner = np.sort(random.integers(0, size + 1, world_size - 1))
        cuts[name] = [0, *map(int, inner), size]
    return cuts


def _layout(dtype):
    specs = [TensorSpec(name=name, dtype=dtype, shape=shape) for name, shape in SHAPES.items()]
    specs.append(TensorSpec(name="0 tied", dtype=dtype, shape=SHAPES["a"], alias_of="a"))
    return Layout.build(specs, chunk_elements=CHUNK)


def _arena(layout, values):
    arena = Arena(layout)
    for name, tensor in values.items():
        tensors.store_tensors([(layout.spec(name), tensor)], arena)
    return arena


def _held(ranks, layout, values, cuts):
    trained = {name: tensor for name, tensor in values.items() if name != "table"}
    return ShardedVersions(
        state=_State(trained, cuts, ranks.rank), layout=layout, buffers={"table": values["table"]}, ranks=ranks
    )


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_payloads_and_digests_are_those_of_one_process(tmp_path, world_size, dtype):
    layout, seed = _layout(dtype), world_size
    first = _values(seed)
    second = {name: tensor + 0.004 * torch.randn_like(tensor) for name, tensor in first.items()}
    old = _arena(layout, first)
    new = _arena(layout, second)
    wanted = [write_snapshot(tmp_path / "0", old), write_delta(tmp_path / "1", old, new, threads=2)]

    def work(ranks):
        values = {name: tensor.clone() for name, tensor in first.items()}
        held = _held(ranks, layout, values, _cuts(seed, world_size))
        digests = [held.stage(0)]
        for name, tensor in values.items():
            tensor.copy_(second[name])
        digests.append(held.stage(1))
        infos = []
        for version, before in ((0, None), (1, 0)):
            coded = held.code(version, before=before, threads=1 + version)
            chunks = ((*chunk, digest) for chunk, digest in zip(coded, digests[version], strict=True))
            if ranks.rank:
                assert list(coded) == []
                continue
            root = NO_ROOT if before is None else old.state_root()
            infos.append(write_coded(tmp_path / f"{version} of all", chunks, layout=layout, from_root=root))
        assert ranks.largest_exchange <= max(world_size, 1) * CHUNK * 4
        held.keep([1])
        whole = held.whole(1)
        return digests, infos, whole

    answers = on_all_ranks(world_size, work)

    assert all(answer[0] == [old.digests(), new.digests()] for answer in answers)
    assert answers[0][1] == wanted
    assert answers[0][2].state_root() == new.state_root()
    for number in (0, 1):
        assert (tmp_path / f"{number} of all").read_bytes() == (tmp_path / str(number)).read_bytes()
    assert wanted[1].num_changed < layout.num_elements or dtype == "fp32"


def test_ranks_take_their_chunks_of_an_arena_which_may_change_afterwards():
    layout = _layout("bf16")
    values = _values(7)
    arena = _arena(layout, values)
    digests = arena.digests()

    def work(ranks):
        held = _held(ranks, layout, values, _cuts(1, 3))
        found = held.divide(0, None if ranks.rank else arena)
        if not ranks.rank:
            arena.chunk(0)[:] = 0
        return found, held._digests(0)

    assert on_all_ranks(3, work) == [(digests, digests)] * 3


def test_weight_that_is_not_finite_is_named_on_every_rank():
    layout = _layout("bf16")
    values = _values(3)
    values["e"][10, 2] = float("inf")

    def work(ranks):
        return _held(ranks, layout, values, _cuts(3, 2)).stage(0)

    answers = on_all_ranks(2, work)

    assert all(isinstance(answer, ConfigError) for answer in answers)
    assert all("e is not finite as bf16" in str(answer) for answer in answers)


def test_digest_of_a_chunk_has_the_size_that_is_cut_by():
    assert len(digest_integers(np.zeros(3, np.int16))) == 16
