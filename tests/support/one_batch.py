"""Completions of one batch that nothing joins: the plain loop that rows of an HfEngine are held against, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from heterorl.common.generation.hf_engine import HfEngine
from heterorl.common.model.logprobs import draw, gumbel
from heterorl.common.types.common import Int32Array, SamplingSemantics


def one_batch(
    engine: HfEngine, prompts: Sequence[Int32Array], seeds: Sequence[int], num: int, *, sampling: SamplingSemantics
) -> list[tuple[list[int], list[float]]]:
    """Tokens and log-probs of each row; rows that ended leave when half of them have."""
    width = max(prompt.size for prompt in prompts)
    ids = torch.tensor([[0] * (width - prompt.size) + prompt.tolist() for prompt in prompts])
    attention = torch.tensor([[0] * (width - prompt.size) + [1] * prompt.size for prompt in prompts])
    ids, attention = ids.repeat_interleave(num, 0), attention.repeat_interleave(num, 0)
    position = attention.cumsum(1).clamp(min=1) - 1
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    result: list[tuple[list[int], list[float]]] = [([], []) for _ in ids]
    rows, cache = np.arange(len(ids)), None
    is_done = np.zeros(len(ids), bool)
    for _ in range(sampling.max_new_tokens):
        with torch.inference_mode():
            output: Any = engine.model(
                input_ids=ids, attention_mask=attention, position_ids=position, past_key_values=cache, use_cache=True,
                logits_to_keep=1,
            )  # fmt: skip
            cache = output.past_key_values
            noise = torch.cat([gumbel((num, engine.vocab_size), generator) for generator in generators])
            drawn, logprobs = draw(output.logits[:, -1], noise[torch.from_numpy(rows)], sampling)
        for row, token, logprob in zip(rows, drawn.tolist(), logprobs.tolist(), strict=True):
            if not is_done[row]:
                result[row][0].append(token)
                result[row][1].append(logprob)
                is_done[row] = token == 1
        if is_done.all():
            break
        ids, position = drawn[:, None], position[:, -1:] + 1
        attention = torch.cat([attention, attention.new_ones(len(rows), 1)], 1)
        running = np.flatnonzero(~is_done[rows])
        if len(running) <= len(rows) // 2:
            keep = torch.from_numpy(running)
            cache.batch_select_indices(keep)
            ids, attention, position, rows = ids[keep], attention[keep], position[keep], rows[running]
    return result
