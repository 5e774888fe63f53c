"""Gain of the transformers engine from rows refilled between two tokens, against waves, on the same requests.

A small model with random weights ends a completion with a probability of about 1 / vocabulary at each token: lengths
are geometric, the longest of a batch four times the mean. All requests are the engine's from the beginning; the same
seeds in every mode and repetition, which alternate in one process.

    refill       requests join between two tokens, ended rows leave: a cache of keys and values of all columns
    waves        requests wait until all rows have ended, ended rows leave by halves: a cache with sliding windows
    whole_waves  requests wait, ended rows are computed to the end: a cache with a recurrent state

`busy_share` is the share of computed rows whose token was used. Here a pass costs what its rows and columns cost, and
refilled rows are as wide as the longest of them. Where a pass costs nearly the same for any number of rows, as on a GPU
that is not full, `passes` is what the modes differ by; it depends on lengths alone.

    python -m benchmarks.hf_rows --out benchmarks/results/hf_rows.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from heterorl.common.generation.hf_engine import HfEngine
from heterorl.common.generation.inference_engine import Finished, Request
from heterorl.common.types.common import LogprobMode, SamplingSemantics

NUM_REQUESTS, GROUP_SIZE, NUM_ROWS, PROMPT_TOKENS = 40, 4, 32, 16
VOCABULARY, MAX_NEW_TOKENS, EOS = 64, 512, 1
MODES = {"refill": (True, True), "waves": (True, False), "whole_waves": (False, False)}
"""What the engine is told of its cache: whether rows may leave it, and whether others may join."""


@dataclass(slots=True, kw_only=True)
class Tally:
    """Repetitions of one mode."""

    rates: list[float] = field(default_factory=list)
    tokens: int = 0
    passes: int = 0
    computed: int = 0
    lengths: list[int] = field(default_factory=list)

    def row(self, mode: str) -> dict[str, Any]:
        """For people and programs."""
        repetitions = len(self.rates)
        return {
            "mode": mode,
            "tokens_per_s": round(statistics.median(self.rates), 1),
            "lowest": round(min(self.rates), 1),
            "highest": round(max(self.rates), 1),
            "tokens": self.tokens // repetitions,
            "passes": self.passes // repetitions,
            "busy_share": round(self.tokens / self.computed, 3),
            "length_mean": round(statistics.mean(self.lengths), 1),
            "length_p90": int(np.percentile(self.lengths, 90)),
            "length_max": max(self.lengths),
        }


def write_model(directory: Path, *, hidden_size: int, num_layers: int) -> Path:
    """A random model whose every token is about as likely as any other."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=hidden_size, intermediate_size=4 * hidden_size, eos_token_id=EOS,
        num_hidden_layers=num_layers, num_attention_heads=4, num_key_value_heads=4, head_dim=hidden_size // 4,
        max_position_embeddings=PROMPT_TOKENS + MAX_NEW_TOKENS, tie_word_embeddings=True,
        initializer_range=0.02,
    )  # fmt: skip
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(directory)
    return directory


def repeat(engine: HfEngine, mode: str, tally: Tally) -> None:
    """All requests once."""
    may_leave, may_join = MODES[mode]
    rng = np.random.default_rng(0)
    with patch(
        "heterorl.common.generation.hf_engine._is_made_of", lambda _, *, sliding: may_leave if sliding else may_join
    ):
        for key in range(NUM_REQUESTS):
            prompt = rng.integers(2, VOCABULARY, PROMPT_TOKENS).astype(np.int32)
            engine.submit(Request(key=key, prompt=prompt, seed=key, num_completions=GROUP_SIZE))
        started = time.perf_counter()
        lengths: list[int] = []
        while ended := engine.collect():
            lengths += [one.completion.token_ids.size for one in ended if isinstance(one, Finished)]
        seconds = time.perf_counter() - started
    assert len(lengths) == NUM_REQUESTS * GROUP_SIZE, "not all completions ended"
    tally.rates.append(sum(lengths) / seconds)
    tally.tokens += sum(lengths)
    tally.lengths += lengths


def measure(engine: HfEngine, *, repetitions: int) -> dict[str, Tally]:
    """A warm-up, then the modes in turns."""
    tallies = {mode: Tally() for mode in MODES}
    current = Tally()

    def count(*hooked: Any) -> None:
        current.passes += 1
        current.computed += len(hooked[-1]["attention_mask"])

    engine.model.register_forward_pre_hook(count, with_kwargs=True)
    repeat(engine, "refill", Tally())
    for number in range(repetitions):
        order = list(MODES)[:: 1 if number % 2 else -1]
        for mode in order:
            current = tallies[mode]
            repeat(engine, mode, current)
    return tallies


def main() -> None:
    """Measure and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--hidden-size", type=int, default=192)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--repetitions", type=int, default=3)
    arguments = parser.parse_args()
    sampling = SamplingSemantics(
        temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=MAX_NEW_TOKENS, logprob_mode=LogprobMode.PROCESSED
    )
    with tempfile.TemporaryDirectory() as name:
        directory = write_model(Path(name), hidden_size=arguments.hidden_size, num_layers=arguments.layers)
        engine = HfEngine(
            model_dir=str(directory), published_dtype="bf16", compute_dtype="fp32", device="cpu", sampling=sampling,
            batch_rows=NUM_ROWS, end_token_ids=(EOS,),
        )  # fmt: skip
        tallies = measure(engine, repetitions=arguments.repetitions)
    modes = [tally.row(mode) for mode, tally in tallies.items()]
    for row in modes:
        print(row)
    rates = {row["mode"]: row["tokens_per_s"] for row in modes}
    document = {
        "processor": "cpu", "cores": os.cpu_count(), "threads": torch.get_num_threads(),
        "load_average": round(os.getloadavg()[0], 1), "python": platform.python_version(), "engine": engine.name,
        "hidden_size": arguments.hidden_size, "layers": arguments.layers, "batch_rows": NUM_ROWS,
        "requests": NUM_REQUESTS, "completions": NUM_REQUESTS * GROUP_SIZE, "max_new_tokens": MAX_NEW_TOKENS,
        "repetitions": arguments.repetitions, "modes": modes,
        "refill_over_waves": round(rates["refill"] / rates["waves"], 2),
        "refill_over_whole_waves": round(rates["refill"] / rates["whole_waves"], 2),
    }  # fmt: skip
    arguments.out.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
