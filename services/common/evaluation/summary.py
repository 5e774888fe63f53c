"""Statistics of scores: avg@n, pass@k, intervals over prompts, table rows. Pure.

Intervals are over prompts, since completions of one prompt are alike (Miller, 2024, arXiv 2411.00640, "clustered
standard errors"). Student's t-intervals and Wilson's interval of a share need no statistics package; a single value has
no interval.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

from heterorl.common.types.evaluation import (
    Estimate,
    Evaluation,
    EvaluationState,
    EvaluationSummary,
    PassEstimate,
    PromptResult,
)

LARGE_DF = 1000
"""Degrees of freedom from which Student's t is expanded about the normal distribution."""


def standard_error(values: Sequence[float]) -> float:
    """s / sqrt(n), s^2 = sum (x - mean)^2 / (n - 1); n > 1."""
    center = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((value - center) ** 2 for value in values) / (len(values) - 1) / len(values))


def t_central(t: float, *, df: int) -> float:
    """P(|T| <= t) of Student's t, `df` >= 1 (Abramowitz and Stegun, 26.7.3-4)."""
    theta = math.atan(t / math.sqrt(df))
    sine, square = math.sin(theta), math.cos(theta) ** 2
    term = total = math.cos(theta) if df % 2 else 1.0
    for k in range(3 if df % 2 else 2, df - 1, 2):
        term *= (k - 1) / k * square
        total += term
    if df % 2 == 0:
        return min(1.0, sine * total)
    return min(1.0, 2 / math.pi * (theta + (sine * total if df > 1 else 0.0)))


@lru_cache(maxsize=4096)
def t_quantile(confidence: float, *, df: int) -> float:
    """The t with P(|T| <= t) = confidence, by bisection to the last bit.

    Beyond `LARGE_DF` by two terms of the expansion about the normal quantile (Abramowitz and Stegun, 26.7.5).
    """
    if df > LARGE_DF:
        z = NormalDist().inv_cdf((1.0 + confidence) / 2.0)
        return z + (z**3 + z) / 4.0 / df + (5 * z**5 + 16 * z**3 + 3 * z) / 96.0 / df**2
    low, high = 0.0, 1.0
    while t_central(high, df=df) < confidence:
        high *= 2
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if t_central(middle, df=df) < confidence else (low, middle)
    return high


def wilson(num: int, of: int, *, confidence: float = 0.95) -> tuple[float, float]:
    """Wilson's interval of num / of: all p with |num/of - p| <= z sd(p)."""
    z = NormalDist().inv_cdf((1.0 + confidence) / 2.0)
    share, weight = num / of, z * z / of
    center = (share + weight / 2.0) / (1.0 + weight)
    half = z * math.sqrt(share * (1.0 - share) / of + weight / (4.0 * of)) / (1.0 + weight)
    return max(0.0, center - half), min(1.0, center + half)


def pass_at(k: int, *, num: int, num_right: int) -> float:
    """Chance that k of `num` completions, without replacement, include a right one.

    1 - C(n - c, k) / C(n, k), the unbiased estimator of pass@k (Chen et al., 2021, arXiv 2107.03374, equation 1). It is
    computed as the product of 1 - k / i for i from n - c + 1 to n.
    """
    if not 1 <= k <= num or not 0 <= num_right <= num:
        raise ValueError(f"pass@{k} of {num} completions, {num_right} of them right")
    if num - num_right < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(num - num_right + 1, num + 1))


def ks_of(num_samples: int) -> tuple[int, ...]:
    """k of pass@k for n completions: 1, 2, 4, ... and n."""
    powers = [1 << bit for bit in range(num_samples.bit_length()) if 1 << bit <= num_samples]
    return tuple(dict.fromkeys([*powers, num_samples])) if num_samples else ()


def estimate(values: Sequence[float]) -> Estimate | None:
    """Mean of one value a prompt with 95 % interval; None without.

    Values that are all 0 or 1 have Wilson's interval, which holds near both ends and for few prompts. Others have
    Student's t over prompts, cut to 0 .. 1 where all values lie there. A single other value has no interval.
    """
    if not values:
        return None
    mean = math.fsum(values) / len(values)
    if all(value in (0.0, 1.0) for value in values):
        low, high = wilson(round(math.fsum(values)), len(values))
        # At 0 or 1 one end is the share itself, up to rounding.
        return Estimate(mean=mean, low=min(low, mean), high=max(high, mean), num_prompts=len(values))
    half = t_quantile(0.95, df=len(values) - 1) * standard_error(values) if len(values) > 1 else 0.0
    least, most = (0.0, 1.0) if all(0.0 <= value <= 1.0 for value in values) else (-math.inf, math.inf)
    return Estimate(mean=mean, low=max(least, mean - half), high=min(most, mean + half), num_prompts=len(values))


