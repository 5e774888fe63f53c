"""One optimizer step: the loss of each micro-batch, and the update.

Guarantees: the gradient does not depend on how the batch is split, padded or packed; a loss or gradient that is not
finite leaves weights and optimizer state bit-identical.

Some losses need numbers of the whole step first, from a pass without gradient. With them the loss is separable: its
gradient, summed over any micro-batches, is that over the whole step.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn

from heterorl.learner.loss.custom import LossBatch, batch_of
from heterorl.learner.loss.group import expected_learner_log_denominator, log_denominators, masked_mean
from heterorl.learner.loss.importance import within_second_moment
from heterorl.learner.loss.loss_config import LossConfig
from heterorl.learner.loss.loss_spec import LossSpec, loss_spec_of
from heterorl.learner.loss.objectives import LossInputs, kl_estimates, reference_kl_estimates, token_coefficients
from heterorl.learner.loss.policy_loss import policy_loss
from heterorl.learner.train.backend_config import BackendConfig
from heterorl.learner.train.batch import Batch, MicroBatch, collate
from heterorl.learner.train.step_report import (
    LogRatios,
    MicroBatchSample,
    StepEnd,
    join,
    measure,
    metric_means,
    step_size_factor,
    summed,
)


def apply_gradients(
    parameters: Iterable[nn.Parameter], optimizer: torch.optim.Optimizer, *, loss: float, lr: float, grad_clip: float
) -> tuple[bool, float]:
    """Clip the gradient and step, unless loss or gradient is not finite.

    Clears the gradient. Returns whether the step was taken, and the norm of the gradient before clipping.
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


class StepRecorder:
    """Ends a backend's steps, and keeps what the newest one measured."""

    def __init__(self, config: BackendConfig, loss: LossConfig) -> None:
        self._rate = config.rate
        self._loss = loss
        self._loss_spec = loss_spec_of(loss)
        self._applied_steps = 0
        self.last_sequences = join([])
        self.last_metrics: dict[str, float] = {}
        self.last_log_ratios: LogRatios = {}

    def _end_step(
        self, samples: Sequence[MicroBatchSample], *, step: int, update: Callable[[float, float], tuple[bool, float]]
    ) -> StepEnd:
        """Choose the step size, update the weights, and measure the step.

        It is the same for every backend. `update` takes loss and step size; it returns whether the step was taken, and
        the norm of the gradient. Without samples there is no update. `step` is of the run, from 1.
        """
        sequences = join([sample.sequences for sample in samples])
        rate = self._rate(step=step, applied_steps=self._applied_steps)
        lr = rate * step_size_factor(self._loss_spec, sequences)
        is_applied, grad_norm = update(sum(sample.loss for sample in samples), lr) if samples else (False, 0.0)
        self._applied_steps += is_applied
        self.last_sequences, self.last_metrics = sequences, metric_means(samples)
        return StepEnd(samples=samples, is_applied=is_applied, grad_norm=grad_norm, lr=lr)


def micro_batch_loss(
    spec: LossSpec,
    micro_batch: MicroBatch,
    logprobs_N: torch.Tensor,
    entropies_N: torch.Tensor,
    batch: Batch,
    *,
    max_new_tokens: int,
) -> tuple[torch.Tensor, MicroBatchSample]:
    """One micro-batch's part of the step's loss, and its measurements.

    All averaging constants come from `batch`, the whole step.
    """
    inputs = micro_batch.loss_inputs
    mask_BT, sampler_BT = inputs.mask_BT, inputs.sampler_BT
    learner_BT = inputs.padded(logprobs_N)
    if spec.scope == "microbatch":
        inputs = _with_shared_denominator(spec, inputs)
    coefficients_BT = step_coefficients(spec, mask_BT, batch, max_new_tokens=max_new_tokens)
    terms = policy_loss(spec, inputs, learner_BT, coefficients_BT=coefficients_BT, step=batch.whole)
    total = terms.contributions_B.sum()
    if spec.sampler_kl > 0.0:
        kl_BT = kl_estimates(learner_BT, sampler_BT, mask_BT, max_log_ratio=spec.max_log_weight)
        total = total + spec.sampler_kl * (coefficients_BT * kl_BT).sum()
    if spec.reference_kl > 0.0:
        assert inputs.reference_BT is not None
        distance_BT = reference_kl_estimates(
            learner_BT, inputs.reference_BT, mask_BT, max_log_ratio=spec.max_log_weight
        )
        total = total + spec.reference_kl * (coefficients_BT * distance_BT).sum()
    sample = MicroBatchSample(
        loss=total.item(),
        weights_M=_counted(terms.weights, mask_BT).cpu(),
        is_clipped_M=_counted(terms.is_clipped, mask_BT).cpu(),
        # Not with the loss's cap: rare large terms are most of the estimate.
        kl_B=kl_estimates(learner_BT.detach(), sampler_BT, mask_BT).sum(1).cpu(),
        entropies_N=entropies_N.detach().double().cpu(),
        sequences=measure(spec, inputs, learner_BT, terms),
        log_ratios_N=(learner_BT.detach() - sampler_BT)[mask_BT].float().cpu(),
        places_B=micro_batch.places_B,
        metrics={name: summed(one, mask_BT) for name, one in terms.metrics.items()},
    )
    return total, sample


