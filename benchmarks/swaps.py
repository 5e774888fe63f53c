"""The pause of an engine while it takes new weights, at 0.1, 1 and 8 billion of them.

A sampler fetches, verifies and applies a version while its engine generates; the engine pauses for the copy alone. Here
it is idle, so a wait for the current token is not in the numbers. The engine hf is loaded with random models of 0.1 and
1 billion weights. Copies of 8 billion are of arrays without a model. Each row has a bare copy by numpy, of 0.4 GB again
and again.

    python -m benchmarks.swaps --out benchmarks/results/swaps.json
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.learner import write_model
from heterorl.common.generation.hf_engine import HfEngine
from heterorl.common.model.tensors import Part, each_part, part_of, to_device
from heterorl.common.types.common import LogprobMode, SamplingSemantics

MODELS = ((768, 12), (2048, 17))
"""Hidden size and layers."""
LARGE_WEIGHTS = 8_000_000_000
ARRAY_WEIGHTS = 200_000_000
REPEATS = 5


def array_swap(weights: int, *, device: str, most_sources: int = 1_000_000) -> Callable[[], None]:
    """A swap of 16-bit arrays that are as large together as a model; later arrays are copied from the first sources."""
    count = math.ceil(weights / ARRAY_WEIGHTS)
    size = weights // count
    host = [torch.zeros(size, dtype=torch.int16).fill_(number) for number in range(min(count, most_sources))]
    held = [torch.empty(size, dtype=torch.int16, device=device) for _ in range(count)]

    def copy_part(number: int, part: Part) -> None:
        to_device(part_of(host[number % len(host)], part), part_of(held[number], part))

    return lambda: each_part(copy_part, held)


def model_row(hidden_size: int, layers: int, repeats: int) -> dict[str, Any]:
    """The engine hf with a random model."""
    sampling = SamplingSemantics(
        temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=8, logprob_mode=LogprobMode.PROCESSED
    )
    with tempfile.TemporaryDirectory() as directory:
        weights = write_model(Path(directory), hidden_size=hidden_size, layers=layers)
        engine = HfEngine(
            model_dir=directory, published_dtype="bf16", compute_dtype="bf16", device="cpu", sampling=sampling,
            batch_rows=1, end_token_ids=(1,),
        )  # fmt: skip
        base = engine.base()
    assert base is not None
    versions = iter(range(repeats + 1))
    return row("engine hf", weights, seconds(lambda: engine.load(base, next(versions)), repeats), repeats)


def row(what: str, weights: int, taken: Sequence[float], repeats: int) -> dict[str, Any]:
    """Seconds of a swap, and of a bare copy of its bytes in pieces of one array."""
    source, target = (np.ones(min(weights, ARRAY_WEIGHTS), np.uint16) for _ in range(2))
    bare = seconds(lambda: np.copyto(target, source), repeats)
    return {
        "what": what,
        "weights": weights,
        "pause_s": round(statistics.median(taken), 4),
        "pause_max_s": round(max(taken), 4),
        "copy_s": round(statistics.median(bare) * weights / source.size, 4),
    }


def seconds(work: Callable[[], object], repeats: int) -> list[float]:
    """Seconds of each run after the first, which touches the memory."""
    taken = []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        work()
        taken.append(time.perf_counter() - started)
    return taken[1:]


def main() -> None:
    """Measure and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--weights", type=int, default=LARGE_WEIGHTS, help="of the arrays; two bytes each")
    parser.add_argument("--repeats", type=int, default=REPEATS)
    options = parser.parse_args()
    load = os.getloadavg()[0]
    rows = [model_row(hidden_size, layers, options.repeats) for hidden_size, layers in MODELS]
    swap = array_swap(options.weights, device="cpu", most_sources=5)
    rows.append(row("arrays", options.weights, seconds(swap, options.repeats), options.repeats))
    for each in rows:
        print(each, flush=True)
    found = {
        "processor": platform.processor() or "cpu",
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_average_before": round(load, 2),
        "repeats": options.repeats,
        "rows": rows,
    }
    options.out.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
