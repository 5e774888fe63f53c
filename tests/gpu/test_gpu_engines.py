"""Engines on a GPU: log-probs beside a float32 forward on the CPU, swaps under way, throughput."""

import threading
import time

import numpy as np
import pytest

from heterorl.common.generation.inference_engine import generate_all
from tests.gpu.conftest import DEVICE
from tests.support.engines import PROMPTS, Truth, disturbed, hf_engine, semantics, vllm_engine, write_model

pytestmark = [pytest.mark.timeout(1500), pytest.mark.filterwarnings("default")]
SAMPLING = semantics(temperature=0.8)
SEEDS = [11, 12, 13, 14]


@pytest.fixture(scope="module", params=["hf", "vllm"])
def made(request, tmp_path_factory):
    """An engine, its first weights, the truth and the difference that its type of products explains."""
    if DEVICE == "cuda":
        import torch

        if not torch.cuda.is_available():
            pytest.skip("torch sees no CUDA device")
    directory = tmp_path_factory.mktemp("engine")
    model_dir = write_model(directory / "model")
    if request.param == "hf":
        engine, tolerance = hf_engine(model_dir, temperature=0.8, engine={"device": DEVICE}), 1e-3
    else:
        pytest.importorskip("vllm", reason="vLLM is not installed")
        # No attention kernel of vLLM's takes fp32 on a GPU.
        options = {"compute_dtype": "bf16" if DEVICE == "cuda" else "fp32", "memory_share": 0.2}
        engine, tolerance = vllm_engine(model_dir, directory / "weights", temperature=0.8, engine=options), 0.5
    yield engine, engine.base(), Truth(model_dir), tolerance
    engine.close()


def test_swapped_weights_are_what_is_drawn_with(made):
    engine, base, truth, tolerance = made
    pauses = []
    for version in range(3):
        state = disturbed(base, seed=version)
        started = time.perf_counter()
        engine.load(state, version)
        pauses.append(time.perf_counter() - started)
        groups = generate_all(engine, PROMPTS, seeds=SEEDS, num_per_prompt=8)

        difference = truth.difference(state, groups, SAMPLING)
        assert difference < tolerance
        assert difference < truth.difference(base, groups, SAMPLING) / 2
    print(f"\n{engine.name} on {DEVICE}: swaps of {', '.join(f'{pause * 1e3:.0f}' for pause in pauses)} ms")


def test_swap_during_a_batch_keeps_what_is_under_way(made):
    engine, base, truth, tolerance = made
    states = {20: disturbed(base, seed=20), 21: disturbed(base, seed=21, scale=0.02)}
    engine.load(states[20], 20)
    groups = []
    batch = threading.Thread(
        target=lambda: groups.extend(generate_all(engine, PROMPTS, seeds=SEEDS, num_per_prompt=256))
    )
    started = time.perf_counter()
    batch.start()
    engine.load(states[21], 21)
    batch.join()
    took = time.perf_counter() - started

    rows = [(prompt, row) for prompt, members in zip(PROMPTS, groups, strict=True) for row in members]
    print(f"\n{engine.name} on {DEVICE}: {sum(len(row.token_ids) for _, row in rows) / took:,.0f} tokens/s over a swap")
    assert {span.version for _, row in rows for span in row.spans} <= {20, 21}
    for prompt, row in rows[:: len(rows) // 64]:
        expected = truth.mixed(states, prompt, row, SAMPLING)
        assert float(np.abs(row.logprobs - expected).max()) < tolerance
