"""What the losses need to know of the whole step's learner log-probs before the first gradient is computed.

Guarantees: given log-probs of every sequence, the planned batch makes the loss separable again: its gradient, summed
over micro-batches however they are cut, is that of the loss over the whole step. Nothing here carries gradient.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from heterorl.learner.loss.denominators import expected_learner_log_denominator
from heterorl.learner.loss.masks import within_second_moment
from heterorl.learner.loss.objectives import token_coefficients
from heterorl.learner.loss.policy_loss import LossInputs, policy_loss
from heterorl.learner.loss.rule import Rule
from heterorl.learner.train.batch import Batch, TrainingSequence
from heterorl.learner.train.micro_batch import MicroBatch, collate


def step_coefficients(rule: Rule, mask_BT: torch.Tensor, batch: Batch, *, max_new_tokens: int) -> torch.Tensor:
    """`losses.token_coefficients` with the counts of the whole step."""
    is_power = rule.aggregation == "length_power"
    return token_coefficients(
        mask_BT,
        aggregation=rule.aggregation,
        num_sequences=batch.num_sequences,
        num_tokens=batch.num_tokens,
        max_tokens=max_new_tokens,
        length_power=rule.length_power,
        sum_of_powers=batch.sum_of_powers(rule.length_power) if is_power else 1.0,
    )


def loss_inputs(micro_batch: MicroBatch, learner_BT: torch.Tensor, coefficients_BT: torch.Tensor) -> LossInputs:
    """The tensors of a micro-batch as the loss wants them."""
    return LossInputs(
        learner_BT=learner_BT,
        sampler_BT=micro_batch.sampler_logprobs_BT,
        mask_BT=micro_batch.mask_BT,
        advantages_B=micro_batch.advantages_B,
        centred_rewards_B=micro_batch.centred_rewards_B,
        log_denominators_B=micro_batch.log_denominators_B,
        log_expectations_B=micro_batch.log_expectations_B,
        couplings_B=micro_batch.couplings_B,
        staleness_BT=micro_batch.staleness_BT,
        is_selected_BT=micro_batch.is_selected_BT,
        coefficients_BT=coefficients_BT,
    )


def plan(rule: Rule, batch: Batch, logprobs: Sequence[torch.Tensor], *, max_new_tokens: int) -> Batch:
    """Fill in what couples the rollouts of a step.

    Args:
        rule: the loss.
        batch: the step's sequences.
        logprobs: learner log-probs, one [T] for each sequence in the batch's order.
        max_new_tokens: the run's limit on completion tokens.
    """
    logprobs = [values.detach().to("cpu", torch.float64) for values in logprobs]
    sequences = list(batch.sequences)
    if rule.m2_budget > 0.0:
        sequences = _select(sequences, logprobs, budget=rule.m2_budget)
    if rule.denominator == "expected_learner":
        sequences = _couple(rule, dataclasses.replace(batch, sequences=tuple(sequences)), logprobs, max_new_tokens)
    return dataclasses.replace(batch, sequences=tuple(sequences))


def _select(
    sequences: list[TrainingSequence], logprobs: Sequence[torch.Tensor], *, budget: float
) -> list[TrainingSequence]:
    sampler = [torch.from_numpy(sequence.sampler_logprobs).double() for sequence in sequences]
    advantages = [
        torch.full_like(values, sequence.advantage) for values, sequence in zip(sampler, sequences, strict=True)
    ]
    is_kept_N = within_second_moment(
        torch.cat(list(logprobs)) - torch.cat(sampler), torch.cat(advantages), budget=budget
    )
    parts = is_kept_N.split([values.numel() for values in sampler])
    return [
        dataclasses.replace(sequence, is_selected=part.numpy()) for sequence, part in zip(sequences, parts, strict=True)
    ]


def _couple(rule: Rule, batch: Batch, logprobs: Sequence[torch.Tensor], max_new_tokens: int) -> list[TrainingSequence]:
    # w_i = p_i / D with D = sum_j q^_j p_j: d log w_i / d log p_j = [i = j] - q^_j p_j / D. With D as a constant the
    # loss gives the first term; the second adds share_j * sum_i c_i w_i A_i over the group's unclipped rollouts.
    members: dict[int, list[int]] = {}
    for position, sequence in enumerate(batch.sequences):
        members.setdefault(sequence.group, []).append(position)
    sequences = list(batch.sequences)
    for positions in members.values():
        learner_G = torch.stack([logprobs[position].mean() for position in positions])
        sampler_G = torch.stack(
            [torch.from_numpy(sequences[position].sampler_logprobs).double().mean() for position in positions]
        )
        log_denominator = float(expected_learner_log_denominator(learner_G, sampler_G))
        for position in positions:
            sequences[position] = dataclasses.replace(sequences[position], log_denominator=log_denominator)
        micro_batch = collate([sequences[position] for position in positions], batching="padded")
        learner_BT = torch.zeros_like(micro_batch.sampler_logprobs_BT).masked_scatter(
            micro_batch.mask_BT, torch.cat([logprobs[position] for position in positions])
        )
        coefficients_BT = step_coefficients(rule, micro_batch.mask_BT, batch, max_new_tokens=max_new_tokens)
        terms = policy_loss(rule, loss_inputs(micro_batch, learner_BT, coefficients_BT))
        slope = -float(terms.contributions_B[~terms.is_clipped].sum())
        shares_G = torch.exp(torch.log_softmax(sampler_G, 0) + learner_G - log_denominator)
        for position, share in zip(positions, shares_G.tolist(), strict=True):
            sequences[position] = dataclasses.replace(sequences[position], coupling=slope * share)
    return sequences
