"""Drawing tokens from logits, and the noise that decides them: of a group's generator, or named by a key.

Guarantees of named noise: the same bits on every machine and for every batch; the noise of a token depends on its
group's key, its place in the group and its position alone. The key comes from the seed that the coordinator assigned,
the state root of the weights and the prompt, so a site that follows it has nothing to choose among, and a learner can
repeat a draw.

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
    """Draw one token a row by the Gumbel-max trick, so that a row depends on its own noise alone.

    Truncation (top_p, top_k) limits what can be drawn; log-probs are never renormalised over it.

    Args:
        logits_BV: raw logits, [B, V].
        noise_BV: standard Gumbel noise, [B, V].
        sampling: temperature, truncation, and what a log-prob means.

    Returns:
        (token ids int64 [B], log-probs float32 [B]).
    """
    logits = logits_BV.float()
    scaled = tempered(logits, sampling.temperature)
    tokens = (truncated(scaled, sampling) + noise_BV).argmax(1)
    shown = scaled if sampling.logprob_temperature == sampling.temperature else logits
    logprobs = logprobs_of(shown, tokens)
    # Rounding may leave a certain token at +1e-8; a log-prob is never positive.
    return tokens, logprobs.clamp(max=0.0)


def truncated(scaled_BV: Tensor, sampling: SamplingSemantics) -> Tensor:
    """Put -inf where top_k or top_p forbids a token; the most likely token always stays."""
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
    """Standard Gumbel noise from a group's own generator, on the generator's device."""
    # The smallest positive float keeps log(-log(u)) finite at u = 0.
    uniform = torch.rand(shape, generator=generator, device=generator.device).clamp(min=1e-30)
    return -torch.log((-torch.log(uniform)).clamp(min=1e-30))


KEY_BYTES = 16


def group_key(*, seed: int, state_root: str, prompt_index: int) -> int:
    """Key of a group's noise, 128 bits, from the seed of its assignment and the weights that it is generated with."""
    text = f"heterorl-gumbel-1/{seed}/{state_root}/{prompt_index}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=KEY_BYTES).digest(), "little")


def gumbel_noise(key: int, *, sample: int, position: int, vocab_size: int) -> Float32Array:
    """Standard Gumbel noise [V] of one token; `sample` and `position` count from 0, in the group and the completion."""
    name = key.to_bytes(KEY_BYTES, "little") + sample.to_bytes(4, "little") + position.to_bytes(4, "little")
    words = np.frombuffer(hashlib.blake2b(name, digest_size=KEY_BYTES).digest(), "<u8")
    raw = np.random.Philox(key=words).random_raw((vocab_size + 1) // 2)
    uniform = (raw.astype("<u8").view("<u4")[:vocab_size] + 0.5) / 2.0**32
    return (-np.log(-np.log(uniform))).astype(np.float32)
