"""Statistics of a step's completions without lost members; pure, in float64.

Guarantees: the same numbers for any order of groups and rollouts; finite for every group that may be trained on.
"""

import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from heterorl.common.types.common import (
    MAX_REPORTED_PARTS,
    MAX_REPORTED_SITES,
    CompletionNumbers,
    PartMean,
    SiteTokens,
    SourceReport,
)
from heterorl.common.types.rollout import FinishReason, Group, QueuedGroup, Rollout, turn_numbers


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


def has_signal(group: Group) -> bool:
    """Whether the group's rewards differ."""
    return len({rollout.reward for rollout in group.trainable}) > 1


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