def _counted(values: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """The values of rollouts, or of tokens without padding."""
    return values[mask_BT if values.dim() == 2 else mask_BT.any(1)]


def _with_shared_denominator(spec: LossSpec, inputs: LossInputs) -> LossInputs:
    # GEPO's published code takes the mean over all rollouts of the pass, of any prompts.
    assert spec.has_group_denominator
    mask_BT, sampler_BT = inputs.mask_BT, inputs.sampler_BT
    log_probs_B = sampler_BT.sum(1) if spec.normalisation == "raw" else masked_mean(sampler_BT, mask_BT)
    return dataclasses.replace(inputs, log_denominators_B=log_denominators(spec, log_probs_B))


def step_coefficients(spec: LossSpec, mask_BT: torch.Tensor, batch: Batch, *, max_new_tokens: int) -> torch.Tensor:
    """`objectives.token_coefficients` with the counts of the whole step."""
    is_power = spec.aggregation == "length_power"
    return token_coefficients(
        mask_BT,
        aggregation=spec.aggregation,
        num_sequences=batch.num_sequences,
        num_tokens=batch.num_tokens,
        max_tokens=max_new_tokens,
        length_power=spec.length_power,
        sum_of_powers=batch.sum_of_powers(spec.length_power) if is_power else 1.0,
    )


def with_first_pass(spec: LossSpec, batch: Batch, logprobs: Sequence[torch.Tensor], *, max_new_tokens: int) -> Batch:
    """The same step with what the loss needs of a first pass.

    That is selections, expectations or the whole batch. `logprobs` are the learner's, of all tokens in the batch's
    order, in pieces of any length.
    """
    lengths = [sequence.num_drawn for sequence in batch.sequences]
    of_sequences = torch.cat(list(logprobs)).detach().to("cpu", torch.float64).split(lengths)
    if spec.m2_budget > 0.0:
        batch = _with_selection(batch, of_sequences, budget=spec.m2_budget)
    if spec.custom is not None and spec.custom.takes_step:
        return dataclasses.replace(batch, whole=_whole(spec, batch, of_sequences, max_new_tokens=max_new_tokens))
    if spec.denominator == "expected_learner":
        batch = _with_expectations(spec, batch, of_sequences, max_new_tokens=max_new_tokens)
    return batch


def _whole(spec: LossSpec, batch: Batch, logprobs: Sequence[torch.Tensor], *, max_new_tokens: int) -> LossBatch:
    """All rollouts by row: the same order however a step is divided."""
    order = sorted(range(len(batch.sequences)), key=lambda position: batch.sequences[position].row)
    inputs = collate([batch.sequences[position] for position in order], batching="padded").loss_inputs
    learner_BT = inputs.padded(torch.cat([logprobs[position] for position in order]))
    coefficients_BT = step_coefficients(spec, inputs.mask_BT, batch, max_new_tokens=max_new_tokens)
    return batch_of(inputs, learner_BT, coefficients_BT=coefficients_BT, max_log_weight=spec.max_log_weight)


def _with_selection(batch: Batch, logprobs: Sequence[torch.Tensor], *, budget: float) -> Batch:
    sampler = [torch.from_numpy(sequence.sampler_logprobs).double() for sequence in batch.sequences]
    advantages = [
        torch.full_like(values, sequence.advantage) for values, sequence in zip(sampler, batch.sequences, strict=True)
    ]
    is_kept_N = within_second_moment(
        torch.cat(list(logprobs)) - torch.cat(sampler), torch.cat(advantages), budget=budget
    )
    parts = is_kept_N.split([values.numel() for values in sampler])
    return Batch(
        sequences=tuple(
            dataclasses.replace(sequence, is_selected=part.numpy())
            for sequence, part in zip(batch.sequences, parts, strict=True)
        )
    )


def _with_expectations(spec: LossSpec, batch: Batch, logprobs: Sequence[torch.Tensor], *, max_new_tokens: int) -> Batch:
    # w_i = p_i / D with D = sum_j q^_j p_j: d log w_i / d log p_j = [i = j] - q^_j p_j / D. With D as a constant the
    # loss gives the first term; the second adds share_j * sum_i c_i w_i A_i over the group's unclipped rollouts.
    sequences = list(batch.sequences)
    members: dict[int, list[int]] = {}
    for position, sequence in enumerate(sequences):
        members.setdefault(sequence.group, []).append(position)
    for positions in members.values():
        learner_G = torch.stack([logprobs[position].mean() for position in positions])
        sampler_G = torch.stack(
            [torch.from_numpy(sequences[position].sampler_logprobs).double().mean() for position in positions]
        )
        log_denominator = float(expected_learner_log_denominator(learner_G, sampler_G))
        for position in positions:
            sequences[position] = dataclasses.replace(sequences[position], log_denominator=log_denominator)
        inputs = collate([sequences[position] for position in positions], batching="padded").loss_inputs
        learner_BT = inputs.padded(torch.cat([logprobs[position] for position in positions]))
        coefficients_BT = step_coefficients(spec, inputs.mask_BT, batch, max_new_tokens=max_new_tokens)
        terms = policy_loss(spec, inputs, learner_BT, coefficients_BT=coefficients_BT)
        slope = -float(terms.contributions_B[~terms.is_clipped].sum())
        shares_G = torch.exp(torch.log_softmax(sampler_G, 0) + learner_G - log_denominator)
        for position, share in zip(positions, shares_G.tolist(), strict=True):
            sequences[position] = dataclasses.replace(sequences[position], coupling=slope * share)
    return Batch(sequences=tuple(sequences))
