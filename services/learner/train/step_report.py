"""Measurements of one step, and its report.

Guarantees: the same quantities for every loss; finite whenever the log-probs are; computed from numbers of rollouts and
tokens, so splits do not matter. Numbers of completions are without lost members, in float64, the same for any order of
groups and rollouts. Suffixes: B sequences, T completion tokens, N all completion tokens, M importance weights.
"""

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from fractions import Fraction

import numpy as np
import torch

from heterorl.common.types.common import (
    MAX_REPORTED_PARTS,
    MAX_REPORTED_SITES,
    CompletionNumbers,
    Float32Array,
    PartMean,
    SiteTokens,
    SourceReport,
    StepReport,
)
from heterorl.common.types.rollout import FinishReason, Group, QueuedGroup, Rollout, turn_numbers
from heterorl.learner.loss.group import masked_mean
from heterorl.learner.loss.loss_spec import LossSpec
from heterorl.learner.loss.objectives import LossInputs, LossTerms
from heterorl.learner.train.batch import has_signal

SEQUENCE_RATIO_CAP = 8.0
"""Largest sequence ratio in the effective sample size of losses without weights of rollouts, except `ess_uncapped`."""
_ROUNDING = 1e-9
LogRatios = Mapping[tuple[int, int], Float32Array]
"""log p - log q of each drawn token, nats, by positions of group and rollout in the step."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SequenceSample:
    """Measurements of each rollout of one micro-batch; float64 [B] without gradient.

    `weights_B` are those in the loss, averaged over tokens where a token has its own; the clip counts are of rollouts
    or tokens, as the loss counts, good and bad are A > 0 and A < 0. `trained_B` is the share of a rollout's gradient
    that masks, clip and weight leave, at most 1.
    """

    log_gepo_B: torch.Tensor
    log_gspo_B: torch.Tensor
    log_products_B: torch.Tensor
    advantages_B: torch.Tensor
    centred_rewards_B: torch.Tensor
    weights_B: torch.Tensor
    clipped_B: torch.Tensor
    clippable_B: torch.Tensor
    dropped_B: torch.Tensor
    trained_B: torch.Tensor
    squares_B: torch.Tensor
    lengths_B: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MicroBatchSample:
    """Measurements of one micro-batch; on the CPU, float64, without gradient.

    `weights_M` and `is_clipped_M` are per sequence or token, as the loss counts; `kl_B` is summed over tokens.
    `log_ratios_N` float32 are log p - log q of the tokens, row by row, of the rollouts at `places_B` [B, 2]: group and
    rollout. `metrics` of a custom loss are [2]: sum and count.
    """

    loss: float
    weights_M: torch.Tensor
    is_clipped_M: torch.Tensor
    kl_B: torch.Tensor
    entropies_N: torch.Tensor
    sequences: SequenceSample
    log_ratios_N: torch.Tensor = field(default_factory=lambda: torch.zeros(0))
    places_B: torch.Tensor = field(default_factory=lambda: torch.zeros(0, 2, dtype=torch.int64))
    metrics: dict[str, torch.Tensor] = field(default_factory=dict)


@torch.no_grad()
def measure(spec: LossSpec, inputs: LossInputs, learner_BT: torch.Tensor, terms: LossTerms) -> SequenceSample:
    """Measure one micro-batch; moved to the CPU in one piece."""
    mask_BT = inputs.mask_BT
    ratios_BT = torch.where(mask_BT, learner_BT - inputs.sampler_BT, 0.0)
    means_B = masked_mean(learner_BT, mask_BT)
    lengths_B = mask_BT.sum(1).double()
    is_token = terms.weights.dim() == 2
    weights_B = masked_mean(terms.weights, mask_BT) if is_token else terms.weights
    clipped = terms.is_clipped.double()
    rows = torch.stack(
        [
            means_B - inputs.log_expectations_B,
            ratios_BT.sum(1) / lengths_B.clamp(min=1.0),
            ratios_BT.sum(1),
            inputs.advantages_B,
            inputs.centred_rewards_B,
            weights_B,
            clipped.sum(1) if clipped.dim() == 2 else clipped,
            lengths_B if clipped.dim() == 2 else torch.ones_like(lengths_B),
            (mask_BT & ~terms.is_kept_BT).sum(1).double(),
            _trained(spec, inputs, terms),
            ratios_BT.square().sum(1),
            lengths_B,
        ]
    ).cpu()
    return SequenceSample(**dict(zip((field.name for field in fields(SequenceSample)), rows, strict=True)))


def _trained(spec: LossSpec, inputs: LossInputs, terms: LossTerms) -> torch.Tensor:
    def wide(values: torch.Tensor) -> torch.Tensor:
        return values if values.dim() == 2 else values[:, None]

    shares_BT = terms.is_kept_BT.double() * wide(terms.weights).clamp(max=1.0)
    if spec.clip != "truncate":
        # Of terms that the clip acts on, `preserve` takes the gradient of those at the cap only.
        is_capped = terms.weights.log() >= spec.max_log_weight - _ROUNDING
        is_removed = is_capped if spec.clip == "preserve" else terms.is_clipped
        # A bad rollout's own weight is truncated, and keeps its gradient.
        is_truncated_B = (inputs.advantages_B < 0) & (spec.negative_weight != "own")
        shares_BT = shares_BT.masked_fill(wide(is_removed) & ~is_truncated_B[:, None], 0.0)
    return masked_mean(shares_BT, inputs.mask_BT)


def join(samples: Sequence[SequenceSample]) -> SequenceSample:
    """All rollouts of the step."""
    return SequenceSample(
        **{
            field.name: _concatenate([getattr(sample, field.name) for sample in samples])
            for field in fields(SequenceSample)
        }
    )


def ess_fraction(weights_M: torch.Tensor) -> float:
    """Effective share of the samples, (sum w)^2 / (M sum w^2).
    It is in (0, 1], and 0 without any weight or with one that is not finite."""
    # Scaled first: the squares of weights near e^-400 would all be 0.
    largest = weights_M.max() if weights_M.numel() else torch.zeros(())
    if not 0.0 < largest < math.inf:
        return 0.0
    scaled_M = weights_M / largest
    return float(scaled_M.sum() ** 2 / (scaled_M.numel() * (scaled_M**2).sum()))


def step_size_factor(spec: LossSpec, sample: SequenceSample) -> float:
    """Factor of the learning rate: 1, or VCPO's sqrt(ESS / B).

    Source: arXiv 2602.17616 section 4. ESS is (sum w)^2 / sum w^2 over the B rollouts of the step. Weights are GEPO's
    own where the loss divides by a group's denominator, else the ratios of whole rollouts, prod_t p_t / q_t, capped at
    8. `ess_uncapped` always takes those ratios, capped at e^max_log_weight; VCPO has no cap, and so trusts what
    samplers state.
    """
    if spec.step_size == "constant":
        return 1.0
    if spec.step_size == "ess_uncapped":
        return math.sqrt(ess_fraction(_shifted(sample.log_products_B.clamp(max=spec.max_log_weight))))
    if spec.has_group_denominator:
        return math.sqrt(ess_fraction(sample.weights_B))
    return math.sqrt(ess_fraction(capped_products(sample)))


def summed(values: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """Sum and count [2] over rollouts, or over tokens without padding."""
    counted = values[mask_BT] if values.dim() == 2 else values
    return torch.stack([counted.sum(), counted.new_tensor(float(counted.numel()))]).cpu()


def metric_means(samples: Sequence[MicroBatchSample]) -> dict[str, float]:
    """Step means of a custom loss's metrics, over passes that have them."""
    totals: dict[str, torch.Tensor] = {}
    for sample in samples:
        for name, both in sample.metrics.items():
            totals[name] = totals.get(name, torch.zeros(2, dtype=torch.float64)) + both
    return {name: float(both[0] / both[1]) for name, both in totals.items()}


