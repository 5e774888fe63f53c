"""One optimizer step on whole groups, in micro-batches: forward, loss, backward, clip, update.

Guarantees: the gradient is the same however the batch is cut; a non-finite loss or gradient leaves weights and
optimizer as they were, bit for bit, and is reported.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import torch
from torch import nn

from services.common.types import LogprobMode, QueuedGroup, SamplingSemantics, StepReport
from services.learner.backend_config import TorchBackendConfig
from services.learner.batch import MicroBatch, collate, micro_batches, sequences_of
from services.learner.logprobs import token_logprobs
from services.learner.loss_config import LossConfig
from services.learner.losses import LossInputs, build_loss, kl_penalty
from services.learner.model import hidden_states, output_embedding
from services.learner.statistics import StepStatistics


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    groups: Sequence[QueuedGroup],
    *,
    loss_config: LossConfig,
    config: TorchBackendConfig,
    sampling: SamplingSemantics,
    head_version: int,
    step: int,
) -> StepReport:
    """Take one step; see the module docstring."""
    started = time.perf_counter()
    sequences = sequences_of([queued.group for queued in groups], config=loss_config)
    parameter = next(model.parameters())
    statistics = StepStatistics()
    optimizer.zero_grad(set_to_none=True)
    total = 0.0
    for members in micro_batches(sequences, max_tokens=config.micro_batch_tokens, is_packed=config.packing):
        batch = collate(members, device=parameter.device, dtype=parameter.dtype, is_packed=config.packing)
        loss = _loss(model, batch, loss_config=loss_config, config=config, sampling=sampling, statistics=statistics)
        # The number of sequences of the whole step, so that micro-batches add up to the same mean.
        loss = loss / len(sequences)
        loss.backward()  # type: ignore[no-untyped-call]
        total += loss.item()
    norm = float(nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.max_grad_norm))
    is_applied = bool(sequences) and math.isfinite(total) and math.isfinite(norm)
    if is_applied:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, config=config)
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return statistics.report(
        step=step,
        head_version=head_version,
        loss=total,
        grad_norm=norm,
        step_s=time.perf_counter() - started,
        is_applied=is_applied,
        groups=groups,
    )


def learning_rate(step: int, *, config: TorchBackendConfig) -> float:
    """Constant after a linear warm-up; `step` counts from 1."""
    options = config.optimizer
    return options.learning_rate * min(1.0, step / options.warmup_steps if options.warmup_steps else 1.0)


def _loss(
    model: nn.Module,
    batch: MicroBatch,
    *,
    loss_config: LossConfig,
    config: TorchBackendConfig,
    sampling: SamplingSemantics,
    statistics: StepStatistics,
) -> torch.Tensor:
    """Sum of the loss over the micro-batch's sequences."""
    device_type = batch.input_ids_RS.device.type
    with torch.autocast(device_type, dtype=torch.bfloat16, enabled=config.compute_dtype == "bf16"):
        hidden = hidden_states(
            model,
            input_ids_RS=batch.input_ids_RS,
            position_ids_RS=batch.position_ids_RS,
            attention=batch.attention,
        )
    flat = hidden.reshape(-1, hidden.shape[-1])
    is_token = batch.mask_BT > 0
    logprobs_N, entropy_N = token_logprobs(
        flat[batch.sources_BT[is_token]].to(output_embedding(model).dtype),
        output_embedding(model),
        batch.targets_BT[is_token],
        temperature=sampling.temperature if sampling.logprob_mode is LogprobMode.PROCESSED else 1.0,
    )
    learner_logprobs = torch.zeros_like(batch.mask_BT).masked_scatter(is_token, logprobs_N.to(batch.mask_BT.dtype))
    entropy = torch.zeros_like(batch.mask_BT).masked_scatter(is_token, entropy_N.to(batch.mask_BT.dtype))
    outputs = build_loss(loss_config)(
        LossInputs(
            learner_logprobs_BT=learner_logprobs,
            sampler_logprobs_BT=batch.sampler_logprobs_BT,
            mask_BT=batch.mask_BT,
            advantages_B=batch.advantages_B,
            log_expectation_B=batch.log_expectation_B,
        )
    )
    loss = outputs.loss
    if loss_config.kl_coefficient:
        loss = loss + loss_config.kl_coefficient * kl_penalty(
            learner_logprobs, batch.sampler_logprobs_BT, batch.mask_BT
        )
    statistics.add(
        weights=outputs.weights,
        is_clipped=outputs.is_clipped,
        learner_logprobs_BT=learner_logprobs,
        sampler_logprobs_BT=batch.sampler_logprobs_BT,
        entropy_BT=entropy,
        mask_BT=batch.mask_BT,
    )
    return loss
