"""Log-probs of tokens and sampling: hidden states -> logits -> log-probs -> tokens.

Only this module divides logits; `SamplingSemantics.logprob_temperature` is the temperature of a run's log-probs.

Guarantees: `token_logprobs` is log_softmax(hidden @ weight.T / temperature) gathered at the targets, in value and
gradient. Forward and backward hold the logits of one chunk of tokens, never [tokens x vocabulary]; the backward pass
computes them again. Normalised in fp32 or wider. Entropies carry no gradient.

Suffixes: N tokens, H hidden width, V vocabulary, C tokens of one chunk.

Tokens are drawn with Gumbel noise, keyed or from a generator. Keyed noise has equal bits on every machine and for every
batch: it depends only on the group's key, the sample and the position. The key comes from the coordinator's seed and
the prompt, not from the weights, whose version a site chooses. So a site cannot choose among draws, and a learner can
repeat them. Each later turn of an episode has a key of its own, and counts positions from 0.

key = blake2b-128("heterorl-gumbel-2/SEED/PROMPT_INDEX"), little-endian. A token's 128 bits are blake2b-128 of key (16
bytes), sample and position (4 bytes each, little-endian): the key of a Philox4x64-10 stream, whose 32-bit words u, low
half of each output first, become g = -log(-log((u + 0.5) / 2^32)). The token is argmax(logits / temperature + g): the
Gumbel-max trick (Gumbel, 1954; Maddison et al., arXiv 1411.0030). The key of turn t > 0 is half of
blake2b-64("heterorl-turn-2/KEY/t"), little-endian.
"""

import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from heterorl.common.types.common import Float32Array, SamplingSemantics

CHUNK_LOGITS = 16 << 20
"""Logits held at a time on a CPU; 64 MiB in fp32."""
GPU_CHUNK_LOGITS = 64 << 20
"""On a GPU: each chunk reads and writes the embedding's whole gradient once."""


def project(hidden_NH: torch.Tensor, weight_VH: torch.Tensor) -> torch.Tensor:
    """Raw logits [N, V] of hidden states, widened to fp32 or more."""
    logits_NV = hidden_NH @ weight_VH.T
    return logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))


def tempered(logits: torch.Tensor, temperature: float, *, in_place: bool = False) -> torch.Tensor:
    """Logits divided by a temperature; at 1 or `in_place` the same tensor."""
    if temperature == 1.0:
        return logits
    return logits.div_(temperature) if in_place else logits / temperature


def logprobs_of(logits_NV: torch.Tensor, targets_N: torch.Tensor) -> torch.Tensor:
    """Log-prob [N] of each target under tempered logits, normalised over all tokens."""
    return logits_NV.gather(1, targets_N[:, None])[:, 0] - torch.logsumexp(logits_NV, 1)