def summarize(results: Iterable[PromptResult], *, num_samples: int, pass_reward: float = 1.0) -> EvaluationSummary:
    """Statistics of finished prompts; a completion is right from `pass_reward` on."""
    results = list(results)
    samples = [sample for result in results for sample in result.samples]
    # A refused prompt draws none.
    lengths = [sample.num_tokens for sample in samples if sample.num_tokens]
    rewards = [[sample.reward for sample in result.samples if sample.reward is not None] for result in results]
    right = [sum(reward >= pass_reward - 1e-9 for reward in of_prompt) for of_prompt in rewards]
    passes = []
    for k in ks_of(num_samples):
        # A prompt with fewer scored completions than k does not count.
        values = [
            pass_at(k, num=len(of_prompt), num_right=count)
            for of_prompt, count in zip(rewards, right, strict=True)
            if len(of_prompt) >= k
        ]
        found = estimate(values)
        if found is not None:
            passes.append(PassEstimate(k=k, estimate=found))
    num_scored = sum(map(len, rewards))
    return EvaluationSummary(
        num_prompts=len(results),
        num_samples=num_scored,
        num_errors=len(samples) - num_scored,
        num_truncated=sum(sample.is_truncated for sample in samples),
        mean_tokens=sum(lengths) / len(lengths) if lengths else 0.0,
        average=estimate([math.fsum(of_prompt) / len(of_prompt) for of_prompt in rewards if of_prompt]),
        passes=tuple(passes),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """Best and last version; `gap` is best minus last.

    arXiv 2508.17850 compares algorithms under delay by these: a collapse has a good best and a large gap.
    """

    best_version: int
    best: float
    last_version: int
    last: float

    @property
    def gap(self) -> float:
        return self.best - self.last


def standing(averages: Iterable[tuple[int, Estimate | None]]) -> Standing | None:
    """Best and last of (version, avg@n), the earlier of equals; or None."""
    known = sorted((version, found.mean) for version, found in averages if found is not None)
    if not known:
        return None
    best_version, best = max(known, key=lambda entry: (entry[1], -entry[0]))
    last_version, last = known[-1]
    return Standing(best_version=best_version, best=best, last_version=last_version, last=last)


UNDER_WAY = (EvaluationState.OPEN, EvaluationState.RUNNING)
HEADS = ("set", "version", "avg@n", "pass", "best", "last", "gap", "running", "by")


def evaluation_rows(evaluations: Iterable[Evaluation]) -> list[tuple[str, ...]]:
    """Rows: set, newest version, avg@n, pass@n, best, last, gap, running, sites."""
    rows: list[tuple[str, ...]] = []
    by_set: dict[str, list[Evaluation]] = {}
    for found in sorted(evaluations, key=lambda found: (found.task_set, found.version)):
        by_set.setdefault(found.task_set, []).append(found)
    for name, of_set in by_set.items():
        done = [found for found in of_set if found.state is EvaluationState.DONE]
        both = standing((found.version, found.summary.average) for found in done)
        under_way = [
            f"{found.version}: {found.summary.num_prompts} of {found.num_wanted or '?'}"
            for found in of_set
            if found.state in UNDER_WAY
        ]
        newest, ends, sites = ["-"] * 3, ["-"] * 3, "-"
        if done:
            summary = done[-1].summary
            passes = [f"@{each.k} {estimate_text(each.estimate)}" for each in summary.passes[-1:]]
            newest = [str(done[-1].version), estimate_text(summary.average), *(passes or "-")]
            sites = ", ".join(site for site, _ in done[-1].sites)
        if both is not None:
            best, last = f"{both.best:.3f} ({both.best_version})", f"{both.last:.3f} ({both.last_version})"
            ends = [best, last, f"{both.gap:.3f}"]
        rows.append((name, *newest, *ends, ", ".join(under_way) or "-", sites))
    return rows


def estimate_text(found: Estimate | None) -> str:
    """`0.420 [0.380, 0.460]`; a dash for None."""
    return "-" if found is None else f"{found.mean:.3f} [{found.low:.3f}, {found.high:.3f}]"
