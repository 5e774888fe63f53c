"""Weights copied in parts by threads are those copied whole. Pinned memory needs a GPU: tests/gpu/test_gpu_copies.py."""

import pytest
import torch
from torch import nn

from heterorl.common.errors import ConfigError
from heterorl.common.model import tensors
from heterorl.common.weights.arena import Arena
from tests.support.training import tiny_model


@pytest.fixture
def in_parts(monkeypatch):
    """Cut tensors as on a GPU, after every seven elements, for four threads."""

    def parts_of(tensor):
        return [slice(start, min(start + 7, tensor.numel())) for start in range(0, tensor.numel(), 7)]

    def each_part(work, cut):
        parts = [(number, part) for number, tensor in enumerate(cut) for part in parts_of(tensor)]
        list(tensors.in_order(lambda entry: work(*entry), parts, threads=tensors.THREADS))

    return lambda: monkeypatch.setattr(tensors, "each_part", each_part)


def test_parts_store_and_load_the_bits_of_the_whole(in_parts):
    model, first, second = tiny_model(seed=1), tiny_model(seed=2), tiny_model(seed=3)
    layout = tensors.layout_of(model, "bf16")
    published, whole, parts = Arena(layout), Arena(layout), Arena(layout)
    tensors.store(model, published)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + 2**-9 * torch.rand_like(parameter))
    tensors.store(model, whole)
    tensors.load(whole, first)

    in_parts()
    tensors.store(model, parts)
    tensors.load(parts, second)

    assert parts.digests() == whole.digests() != published.digests()
    for one, other in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(one, other)


def test_part_that_is_not_finite_is_refused_by_its_name(in_parts):
    layer = nn.Linear(5, 5)
    layer.weight.data[4, 4] = float("inf")
    arena = Arena(tensors.layout_of(layer, "bf16"))

    in_parts()
    with pytest.raises(ConfigError, match="weight is not finite as bf16"):
        tensors.store(layer, arena)