def mean(values: torch.Tensor) -> float:
    """Arithmetic mean; 0 without values."""
    return float(values.double().mean()) if values.numel() else 0.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepEnd:
    """A step after its update; `lr` is its step size."""

    samples: Sequence[MicroBatchSample]
    is_applied: bool
    grad_norm: float
    lr: float

    def report(self, groups: Sequence[QueuedGroup], *, step: int, head_version: int, step_s: float) -> StepReport:
        """The report of the step.

        `version` is the one it leads to, head_version + 1. `kl` estimates KL(q || p) of whole sequences in nats: mean
        over rollouts of sum_t k3_t (see `objectives.kl_estimates`). `ess_fraction` and `iw_variance` (ddof 0) are of
        the loss's own weights. `entropy` is a mean over tokens; staleness and policy age, on arrival, are over groups.
        """
        weights_M = _concatenate([sample.weights_M for sample in self.samples])
        kl_B = _concatenate([sample.kl_B for sample in self.samples])
        entropies_N = _concatenate([sample.entropies_N for sample in self.samples])
        staleness = [head_version - queued.group.oldest_version for queued in groups]
        rewards = [rollout.reward for queued in groups for rollout in queued.group.trainable]
        return StepReport(
            step=step,
            version=head_version + 1,
            loss=sum(sample.loss for sample in self.samples),
            reward_mean=float(np.mean(rewards)) if rewards else 0.0,
            kl=mean(kl_B),
            ess_fraction=ess_fraction(weights_M),
            iw_variance=float(weights_M.var(correction=0)) if weights_M.numel() else 0.0,
            clip_fraction=mean(_concatenate([sample.is_clipped_M.double() for sample in self.samples])),
            entropy=mean(entropies_N),
            grad_norm=self.grad_norm,
            staleness_mean=float(np.mean(staleness)) if staleness else 0.0,
            staleness_max=max(staleness, default=0),
            policy_age_p50_s=float(np.median([queued.policy_age_s for queued in groups])) if groups else 0.0,
            num_groups=len(groups),
            num_tokens=entropies_N.numel(),
            step_s=step_s,
            is_applied=self.is_applied,
            lr=self.lr,
            mask_share_bad=share_of_bad(join([sample.sequences for sample in self.samples])),
            kl_token_fresh=self._fresh_kl(staleness),
            sources=by_source(groups),
            completions=completion_numbers([queued.group for queued in groups]),
        )

    def _fresh_kl(self, staleness: Sequence[int]) -> float | None:
        """Over all tokens of groups of staleness 0."""
        fresh = torch.tensor([age == 0 for age in staleness], dtype=torch.bool)
        total = num_tokens = 0.0
        for sample in self.samples:
            if len(sample.places_B):
                is_fresh_B = fresh[sample.places_B[:, 0]]
                total += float(sample.kl_B[is_fresh_B].sum())
                num_tokens += float(sample.sequences.lengths_B[is_fresh_B].sum())
        return total / num_tokens if num_tokens else None


