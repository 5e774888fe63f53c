"""Drawing tokens from logits: seeded per group, log-probs in the semantics of the contract."""

from __future__ import annotations

import torch
from torch import Tensor

from heterorl.common.model.logprobs import logprobs_of, tempered
from heterorl.common.types.common import SamplingSemantics


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
