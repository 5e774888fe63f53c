"""A loss applied to lists of log-probs, without model or step: for tests of values and gradients."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from heterorl.common.types.rollout import Group
from heterorl.learner.loss.loss_config import (
    BnpoConfig,
    CispoConfig,
    CustomLossConfig,
    DapoConfig,
    DecoupledPpoConfig,
    DeltaLConfig,
    DrGrpoConfig,
    DsGspoConfig,
    EqpConfig,
    GepoConfig,
    GepoOneSidedConfig,
    GepoPlusConfig,
    GepoProductConfig,
    GepoWholeConfig,
    GmpoConfig,
    GrpoConfig,
    GspoConfig,
    ImpalaConfig,
    LossConfig,
    M2poConfig,
    MisConfig,
    MoisConfig,
    OpsmConfig,
    ReinforceConfig,
    TisConfig,
    ToprConfig,
)
from heterorl.learner.loss.loss_spec import loss_spec_of
from heterorl.learner.loss.objectives import LossTerms
from heterorl.learner.loss.policy_loss import policy_loss
from heterorl.learner.train.batch import Batch, build_batch, collate
from heterorl.learner.train.step import step_coefficients, with_first_pass
from heterorl.learner.train.step_report import SequenceSample, join, measure
from tests.support.training import group, rollout

OWN_LOSS = Path(__file__).parents[2] / "examples" / "own-loss"
"""Where `gspo:loss` lies, a loss as a user writes one."""
GOLDEN_SAMPLER = [
    [-0.10, -0.70, -0.05, -1.20, -0.30],
    [-0.40, -0.20, -0.90],
    [-0.02, -0.03, -2.50, -0.15],
    [-1.60, -0.80],
]
GOLDEN_LEARNER = [
    [-0.12, -0.50, -0.04, -1.00, -0.25],
    [-0.55, -0.25, -1.10],
    [-0.02, -0.05, -2.00, -0.10],
    [-1.90, -1.00],
]
GOLDEN_REWARDS = [1.0, 0.0, 1.0, 0.0]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Outcome:
    """Loss, its gradient by token for every sequence of the batch, and the terms of every part."""

    value: float
    gradients: list[torch.Tensor]
    terms: list[LossTerms]

    @property
    def row_sums(self) -> list[float]:
        return [float(gradient.sum()) for gradient in self.gradients]


def groups_of(
    sampler: Sequence[Sequence[Sequence[float]]],
    rewards: Sequence[Sequence[float]],
    *,
    version: int = 1,
    first: int = 0,
) -> list[Group]:
    """Groups of rollouts with these sampler log-probs, in double precision so that golden numbers are met."""
    result = []
    for number, (rows, values) in enumerate(zip(sampler, rewards, strict=True), first):
        members = []
        for row, reward in zip(rows, values, strict=True):
            member = rollout([7] * len(row), row, reward, version=version)
            exact: np.ndarray = np.array(row, np.float64)
            members.append(dataclasses.replace(member, sampler_logprobs=exact))
        result.append(group(members, prompt=[1, number + 2], sequence=number + 1, version=version))
    return result


def reference_row(sampler: Sequence[float]) -> list[float]:
    """Log-probs of a reference model that exists for no rollout: the sampler's, up to .3 nats away."""
    return [x - 0.3 * math.cos(2.0 * t) ** 2 for t, x in enumerate(sampler)]


def with_reference(batch: Batch) -> Batch:
    """The same step with `reference_row` in every sequence."""
    return Batch(
        sequences=tuple(
            dataclasses.replace(one, reference_logprobs=np.array(reference_row(one.sampler_logprobs.tolist())))
            for one in batch.sequences
        )
    )


def run_loss(
    config: LossConfig,
    learner: Sequence[Sequence[float] | torch.Tensor],
    groups: Sequence[Group],
    *,
    max_tokens: int = 8,
    parts: Sequence[Sequence[int]] | None = None,
    width: int = 0,
    head_version: int = 0,
    advantages: Sequence[float] | None = None,
) -> Outcome:
    """Value and gradient of the loss over whole groups.

    Args:
        config: the loss, whose KL penalty is left out.
        learner: learner log-probs of the rollouts that have tokens, in the order of the groups.
        groups: what was sampled.
        max_tokens: the run's limit on completion tokens.
        parts: positions of the sequences in each micro-batch; one of all by default.
        width: padding to at least this many tokens.
        head_version: version of the learner.
        advantages: instead of those of the rewards.
    """
    spec = loss_spec_of(config)
    batch = build_batch(groups, loss=config, head_version=head_version)
    if advantages is not None:
        pairs = zip(batch.sequences, advantages, strict=True)
        batch = Batch(sequences=tuple(dataclasses.replace(one, advantage=value) for one, value in pairs))
    if spec.needs_reference:
        batch = with_reference(batch)
    logprobs = [torch.as_tensor(row, dtype=torch.float64) for row in learner]
    if spec.needs_first_pass:
        batch = with_first_pass(spec, batch, logprobs, max_new_tokens=max_tokens)
    value, terms = 0.0, []
    gradients = [torch.zeros(0)] * len(logprobs)
    for part in parts or [range(len(batch.sequences))]:
        inputs = collate([batch.sequences[position] for position in part], batching="padded").loss_inputs
        extra = max(0, width - inputs.mask_BT.shape[1])
        inputs = dataclasses.replace(
            inputs,
            **{
                name: torch.nn.functional.pad(getattr(inputs, name), (0, extra))
                for name in ("mask_BT", "sampler_BT", "staleness_BT", "turns_BT", "is_selected_BT", "reference_BT")
                if getattr(inputs, name) is not None
            },
        )
        learner_BT = inputs.padded(torch.cat([logprobs[position] for position in part])).requires_grad_()
        coefficients_BT = step_coefficients(spec, inputs.mask_BT, batch, max_new_tokens=max_tokens)
        one = policy_loss(spec, inputs, learner_BT, coefficients_BT=coefficients_BT, step=batch.whole)
        total = one.contributions_B.sum()
        total.backward()
        assert learner_BT.grad is not None
        value += total.item()
        terms.append(one)
        for row, position in enumerate(part):
            gradients[position] = learner_BT.grad[row, : logprobs[position].numel()]
    return Outcome(value=value, gradients=gradients, terms=terms)


