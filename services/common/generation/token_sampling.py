"""Sampling of tokens from logits with Gumbel noise, keyed or from a generator.

Keyed noise has equal bits on every machine and for every batch: it depends only on the group's key, the sample and the
position. The key comes from the coordinator's seed, the state root of the weights and the prompt. So a site cannot
choose among draws, and a learner can repeat them.

key = blake2b-128("heterorl-gumbel-1/SEED/STATE_ROOT/PROMPT_INDEX"), little-endian. A token's 128 bits are blake2b-128
of key (16 bytes), sample and position (4 bytes each, little-endian): the key of a Philox4x64-10 stream, whose 32-bit
words u, low half of each output first, become g = -log(-log((u + 0.5) / 2^32)). The token is
argmax(logits / temperature + g): the Gumbel-max trick (Gumbel, 1954; Maddison et al., arXiv 1411.0030).
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from torch import Tensor

from heterorl.common.model.logprobs import logprobs_of, tempered
from heterorl.common.types.common import Float32Array, SamplingSemantics


def draw(logits_BV: Tensor, noise_BV: Tensor, sampling: SamplingSemantics) -> tuple[Tensor, Tensor]:
    """Draw one token a row from raw logits and standard Gumbel noise, by the Gumbel-max trick.

    Truncation (top_p, top_k) limits the drawn tokens; log-probs are never renormalised over it. Returns token ids int64
    [B] and log-probs float32 [B].
    """
    logits = logits_BV.float()
    scaled = tempered(logits, sampling.temperature)
    tokens = (truncated(scaled, sampling) + noise_BV).argmax(1)
    shown = scaled if sampling.logprob_temperature == sampling.temperature else logits
    logprobs = logprobs_of(shown, tokens)
    # Rounding may give a certain token +1e-8.
    return tokens, logprobs.clamp(max=0.0)


def truncated(scaled_BV: Tensor, sampling: SamplingSemantics) -> Tensor:
    """Set tokens that top_k or top_p forbids to -inf; the most likely token stays."""
    result = scaled_BV
    if sampling.top_k:
        kth = result.topk(min(sampling.top_k, result.shape[1]), dim=1).values[:, -1:]
        result = result.masked_fill(result < kth, -torch.inf)
    if sampling.top_p < 1.0:
        ordered, order = result.sort(dim=1, descending=True)
        probabilities = ordered.softmax(1)
        before = probabilities.cumsum(1) - probabilities
        forbidden = torch.zeros_like(result, dtype=torch.bool).scatter(1, order, before >= sampling.top_p)
        result = result.masked_fill(forbidden, -torch.inf)
    return result


def gumbel(shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    """Standard Gumbel noise on the generator's device."""
    # The smallest positive float keeps log(-log(u)) finite at u = 0.
    uniform = torch.rand(shape, generator=generator, device=generator.device).clamp(min=1e-30)
    return -torch.log((-torch.log(uniform)).clamp(min=1e-30))


KEY_BYTES = 16


def group_key(*, seed: int, state_root: str, prompt_index: int) -> int:
    """128-bit key of a group's noise, from its assigned seed, weights and prompt."""
    text = f"heterorl-gumbel-1/{seed}/{state_root}/{prompt_index}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=KEY_BYTES).digest(), "little")


def gumbel_noise(key: int, *, sample: int, position: int, vocab_size: int) -> Float32Array:
    """Standard Gumbel noise [V] of a token; `sample` and `position` count from 0 in group and completion."""
    name = key.to_bytes(KEY_BYTES, "little") + sample.to_bytes(4, "little") + position.to_bytes(4, "little")
    words = np.frombuffer(hashlib.blake2b(name, digest_size=KEY_BYTES).digest(), "<u8")
    raw = np.random.Philox(key=words).random_raw((vocab_size + 1) // 2)
    uniform = (raw.astype("<u8").view("<u4")[:vocab_size] + 0.5) / 2.0**32
    return (-np.log(-np.log(uniform))).astype(np.float32)
