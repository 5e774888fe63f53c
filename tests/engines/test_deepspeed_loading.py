"""Ranks that read what they keep hold less than the whole model, and start from the same bits.

Memory is measured in a process for each rank, as the peak of what is resident.
"""

import pytest
import torch

from benchmarks.load_memory import measure, write_model
from heterorl.common.model import tensors
from heterorl.common.weights.arena import Arena
from heterorl.learner.train.model import load_model

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    tiny, model_dir = tmp_path_factory.mktemp("tiny"), tmp_path_factory.mktemp("model")
    write_model(tiny, hidden_size=32, num_layers=1, vocab_size=64)
    size = write_model(model_dir, hidden_size=768, num_layers=14)
    assert len(list(model_dir.glob("*.safetensors"))) > 1
    return {"tiny": str(tiny), "model_dir": str(model_dir)}, size


def _root(model_dir):
    """Of the model as transformers loads it."""
    with torch.no_grad():
        model = load_model(model_dir)
        arena = Arena(tensors.layout_of(model, "bf16"))
        tensors.store(model, arena)
    return arena.state_root()


@pytest.mark.parametrize("stage", [2, 3])
def test_no_rank_holds_a_whole_fp32_model_beside_what_it_keeps(models, stage):
    """In units of the whole model in fp32, two ranks keep 0.5 of masters, 0.5 or 0.25 to compute with in bf16, and 0.5
    of gradients. Measured are peaks of 1.5 to 1.75, and 2.5 to 2.8 where each rank reads the whole model first.
    """
    job, size = models

    answer = measure({**job, "kind": f"zero {stage}", "dtype": "bf16", "ranks": 2, "operations": [["load"], ["store"]]})

    whole = 4 * size
    assert answer["root"] == _root(job["model_dir"])
    assert len(answer["load"]) == len(answer["kept"]) == 2
    for peak, kept in zip(answer["load"], answer["kept"], strict=True):
        assert kept > 0.9 * whole
        assert peak < 2.1 * whole
