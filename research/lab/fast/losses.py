"""The learner's own loss on the rollouts of many runs.

Losses are separable over rollouts, so runs of one rule are one call with their rollouts one after another, and each
run's coefficients. A rule that couples the rollouts of a step, or that needs more than is laid out here, takes the way
of the learner for each run: whole groups, `build_batch`, `couple`, `micro_batch_loss`.

Suffixes: R runs, G groups, M members, B = G x M rollouts of a run, or of several one after another; T tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields

import numpy as np
import torch
from torch import Tensor

from heterorl.learner.loss.group import beta_weights, group_advantages
from heterorl.learner.loss.loss_config import LossConfig
from heterorl.learner.loss.loss_spec import LossSpec, loss_spec_of
from heterorl.learner.loss.objectives import LossInputs, kl_estimates, token_coefficients
from heterorl.learner.loss.policy_loss import policy_loss
from heterorl.learner.train.batch import build_batch, collate
from heterorl.learner.train.step import micro_batch_loss, with_first_pass
from heterorl.learner.train.step_report import MicroBatchSample, SequenceSample, measure
from heterorl_research.lab.fast.rollouts import Rollouts

_LAID_OUT = frozenset(
    {
        "level", "denominator", "normalisation", "kl_threshold", "defensive_fraction", "proximal", "behaviour_cap",
        "clip", "low", "high", "clip_on", "positive_weight", "advantage", "aggregation", "length_power",
        "opsm_threshold", "drift_limit", "sampler_kl", "max_log_weight", "step_size", "dual_clip", "trace_cap",
        "negative_weight", "mixture_slope", "mixture_age", "mixture_gradient",
    }
)  # fmt: skip
"""Parts of a rule that what is laid out here has all inputs for; a rule that sets another part is taken apart."""
_INPUTS = frozenset(
    {
        "sampler_BT", "mask_BT", "advantages_B", "centred_rewards_B", "log_denominators_B", "log_expectations_B",
        "couplings_B", "staleness_BT", "is_selected_BT",
    }
)  # fmt: skip
_DENOMINATORS = ("own", "contraharmonic", "arithmetic", "geometric")
_ADVANTAGES = ("mean", "mean_std", "beta")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Step:
    """What the runs of a batch train on in one step; on the device, float64 but for masks and token ids.

    `log_probs_RGM` are by normalisation: the means and the sums of the sampler's token log-probs of each rollout.
    """

    rollouts: list[Rollouts]
    head_version: int
    tokens_RGMT: Tensor
    mask_RBT: Tensor
    sampler_RBT: Tensor
    rewards_RGM: Tensor
    centred_RGM: Tensor
    log_probs_RGM: dict[str, Tensor]
    num_tokens: list[int]


def is_separable(spec: LossSpec) -> bool:
    """Whether runs of the rule may be one call."""
    others = [field for field in fields(LossSpec) if field.name not in _LAID_OUT]
    return (
        {field.name for field in fields(LossInputs) if field.default is MISSING} == _INPUTS
        and not (spec.needs_first_pass or spec.needs_reference)
        and spec.denominator in _DENOMINATORS
        and spec.advantage in _ADVANTAGES
        and all(field.default is not MISSING and getattr(spec, field.name) == field.default for field in others)
    )


def gather_step(rollouts: list[Rollouts], *, head_version: int, device: torch.device) -> Step:
    """Put the runs' rollouts together."""
    drawn = [one.drawn for one in rollouts]
    lengths = np.stack([one.lengths_RGM for one in drawn])
    tokens = np.stack([one.tokens_RGMT for one in drawn])
    mask = np.arange(tokens.shape[-1]) < lengths[..., None]
    sampler = np.stack([one.logprobs_RGMT for one in drawn]).astype(np.float64) * mask
    rewards = torch.from_numpy(np.stack([one.rewards_GM for one in rollouts])).to(device)
    sums = sampler.sum(-1)
    return Step(
        rollouts=rollouts,
        head_version=head_version,
        tokens_RGMT=torch.from_numpy(tokens).to(device),
        mask_RBT=torch.from_numpy(mask).flatten(1, 2).to(device),
        sampler_RBT=torch.from_numpy(sampler).flatten(1, 2).to(device),
        rewards_RGM=rewards,
        centred_RGM=_advantages(rewards, kind="mean"),
        log_probs_RGM={"raw": torch.from_numpy(sums).to(device), "length": torch.from_numpy(sums / lengths).to(device)},
        num_tokens=lengths.sum((1, 2)).tolist(),
    )