def share_of_bad(sequences: SequenceSample) -> float | None:
    """Share of rollouts with negative advantage that train; None without one."""
    bad = sequences.trained_B[sequences.advantages_B < 0]
    return mean(bad) if bad.numel() else None


def capped_products(sample: SequenceSample) -> torch.Tensor:
    """Ratios of whole rollouts up to the cap, times a common factor."""
    return _shifted(sample.log_products_B.clamp(max=math.log(SEQUENCE_RATIO_CAP)))


def _shifted(logs_B: torch.Tensor) -> torch.Tensor:
    # By the largest logarithm, which keeps the share: exp(-20000) would be 0 for every rollout.
    return (logs_B - logs_B.max()).exp() if logs_B.numel() else logs_B


def _concatenate(parts: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64)


def wanted_log_ratios(samples: Iterable[MicroBatchSample], groups: Sequence[QueuedGroup]) -> LogRatios:
    """Log-ratios of groups whose note is wanted and that the loss kept."""
    wanted = {number for number, queued in enumerate(groups) if queued.wants_note}
    found: dict[tuple[int, int], Float32Array] = {}
    if not wanted:
        return found
    for sample in samples:
        lengths = sample.sequences.lengths_B.long().tolist()
        places = sample.places_B.tolist()
        if len(places) != len(lengths):
            continue
        for (group, rollout), ratios in zip(places, sample.log_ratios_N.split(lengths), strict=True):
            if group in wanted:
                # A copy: a view would keep all tokens of the micro-batch.
                found[group, rollout] = ratios.numpy().copy()
    return found


