"""Weights to and from a GPU are those of the CPU, bit for bit, over several buffers."""

import numpy as np
import pytest
import torch
from torch import nn

from heterorl.common.model import tensors
from heterorl.common.model.tensors import PART_ELEMENTS
from heterorl.common.weights.arena import Arena

pytestmark = [pytest.mark.timeout(300), pytest.mark.filterwarnings("default")]


def _model(seed):
    torch.manual_seed(seed)
    # Two whole buffers and a piece, then tensors far smaller than one.
    model = nn.Sequential(nn.Embedding(2 * PART_ELEMENTS // 1024 + 1, 1024), nn.Linear(3, 5), nn.LayerNorm(1))
    nn.init.normal_(model[2].weight)
    return model


def _bits(arena):
    return np.concatenate([arena.chunk(number).astype(np.int64) for number in range(arena.num_chunks)])


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_stored_bits_equal_those_of_the_cpu(device, dtype):
    model = _model(seed=0)
    one, other = (Arena(tensors.layout_of(model, dtype)) for _ in range(2))

    tensors.store(model, one)
    tensors.store(model.to(device), other)

    assert np.array_equal(_bits(one), _bits(other))


@pytest.mark.parametrize("held", [torch.bfloat16, torch.float32])
def test_loaded_weights_equal_those_of_the_cpu(device, held):
    source, target = _model(seed=0), _model(seed=1).to(device, held)
    arena = Arena(tensors.layout_of(source, "bf16"))
    tensors.store(source, arena)

    tensors.load(arena, target)

    for expected, found in zip(source.parameters(), target.parameters(), strict=True):
        assert torch.equal(found.cpu(), expected.to(torch.bfloat16).to(held))
