"""Tokens per second and the pause of a swap, per engine, on one small model with random weights.

Both engines compute in float32 with the same rows and lengths; ends are random, so tokens are counted, not assumed. A
swap's pause is what generation waits for: vLLM's includes its weights file, the canary and the float32 reference.
Numbers of a two-core machine say what the engines cost beside each other, nothing about a GPU.

    python -m benchmarks.sampler --out benchmarks/results/sampler.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from heterorl.common.generation.hf_engine import HfEngine
from heterorl.common.generation.inference_engine import generate_all
from heterorl.common.generation.tiny_model import write_tiny_model
from heterorl.common.types.common import LogprobMode, SamplingSemantics
from heterorl.common.weights.arena import Arena
from heterorl.sampler.sampler_config import VllmEngineConfig
from heterorl.sampler.vllm.shared_model import SharedModel
from heterorl.sampler.vllm.vllm_engine import VllmEngine

NUM_PROMPTS, GROUP_SIZE, MAX_NEW_TOKENS, NUM_SWAPS = 8, 8, 64, 8
EOS = 1


Made = tuple[HfEngine | VllmEngine, Arena | None, int]
"""An engine, its first weights and the number of its tokens."""


def measure(make: Callable[[], Made]) -> dict[str, Any]:
    """One engine: a warm-up, then alternating swaps and batches; medians."""
    started = time.perf_counter()
    engine, base, vocab_size = make()
    start_s = time.perf_counter() - started
    assert base is not None
    rng = np.random.default_rng(0)
    prompts = [rng.integers(2, vocab_size, 16).astype(np.int32) for _ in range(NUM_PROMPTS)]
    rates, pauses = [], []
    try:
        for version in range(NUM_SWAPS + 1):
            started = time.perf_counter()
            engine.load(base, version)
            pause_s = time.perf_counter() - started
            started = time.perf_counter()
            groups = generate_all(
                engine, prompts, seeds=range(version, version + NUM_PROMPTS), num_per_prompt=GROUP_SIZE
            )
            batch_s = time.perf_counter() - started
            # The first swap and the first batch warm caches up.
            if version:
                pauses.append(pause_s)
                rates.append(sum(row.token_ids.size for rows in groups for row in rows) / batch_s)
    finally:
        engine.close()
    return {
        "engine": engine.name,
        "compute_dtype": engine.dtype,
        "tokens_per_s": round(statistics.median(rates), 1),
        "swap_pause_ms": round(1e3 * statistics.median(pauses), 1),
        "swap_bytes": base.layout.full_bytes,
        "start_s": round(start_s, 1),
    }


def main() -> None:
    """Measure every engine that is installed and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    arguments = parser.parse_args()
    sampling = SamplingSemantics(
        temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=MAX_NEW_TOKENS, logprob_mode=LogprobMode.PROCESSED
    )
    with tempfile.TemporaryDirectory() as name:
        model_dir = str(
            write_tiny_model(
                Path(name) / "model", seed=0, hidden_size=arguments.hidden_size, num_layers=arguments.layers
            )
        )
        common: dict[str, Any] = {
            "model_dir": model_dir, "published_dtype": "bf16", "sampling": sampling,
        }  # fmt: skip
        num_rows = NUM_PROMPTS * GROUP_SIZE

        def hf() -> Made:
            engine = HfEngine(**common, compute_dtype="fp32", batch_rows=num_rows, device="cpu", end_token_ids=(EOS,))
            return engine, engine.base(), engine.vocab_size

        def vllm() -> Made:
            source = SharedModel(**common, weights_dir=Path(name))
            options = VllmEngineConfig(compute_dtype="fp32", batch_rows=num_rows, kv_cache_bytes=256 << 20)
            return VllmEngine(source, end_token_ids=(EOS,), settings=options), source.base(), source.room.vocab_size

        makers: list[Callable[[], Made]] = [hf]
        if find_spec("vllm") is not None:
            makers.append(vllm)
        rows = [measure(make) for make in makers]
    for row in rows:
        print(row)
    document = {
        "processor": "cpu", "cores": os.cpu_count(), "load_average": round(os.getloadavg()[0], 1),
        "python": platform.python_version(), "rows": num_rows, "max_new_tokens": MAX_NEW_TOKENS,
        "swaps": NUM_SWAPS, "engines": rows,
    }  # fmt: skip
    arguments.out.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