def completion_numbers(groups: Sequence[Group]) -> CompletionNumbers | None:
    """Statistics of a step's completions; None where there are none.

    Percentiles are interpolated linearly. A part that a completion names several times counts with its sum.
    """
    rollouts = [rollout for group in groups for rollout in group.trainable]
    if not rollouts:
        return None
    lengths_B = np.array([rollout.num_drawn for rollout in rollouts], np.float64)
    is_high_B = _above_mean([rollout.reward for rollout in rollouts])
    turns = [max(turn_numbers(rollout.spans), default=-1) + 1 for rollout in rollouts]
    endings = Counter(rollout.finish_reason.value for rollout in rollouts)
    is_cut = [rollout.finish_reason is FinishReason.LENGTH for rollout in rollouts]
    # Stale spans are the policy's.
    given = [span for each in rollouts for span in each.spans if not (span.is_drawn or span.is_stale)]
    return CompletionNumbers(
        length_mean=float(lengths_B.mean()),
        length_p95=float(np.percentile(lengths_B, 95)),
        length_max=int(lengths_B.max()),
        length_high_reward=_mean(lengths_B[is_high_B]),
        length_low_reward=_mean(lengths_B[~is_high_B]),
        truncated_fraction=sum(is_cut) / len(rollouts),
        uniform_fraction=sum(not has_signal(group) for group in groups) / len(groups),
        reward_parts=_reward_parts(rollouts),
        sites=_sites(groups),
        turns_mean=statistics.fmean(turns),
        turns_max=max(turns),
        given_mean=sum(span.end - span.start for span in given) / len(rollouts),
        endings=tuple(PartMean(name=name, mean=count / len(rollouts)) for name, count in endings.most_common()),
    )


def _above_mean(rewards: Sequence[float]) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Which rewards are above the exact mean; a rounded one may differ."""
    total = sum((Fraction(reward) * times for reward, times in Counter(rewards).items()), Fraction())
    is_above = {reward: Fraction(reward) * len(rewards) > total for reward in set(rewards)}
    return np.array([is_above[reward] for reward in rewards])


def _mean(values: np.ndarray[tuple[int], np.dtype[np.float64]]) -> float | None:
    return float(values.mean()) if values.size else None


def _reward_parts(rollouts: Sequence[Rollout]) -> tuple[PartMean, ...]:
    """Means sorted by name; of too many, the parts of most completions."""
    # By fractions: a sum of huge floats may overflow.
    values: defaultdict[str, list[float]] = defaultdict(list)
    for rollout in rollouts:
        sums: defaultdict[str, float] = defaultdict(float)
        for part in rollout.reward_parts:
            sums[part.name] += part.value
        for name, value in sums.items():
            values[name].append(value)
    kept = sorted(values, key=lambda name: (-len(values[name]), name))[:MAX_REPORTED_PARTS]
    return tuple(PartMean(name=name, mean=statistics.mean(values[name])) for name in sorted(kept))


def _sites(groups: Sequence[Group]) -> tuple[SiteTokens, ...]:
    """Groups and tokens by site; of too many, the largest by tokens."""
    num_groups = Counter(str(group.id.site) for group in groups)
    num_tokens: Counter[str] = Counter()
    for group in groups:
        num_tokens[group.id.site] += sum(rollout.num_drawn for rollout in group.trainable)
    kept = sorted(num_tokens, key=lambda site: (-num_tokens[site], site))[:MAX_REPORTED_SITES]
    return tuple(
        SiteTokens(site=site, num_groups=num_groups[site], num_tokens=num_tokens[site]) for site in sorted(kept)
    )


def by_source(groups: Sequence[QueuedGroup]) -> tuple[SourceReport, ...]:
    """A report for each source of a mixture with a trained group."""
    rewards: dict[str, list[float]] = defaultdict(list)
    num_groups: Counter[str] = Counter()
    for queued in groups:
        if queued.source:
            rewards[queued.source] += [rollout.reward for rollout in queued.group.trainable]
            num_groups[queued.source] += 1
    return tuple(
        SourceReport(label=label, num_groups=num_groups[label], reward_mean=statistics.mean(found) if found else 0.0)
        for label, found in sorted(rewards.items())
    )
