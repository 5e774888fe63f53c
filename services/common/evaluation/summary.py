"""What the scores of a set say: avg@n and pass@k, each with an interval over prompts. Pure.

Prompts are what is drawn from a population, not completions: completions of one prompt are alike, so an interval over
all of them would be too narrow (Miller, 2024, arXiv 2411.00640, "clustered standard errors").
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from heterorl.common.evaluation.intervals import interval, wilson
from heterorl.common.types.evaluation import Estimate, EvaluationSummary, PassEstimate, PromptResult

_EQUAL = 1e-9


def pass_at(k: int, *, num: int, num_right: int) -> float:
    """Chance that k completions drawn without replacement of `num` hold one of the `num_right` right ones.

    1 - C(n - c, k) / C(n, k): the unbiased estimator of pass@k from n >= k completions (Chen et al., 2021, arXiv
    2107.03374, equation 1), as the product of 1 - k / i for i from n - c + 1 to n.

    Args:
        k: at least 1, at most `num`.
        num: completions of the prompt, n.
        num_right: of these, c.
    """
    if not 1 <= k <= num or not 0 <= num_right <= num:
        raise ValueError(f"pass@{k} of {num} completions, {num_right} of them right")
    if num - num_right < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(num - num_right + 1, num + 1))


def ks_of(num_samples: int) -> tuple[int, ...]:
    """The k of pass@k that n completions can tell: 1, 2, 4, ... and n."""
    powers = [1 << bit for bit in range(num_samples.bit_length()) if 1 << bit <= num_samples]
    return tuple(dict.fromkeys([*powers, num_samples])) if num_samples else ()


def estimate(values: Sequence[float]) -> Estimate | None:
    """Mean of one value a prompt with its 95 % interval; None for no values.

    Where every value is 0 or 1 it is Wilson's, which holds near both ends and for few prompts; else Student's t over
    the prompts, cut to 0 .. 1 where the values lie there. A single value that is neither 0 nor 1 has no interval.
    """
    if not values:
        return None
    mean = math.fsum(values) / len(values)
    if all(value in (0.0, 1.0) for value in values):
        low, high = wilson(round(math.fsum(values)), len(values))
        # Of all or none one end is the share itself, but for rounding.
        return Estimate(mean=mean, low=min(low, mean), high=max(high, mean), num_prompts=len(values))
    found = interval(values)
    assert found is not None, "there are values"
    is_share = all(0.0 <= value <= 1.0 for value in values)
    return Estimate(
        mean=mean,
        low=max(0.0, found.low) if is_share else found.low,
        high=min(1.0, found.high) if is_share else found.high,
        num_prompts=len(values),
    )


def summarize(results: Iterable[PromptResult], *, num_samples: int, pass_reward: float = 1.0) -> EvaluationSummary:
    """Say what the scores of a set's prompts say.

    Args:
        results: of the prompts that are done, each once.
        num_samples: completions of each prompt.
        pass_reward: reward from which a completion is right.
    """
    results = list(results)
    samples = [sample for result in results for sample in result.samples]
    rewards = [[sample.reward for sample in result.samples if sample.reward is not None] for result in results]
    right = [sum(reward >= pass_reward - _EQUAL for reward in of_prompt) for of_prompt in rewards]
    passes = []
    for k in ks_of(num_samples):
        # A prompt some of whose completions could not be scored tells nothing of a k beyond the rest.
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
        mean_tokens=sum(sample.num_tokens for sample in samples) / len(samples) if samples else 0.0,
        average=estimate([math.fsum(of_prompt) / len(of_prompt) for of_prompt in rewards if of_prompt]),
        passes=tuple(passes),
    )
