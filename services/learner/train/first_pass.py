"""Numbers of a whole step from a pass without gradient.

Guarantees: with them the loss is separable: its gradient, summed over any micro-batches, is that of the loss over the
whole step. Nothing here carries gradient.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from heterorl.learner.loss.custom import LossBatch, batch_of
from heterorl.learner.loss.group import expected_learner_log_denominator
from heterorl.learner.loss.importance import within_second_moment
from heterorl.learner.loss.loss_spec import LossSpec
from heterorl.learner.loss.objectives import token_coefficients
from heterorl.learner.loss.policy_loss import policy_loss
from heterorl.learner.train.batch import Batch
from heterorl.learner.train.micro_batch import collate


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
    """The same step with selections, expectations or the whole batch filled in, as the loss needs them.

    `logprobs` are the learner's, of all tokens in the batch's order, in pieces of any length.
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
    """All rollouts in the order of their rows, which does not depend on how the step is divided."""
    order = sorted(range(len(batch.sequences)), key=lambda position: batch.sequences[position].row)
    inputs = collate([batch.sequences[position] for position in order], batching="padded").loss_inputs
    learner_BT = inputs.padded(torch.cat([logprobs[position] for position in order]))
    coefficients_BT = step_coefficients(spec, inputs.mask_BT, batch, max_new_tokens=max_new_tokens)
    return batch_of(inputs, learner_BT, coefficients_BT=coefficients_BT, max_log_weight=spec.max_log_weight)


def _members(batch: Batch) -> list[list[int]]:
    members: dict[int, list[int]] = {}
    for position, sequence in enumerate(batch.sequences):
        members.setdefault(sequence.group, []).append(position)
    return list(members.values())


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
    for positions in _members(batch):
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