def losses(
    configs: Sequence[LossConfig], step: Step, learner_RBT: Tensor, entropies_RBT: Tensor
) -> tuple[Tensor, list[MicroBatchSample]]:
    """The sum of the runs' losses, whose gradient is each run's own, and what was measured of each run.

    Args:
        configs: of the runs.
        step: their rollouts.
        learner_RBT: log p under the runs' weights, with gradient.
        entropies_RBT: of the distributions that tokens were drawn from.
    """
    specs = [loss_spec_of(config) for config in configs]
    members: dict[LossSpec, list[int]] = {}
    for number, spec in enumerate(specs):
        members.setdefault(spec, []).append(number)
    total = learner_RBT.new_zeros((), dtype=torch.float64)
    samples: dict[int, MicroBatchSample] = {}
    for spec, numbers in members.items():
        if is_separable(spec):
            part, measured = _together(spec, numbers, step, learner_RBT, entropies_RBT)
            total = total + part
            samples |= dict(zip(numbers, measured, strict=True))
            continue
        for number in numbers:
            part, samples[number] = _apart(configs[number], number, step, learner_RBT, entropies_RBT)
            total = total + part
    return total, [samples[number] for number in range(len(specs))]


def _together(
    spec: LossSpec, numbers: list[int], step: Step, learner_RBT: Tensor, entropies_RBT: Tensor
) -> tuple[Tensor, list[MicroBatchSample]]:
    inputs = _inputs(spec, numbers, step)
    num_rollouts, num_tokens = step.mask_RBT.shape[1:]
    learner_BT = torch.where(inputs.mask_BT, learner_RBT[numbers].flatten(0, 1).double(), 0.0)
    coefficients_BT = torch.cat(
        [
            token_coefficients(
                step.mask_RBT[number],
                aggregation=spec.aggregation,
                num_sequences=num_rollouts,
                num_tokens=step.num_tokens[number],
                max_tokens=num_tokens,
                length_power=spec.length_power,
                sum_of_powers=_sum_of_powers(spec, step.mask_RBT[number]),
            )
            for number in numbers
        ]
    )
    terms = policy_loss(spec, inputs, learner_BT, coefficients_BT=coefficients_BT)
    losses_B = terms.contributions_B
    if spec.sampler_kl > 0.0:
        kl_BT = kl_estimates(learner_BT, inputs.sampler_BT, inputs.mask_BT, max_log_ratio=spec.max_log_weight)
        losses_B = losses_B + spec.sampler_kl * (coefficients_BT * kl_BT).sum(1)
    totals = losses_B.view(len(numbers), -1).sum(1)
    found: list[float] = totals.tolist()
    sequences = measure(spec, inputs, learner_BT, terms)
    kl_B = kl_estimates(learner_BT.detach(), inputs.sampler_BT, inputs.mask_BT).sum(1).cpu()
    weights, is_clipped = terms.weights.cpu(), terms.is_clipped.cpu()
    mask_BT = inputs.mask_BT.cpu()
    is_counted, clippable = (mask_BT if one.dim() == 2 else mask_BT.any(1) for one in (weights, is_clipped))
    entropies_BT = entropies_RBT[numbers].flatten(0, 1).double().cpu()
    samples = []
    for place, loss in enumerate(found):
        rows = slice(place * num_rollouts, (place + 1) * num_rollouts)
        samples.append(
            MicroBatchSample(
                loss=loss,
                weights_M=weights[rows][is_counted[rows]],
                is_clipped_M=is_clipped[rows][clippable[rows]],
                kl_B=kl_B[rows],
                entropies_N=entropies_BT[rows][mask_BT[rows]],
                sequences=SequenceSample(
                    **{field.name: getattr(sequences, field.name)[rows] for field in fields(SequenceSample)}
                ),
            )
        )
    return totals.sum(), samples


