"""Engines on the card: tokens a second, log-probs against a float32 forward, canary, pause of a swap."""

from __future__ import annotations

import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from benchmarks.gpu.rows import Place, Rows, seconds
from benchmarks.learner import VOCAB_SIZE, write_model
from benchmarks.swaps import LARGE_WEIGHTS, array_swap
from heterorl.common.generation.hf_engine import HfEngine
from heterorl.common.generation.inference_engine import ScoredText, generate_all
from heterorl.common.types.common import LogprobMode, SamplingSemantics
from heterorl.plan.assumptions import Assumptions

GROUP_SIZE = 8


def run(rows: Rows, place: Place) -> None:
    """Engine hf in bf16 at half a billion weights, its log-probs beside the same bits in fp32, and large arrays."""
    with tempfile.TemporaryDirectory() as name:
        hidden_size, layers = place.pick(1280, 64), place.pick(24, 1)
        parameters = write_model(Path(name), hidden_size=hidden_size, layers=layers)
        _engine(rows, place, name, parameters)
    if find_spec("vllm") is None:
        rows.note("engine vllm", "skipped: vllm is not installed")
    _large_swap(rows, place)


def _engine(rows: Rows, place: Place, model_dir: str, parameters: int) -> None:
    num_rows, new_tokens = place.pick(256, 16), place.pick(128, 8)
    sampling = SamplingSemantics(
        temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=new_tokens, logprob_mode=LogprobMode.PROCESSED
    )

    def engine(dtype: str) -> HfEngine:
        return HfEngine(
            model_dir=model_dir, published_dtype="bf16", compute_dtype=dtype, device=place.device, sampling=sampling,
            batch_rows=num_rows, end_token_ids=(1,),
        )  # fmt: skip

    title, drawing = f"hf, {parameters / 1e6:.0f} M", engine("bf16")
    base = drawing.base()
    assert base is not None
    versions = iter(range(100))
    pause = seconds(lambda: drawing.load(base, next(versions)), device=place.device)
    bytes_moved = base.layout.full_bytes
    forecast = bytes_moved / Assumptions().pcie_gb_s / 1e9
    rows.add(f"{title}: pause of a swap", 1e3 * pause, "ms", forecast=1e3 * forecast)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(2, VOCAB_SIZE, 16).astype(np.int32) for _ in range(num_rows // GROUP_SIZE)]
    generate_all(drawing, prompts[:1], seeds=[0], num_per_prompt=GROUP_SIZE)
    started = time.perf_counter()
    groups = generate_all(drawing, prompts, seeds=range(len(prompts)), num_per_prompt=GROUP_SIZE)
    taken = time.perf_counter() - started
    drawn = sum(row.token_ids.size for members in groups for row in members)
    rows.add(f"{title}: speed, {num_rows} rows", drawn / taken, "tokens/s")
    exact = engine("fp32")
    exact.load(base, 0)
    pairs = [(prompt, members[0]) for prompt, members in zip(prompts, groups, strict=True)][:8]
    texts = [ScoredText(prompt=prompt, completion=row.token_ids) for prompt, row in pairs]
    truths, canary = exact.score(texts), drawing.score(texts)
    recorded = np.concatenate([row.logprobs for _, row in pairs])
    truth = np.concatenate(truths)
    rows.add(f"{title}: recorded log-probs against fp32, mean", float(np.abs(recorded - truth).mean()), "nats")
    rows.add(f"{title}: recorded log-probs against fp32, bias", float((recorded - truth).mean()), "nats")
    rows.add(f"{title}: canary against fp32, median", float(np.median(np.abs(np.concatenate(canary) - truth))), "nats")


def _large_swap(rows: Rows, place: Place) -> None:
    """Arrays of a large model's size, copied as a swap copies: from the host's memory into tensors on the card."""
    weights = place.pick(LARGE_WEIGHTS, 2_000_000)
    forecast = 2 * weights / Assumptions().pcie_gb_s / 1e9
    pause = seconds(array_swap(weights, device=place.device), device=place.device, repeats=2)
    rows.add(f"arrays of {weights / 1e9:.3g} B weights: pause of a swap", pause, "s", forecast=forecast)