def token_logprobs(
    hidden_NH: torch.Tensor,
    weight_VH: torch.Tensor,
    targets_N: torch.Tensor,
    *,
    temperature: float,
    chunk_logits: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-prob and entropy at each target, in nats: two tensors [N].

    They are fp32, or float64 for float64 hidden states. Products are computed in the type of `hidden_NH`, under
    autocast in its type. `targets_N` are int64 ids in [0, V). `chunk_logits` are held at a time; None is a default of
    the device.
    """
    assert hidden_NH.dim() == weight_VH.dim() == 2
    assert targets_N.dtype == torch.int64
    assert targets_N.shape == hidden_NH.shape[:1]
    device = hidden_NH.device.type
    if torch.is_autocast_enabled(device) and hidden_NH.dtype is torch.float32:
        # The last norm gives fp32; these products in fp32 took 28 % of a step of 0.5 B weights on an H200.
        hidden_NH = hidden_NH.to(torch.get_autocast_dtype(device))
    chunk_logits = chunk_logits or (GPU_CHUNK_LOGITS if device == "cuda" else CHUNK_LOGITS)
    chunk_tokens = max(1, chunk_logits // weight_VH.shape[0])
    result: tuple[torch.Tensor, torch.Tensor] = _TokenLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden_NH, weight_VH, targets_N, temperature, chunk_tokens
    )
    return result


def _chunks(num_tokens: int, chunk_tokens: int) -> Iterator[slice]:
    return (slice(start, min(start + chunk_tokens, num_tokens)) for start in range(0, num_tokens, chunk_tokens))


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: torch.Tensor,
        weight_VH: torch.Tensor,
        targets_N: torch.Tensor,
        temperature: float,
        chunk_tokens: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        dtype = torch.promote_types(hidden_NH.dtype, torch.float32)
        logprobs_N, entropies_N, lse_N = hidden_NH.new_empty((3, hidden_NH.shape[0]), dtype=dtype).unbind(0)
        with torch.autocast(hidden_NH.device.type, enabled=False):
            weight = weight_VH.to(hidden_NH.dtype)
            for chunk in _chunks(hidden_NH.shape[0], chunk_tokens):
                logits_CV = tempered(project(hidden_NH[chunk], weight), temperature, in_place=True)
                lse_C = torch.logsumexp(logits_CV, 1)
                lse_N[chunk] = lse_C
                logprobs_N[chunk] = logits_CV.gather(1, targets_N[chunk, None])[:, 0] - lse_C
                # H = lse - sum p x; in place, because the chunk's logits are the largest thing held.
                probs_CV = torch.exp(logits_CV - lse_C[:, None])
                entropies_N[chunk] = lse_C - probs_CV.mul_(logits_CV).sum(1)
                del logits_CV, probs_CV
        ctx.save_for_backward(hidden_NH, weight_VH, targets_N, lse_N)
        ctx.temperature = temperature
        ctx.chunk_tokens = chunk_tokens
        ctx.mark_non_differentiable(entropies_N)
        return logprobs_N, entropies_N

    @staticmethod
    def backward(
        ctx: Any, *gradients: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None, None]:
        hidden_NH, weight_VH, targets_N, lse_N = ctx.saved_tensors
        gradient_N = gradients[0] / ctx.temperature
        hidden_gradient_NH = torch.empty_like(hidden_NH) if ctx.needs_input_grad[0] else None
        # In fp32 at least: a sum of many chunks in bf16 loses each addend that is below half a unit of it.
        wide = torch.promote_types(weight_VH.dtype, torch.float32)
        weight_gradient_VH = torch.zeros_like(weight_VH, dtype=wide) if ctx.needs_input_grad[1] else None
        weight = weight_VH.to(hidden_NH.dtype)
        for chunk in _chunks(hidden_NH.shape[0], ctx.chunk_tokens):
            # d logprob / d logit = onehot(target) - softmax
            slope_CV = tempered(project(hidden_NH[chunk], weight), ctx.temperature, in_place=True)
            slope_CV.sub_(lse_N[chunk, None]).exp_()
            slope_CV.mul_(-gradient_N[chunk, None])
            slope_CV.scatter_add_(1, targets_N[chunk, None], gradient_N[chunk, None])
            slope_CV = slope_CV.to(hidden_NH.dtype)
            if hidden_gradient_NH is not None:
                torch.mm(slope_CV, weight, out=hidden_gradient_NH[chunk])
            if weight_gradient_VH is not None:
                weight_gradient_VH += slope_CV.T @ hidden_NH[chunk]
            del slope_CV
        if weight_gradient_VH is not None:
            weight_gradient_VH = weight_gradient_VH.to(weight_VH.dtype)
        return hidden_gradient_NH, weight_gradient_VH, None, None, None


def draw(logits_BV: Tensor, noise_BV: Tensor, sampling: SamplingSemantics) -> tuple[Tensor, Tensor]:
    """Draw a token a row from raw logits and standard Gumbel noise.

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
    """Set tokens that top_k or top_p forbids to -inf, never the likeliest."""
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


def group_key(*, seed: int, prompt_index: int) -> int:
    """128-bit key of a group's noise, from seed and prompt."""
    text = f"heterorl-gumbel-2/{seed}/{prompt_index}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=KEY_BYTES).digest(), "little")


def turn_seed(seed: int, turn: int) -> int:
    """Seed of one turn's draws; turn 0 has the group's own."""
    if turn == 0:
        return seed
    name = f"heterorl-turn-2/{seed}/{turn}"
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") >> 1


def gumbel_noise(key: int, *, sample: int, position: int, vocab_size: int) -> Float32Array:
    """Standard Gumbel noise [V] of a token; `sample`, `position` count from 0."""
    name = key.to_bytes(KEY_BYTES, "little") + sample.to_bytes(4, "little") + position.to_bytes(4, "little")
    words = np.frombuffer(hashlib.blake2b(name, digest_size=KEY_BYTES).digest(), "<u8")
    raw = np.random.Philox(key=words).random_raw((vocab_size + 1) // 2)
    uniform = (raw.astype("<u8").view("<u4")[:vocab_size] + 0.5) / 2.0**32
    return (-np.log(-np.log(uniform))).astype(np.float32)