CATALOGUE: dict[str, LossConfig] = {
    "gepo": GepoConfig(),
    "gepo arithmetic": GepoConfig(denominator="arithmetic"),
    "gepo geometric": GepoConfig(denominator="geometric"),
    "gepo raw": GepoConfig(normalisation="raw"),
    "gepo preserving": GepoConfig(clip="preserve"),
    "gepo clipped on gspo": GepoConfig(clip_on="gspo"),
    "gepo with opsm": GepoConfig(opsm_threshold=0.05),
    "gepo with m2po": GepoConfig(m2_budget=0.02),
    "gepo with topr": GepoConfig(positive_weight="one"),
    "gepo with topr within its clip": GepoConfig(positive_weight="one_clipped"),
    "gepo leaving itself out": GepoConfig(denominator="leave_one_out"),
    "gepo with dual clip": GepoConfig(dual_clip=1.3),
    "gepo_1s": GepoOneSidedConfig(),
    "gepo_product": GepoProductConfig(),
    "gepo_whole": GepoWholeConfig(drift_limit=0.1),
    "gepo_plus": GepoPlusConfig(kl_threshold=0.05),
    "eqp": EqpConfig(),
    "eqp with opsm": EqpConfig(opsm_threshold=0.05, aggregation="token_mean"),
    "gspo": GspoConfig(),
    "gspo clipped on gepo": GspoConfig(clip_on="gepo"),
    "gspo without clip": GspoConfig(clip="none"),
    "ds_gspo": DsGspoConfig(defensive_fraction=0.2),
    "gmpo": GmpoConfig(eps_log=0.2),
    "grpo": GrpoConfig(),
    "grpo with dual clip": GrpoConfig(dual_clip=1.3),
    "mois": MoisConfig(mixture_age=1.0, eps_low=0.1, eps_high=0.1),
    "mois differentiated": MoisConfig(mixture_age=1.0, mixture_gradient="full", eps_low=0.05, eps_high=0.05),
    "reinforce": ReinforceConfig(),
    "impala": ImpalaConfig(),
    "impala wider": ImpalaConfig(rho_cap=1.3, c_cap=1.1),
    "dr_grpo": DrGrpoConfig(),
    "dapo": DapoConfig(),
    "dapo dropping": DapoConfig(drop_uniform_groups=True),
    "bnpo": BnpoConfig(),
    "delta_l": DeltaLConfig(length_power=0.75),
    "topr": ToprConfig(),
    "cispo": CispoConfig(),
    "tis": TisConfig(cap=1.1),
    "tis sequence": TisConfig(level="sequence", cap=1.2),
    "mis": MisConfig(cap=1.3, floor=0.5),
    "mis token": MisConfig(level="token", cap=1.3, floor=0.7),
    "mis geometric": MisConfig(level="geometric", cap=1.05, floor=0.9),
    "decoupled_ppo": DecoupledPpoConfig(behaviour_cap=1.1),
    "decoupled_ppo loglinear": DecoupledPpoConfig(proximal="loglinear", behaviour_cap=1.1, eps_high=0.05, eps_low=0.05),
    "m2po": M2poConfig(m2_budget=0.02),
    "opsm": OpsmConfig(opsm_threshold=0.05),
    "custom": CustomLossConfig(function="gspo:loss", directory=str(OWN_LOSS)),
    "custom of the step": CustomLossConfig(function="tests.support.custom_losses:normalised", advantage="mean"),
}
"""Every algorithm, and every part that has no algorithm of its own, with bounds that act on small differences."""


def golden_sample(
    config: LossConfig, parts: Sequence[Sequence[int]] = ((0, 1, 2, 3),), *, rewards: Sequence[float] = GOLDEN_REWARDS
) -> SequenceSample:
    """Measurements of the golden rollouts, in micro-batches of these rows."""
    spec = loss_spec_of(config)
    batch = build_batch(groups_of([GOLDEN_SAMPLER], [rewards]), loss=config)
    samples = []
    for part in parts:
        inputs = collate([batch.sequences[i] for i in part], batching="padded").loss_inputs
        rows = torch.cat([torch.tensor(GOLDEN_LEARNER[i], dtype=torch.float64) for i in part])
        learner = inputs.padded(rows)
        coefficients = step_coefficients(spec, inputs.mask_BT, batch, max_new_tokens=8)
        samples.append(measure(spec, inputs, learner, policy_loss(spec, inputs, learner, coefficients_BT=coefficients)))
    return join(samples)