def _inputs(spec: LossSpec, numbers: list[int], step: Step) -> LossInputs:
    mask_BT = step.mask_RBT[numbers].flatten(0, 1)
    staleness_BT = torch.zeros(mask_BT.shape, dtype=torch.float64, device=mask_BT.device)
    if spec.needs_staleness:
        ages = [max(step.head_version - step.rollouts[number].version, 0) for number in numbers]
        staleness_BT = mask_BT.view(len(numbers), -1) * torch.tensor(ages, device=mask_BT.device).double()[:, None]
        staleness_BT = staleness_BT.view(mask_BT.shape)
    advantages = step.centred_RGM[numbers]
    if spec.advantage == "mean_std":
        advantages = _advantages(step.rewards_RGM[numbers], kind="mean_std")
    if spec.advantage == "beta":
        advantages = advantages * torch.stack([_scales(step, number) for number in numbers])[..., None]
    means_RGM = step.log_probs_RGM["length"][numbers]
    return LossInputs(
        sampler_BT=step.sampler_RBT[numbers].flatten(0, 1),
        mask_BT=mask_BT,
        advantages_B=advantages.flatten(),
        centred_rewards_B=step.centred_RGM[numbers].flatten(),
        log_denominators_B=_log_means(step.log_probs_RGM[spec.normalisation][numbers], kind=spec.denominator).flatten(),
        log_expectations_B=_log_means(means_RGM, kind="contraharmonic").flatten(),
        couplings_B=torch.zeros_like(means_RGM).flatten(),
        staleness_BT=staleness_BT,
        is_selected_BT=mask_BT,
    )


def _advantages(rewards_RGM: Tensor, *, kind: str) -> Tensor:
    """`group_advantages` of every group."""
    rows = rewards_RGM.flatten(0, 1)
    of_group = torch.vmap(lambda rewards_G: group_advantages(rewards_G, kind=kind))  # type: ignore[arg-type]
    result: Tensor = of_group(rows)
    return result.view(rewards_RGM.shape)


def _scales(step: Step, number: int) -> Tensor:
    """BNPO's weight [G] of each prompt of a run; groups of one prompt are pooled."""
    work = step.rollouts[number].work
    places: dict[bytes, int] = {}
    owners = [places.setdefault(row.tobytes(), len(places)) for row in work.tokens_GP]
    owner_G = torch.tensor(owners, device=step.rewards_RGM.device)
    means_P = torch.stack([step.rewards_RGM[number][owner_G == place].mean() for place in range(len(places))])
    return beta_weights(means_P)[owner_G]


def _log_means(log_probs_RGM: Tensor, *, kind: str) -> Tensor:
    """`denominators.log_denominators` of every group."""
    if kind == "own":
        return log_probs_RGM
    if kind == "geometric":
        return log_probs_RGM.mean(-1, keepdim=True).expand_as(log_probs_RGM)
    log_sum = torch.logsumexp(log_probs_RGM, -1, keepdim=True)
    if kind == "arithmetic":
        return (log_sum - float(np.log(log_probs_RGM.shape[-1]))).expand_as(log_probs_RGM)
    return (torch.logsumexp(2.0 * log_probs_RGM, -1, keepdim=True) - log_sum).expand_as(log_probs_RGM)


def _sum_of_powers(spec: LossSpec, mask_BT: Tensor) -> float:
    return float(mask_BT.sum(1).double().pow(-spec.length_power).sum()) if spec.aggregation == "length_power" else 1.0


def _apart(
    config: LossConfig, number: int, step: Step, learner_RBT: Tensor, entropies_RBT: Tensor
) -> tuple[Tensor, MicroBatchSample]:
    spec, max_new_tokens = loss_spec_of(config), step.mask_RBT.shape[2]
    batch = build_batch(step.rollouts[number].as_groups(), loss=config, head_version=step.head_version)
    if not batch.sequences:
        raise RuntimeError("no group of a step has rewards that differ, and the loss leaves out the others")
    kept = sorted({sequence.group for sequence in batch.sequences})
    group_size = step.rewards_RGM.shape[2]
    rows = [group * group_size + member for group in kept for member in range(group_size)]
    is_token = step.mask_RBT[number][rows]
    logprobs_N, entropies_N = learner_RBT[number][rows][is_token], entropies_RBT[number][rows][is_token]
    if spec.needs_first_pass:
        known = with_first_pass(spec, batch, [logprobs_N.detach()], max_new_tokens=max_new_tokens)
        batch = known.with_whole(known, learner_RBT.device)
    micro_batch = collate(batch.sequences, batching="padded").to(learner_RBT.device)
    return micro_batch_loss(spec, micro_batch, logprobs_N, entropies_N, batch, max_new_tokens=max_new_tokens)
