"""One optimizer step over micro-batches: forward, loss, backward, then update or leave everything as it was.

Guarantees: the gradient does not depend on how the batch is split, padded or packed; a non-finite loss or gradient
leaves weights and optimizer state bit-identical.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable

import torch
from torch import nn

from services.learner.batch import Batch
from services.learner.loss_config import LossConfig
from services.learner.loss_registry import policy_loss
from services.learner.losses import kl_estimates, token_coefficients
from services.learner.micro_batch import Batching, MicroBatch, collate, split
from services.learner.model import learner_logprobs
from services.learner.statistics import MicroBatchSample


def accumulate_gradients(
    model: nn.Module,
    batch: Batch,
    *,
    loss: LossConfig,
    temperature: float,
    max_new_tokens: int,
    micro_batch_tokens: int,
    batching: Batching,
    autocast_dtype: torch.dtype | None = None,
) -> list[MicroBatchSample]:
    """Add the gradient of the whole batch's loss to `grad`, one micro-batch at a time.

    Args:
        model: causal language model; its parameters receive gradients.
        batch: sequences and, with them, the global denominators.
        loss: the learning rule.
        temperature: what logits are divided by.
        max_new_tokens: the run's limit on completion tokens.
        micro_batch_tokens: budget of one pass, padding included.
        batching: padded or packed.
        autocast_dtype: type of matrix products; None for that of the weights.
    """
    device = next(model.parameters()).device
    samples = []
    for sequences in split(batch.sequences, max_tokens=micro_batch_tokens, batching=batching):
        micro_batch = collate(sequences, batching=batching).to(device)
        context = torch.autocast(device.type, autocast_dtype) if autocast_dtype else contextlib.nullcontext()
        with context:
            logprobs_N, entropies_N = learner_logprobs(model, micro_batch, temperature=temperature)
        coefficients_BT = token_coefficients(
            micro_batch.mask_BT,
            aggregation=loss.aggregation,
            num_sequences=batch.num_sequences,
            num_tokens=batch.num_tokens,
            max_tokens=max_new_tokens,
        )
        total, sample = _loss(micro_batch, logprobs_N, entropies_N, coefficients_BT, loss)
        total.backward()  # type: ignore[no-untyped-call]
        samples.append(sample)
    return samples


def apply_gradients(
    parameters: Iterable[nn.Parameter],
    optimizer: torch.optim.Optimizer,
    *,
    loss: float,
    lr: float,
    grad_clip: float,
) -> tuple[bool, float]:
    """Clip the accumulated gradient and take the step, unless loss or gradient is not finite; clears the gradient.

    Returns:
        Whether the step was taken, and the norm of the gradient before clipping.
    """
    owned = [parameter for parameter in parameters if parameter.grad is not None]
    norm = nn.utils.get_total_norm([parameter.grad for parameter in owned if parameter.grad is not None])
    grad_norm = float(norm)
    is_applied = bool(owned) and math.isfinite(loss) and math.isfinite(grad_norm)
    if is_applied:
        nn.utils.clip_grads_with_norm_(owned, grad_clip, norm)
        for options in optimizer.param_groups:
            options["lr"] = lr
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return is_applied, grad_norm


def learning_rate(*, lr: float, warmup_steps: int, applied_steps: int) -> float:
    """Step size of the next step: lr * min(1, (applied_steps + 1) / warmup_steps)."""
    return lr * min(1.0, (applied_steps + 1) / warmup_steps) if warmup_steps else lr


def _loss(
    micro_batch: MicroBatch,
    logprobs_N: torch.Tensor,
    entropies_N: torch.Tensor,
    coefficients_BT: torch.Tensor,
    loss: LossConfig,
) -> tuple[torch.Tensor, MicroBatchSample]:
    mask_BT = micro_batch.mask_BT
    learner_logprobs_BT = torch.zeros_like(micro_batch.sampler_logprobs_BT).masked_scatter(
        mask_BT, logprobs_N.to(torch.float64)
    )
    terms = policy_loss(
        loss,
        learner_logprobs_BT=learner_logprobs_BT,
        sampler_logprobs_BT=micro_batch.sampler_logprobs_BT,
        log_denominators_B=micro_batch.log_denominators_B,
        mask_BT=mask_BT,
        advantages_B=micro_batch.advantages_B,
        coefficients_BT=coefficients_BT,
    )
    total = terms.contributions_B.sum()
    kl_BT = kl_estimates(learner_logprobs_BT, micro_batch.sampler_logprobs_BT, mask_BT)
    if loss.kl_coefficient > 0.0:
        total = total + loss.kl_coefficient * (coefficients_BT * kl_BT).sum()
    sample = MicroBatchSample(
        loss=total.item(),
        weights_M=terms.weights[terms.is_counted].cpu(),
        is_clipped_M=terms.is_clipped[terms.is_counted].cpu(),
        kl_B=kl_BT.detach().sum(1).cpu(),
        entropies_N=entropies_N.detach().double().cpu(),
    )
    return total, sample
