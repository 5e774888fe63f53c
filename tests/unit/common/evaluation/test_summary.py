import itertools
import math

import pytest

from heterorl.common.evaluation.summary import estimate, ks_of, pass_at, standing, summarize
from heterorl.common.types.evaluation import Estimate, PromptResult, ScoredSample


def scored(*rewards, index=0, is_truncated=False):
    samples = tuple(ScoredSample(reward=reward, num_tokens=4, is_truncated=is_truncated) for reward in rewards)
    return PromptResult(prompt_index=index, samples=samples)


@pytest.mark.parametrize("num", [1, 2, 5, 7])
def test_pass_at_is_the_share_of_all_subsets_with_a_right_one(num):
    for num_right, k in itertools.product(range(num + 1), range(1, num + 1)):
        right = [True] * num_right + [False] * (num - num_right)
        subsets = list(itertools.combinations(right, k))
        share = sum(any(subset) for subset in subsets) / len(subsets)

        assert pass_at(k, num=num, num_right=num_right) == pytest.approx(share, abs=1e-12)


def test_pass_at_stays_a_number_for_a_thousand_completions():
    # 1 - C(1023, 512) / C(1024, 512) = 1/2, whose binomials no float holds.
    assert pass_at(512, num=1024, num_right=1) == pytest.approx(0.5)


@pytest.mark.parametrize(("k", "num", "num_right"), [(0, 4, 1), (5, 4, 1), (1, 4, 5), (1, 4, -1)])
def test_pass_at_refuses_what_is_no_pass(k, num, num_right):
    with pytest.raises(ValueError, match="pass@"):
        pass_at(k, num=num, num_right=num_right)


def test_ks_are_powers_of_two_and_all():
    assert ks_of(0) == ()
    assert ks_of(1) == (1,)
    assert ks_of(6) == (1, 2, 4, 6)
    assert ks_of(8) == (1, 2, 4, 8)


def test_shares_of_whole_prompts_have_an_interval_at_both_ends():
    found = estimate([1.0] * 20)

    # Wilson at 20 of 20: 1 / (1 + z^2 / 20) with z = 1.96.
    assert (found.mean, found.high) == (1.0, 1.0)
    assert found.low == pytest.approx(1 / (1 + 1.959964**2 / 20), abs=1e-6)


def test_fractions_have_a_t_interval_over_prompts():
    found = estimate([0.0, 0.5, 0.5, 1.0])

    # mean 1/2, s^2 = (1/4 + 1/4) / 3, t of 3 degrees of freedom 3.182446.
    half = 3.182446 * math.sqrt(0.5 / 3 / 4)
    assert (found.mean, found.num_prompts) == (0.5, 4)
    # 0.5 - 0.6496 is cut to 0.
    assert half > 0.5
    assert (found.low, found.high) == (0.0, 1.0)
    narrow = estimate([0.4, 0.5, 0.5, 0.6])
    assert narrow.high - 0.5 == pytest.approx(3.182446 * math.sqrt(0.02 / 3 / 4), abs=1e-6)


def test_rewards_beyond_one_are_not_cut():
    found = estimate([1.0, 3.0])

    assert found.low < 0.0 < 3.0 < found.high


def test_a_summary_counts_prompts_completions_and_what_could_not_be_scored():
    found = summarize(
        [scored(1.0, 0.0, index=0), scored(None, 1.0, index=1, is_truncated=True), scored(None, None, index=2)],
        num_samples=2,
    )

    assert (found.num_prompts, found.num_samples, found.num_errors, found.num_truncated) == (3, 3, 3, 2)
    # Means of the prompts that have a score: 1/2 and 1.
    assert found.average.mean == 0.75
    assert found.average.num_prompts == 2
    # pass@1 of (1 of 2) and (1 of 1); pass@2 of the one prompt that has two scores.
    assert [(entry.k, entry.estimate.mean, entry.estimate.num_prompts) for entry in found.passes] == [
        (1, 0.75, 2), (2, 1.0, 1)
    ]  # fmt: skip


def test_a_refused_prompt_does_not_shorten_the_mean_length():
    refused = PromptResult(prompt_index=1, samples=(ScoredSample(reward=None, num_tokens=0, is_truncated=False),))

    assert summarize([scored(1.0), refused], num_samples=1).mean_tokens == scored(1.0).samples[0].num_tokens
    assert summarize([refused], num_samples=1).mean_tokens == 0.0


def test_nothing_scored_is_no_number():
    found = summarize([scored(None)], num_samples=1)

    assert (found.average, found.passes, found.num_errors) == (None, (), 1)


def test_a_reward_counts_as_right_from_the_stated_one_on():
    found = summarize([scored(0.5, 0.4)], num_samples=2, pass_reward=0.5)

    assert [entry.estimate.mean for entry in found.passes] == [0.5, 1.0]


def test_best_and_last():
    def of(mean):
        return Estimate(mean=mean, low=mean, high=mean, num_prompts=1)

    found = standing([(30, of(0.4)), (10, of(0.7)), (20, of(0.7)), (40, None)])

    assert (found.best_version, found.best, found.last_version, found.last) == (10, 0.7, 30, 0.4)
    assert found.gap == pytest.approx(0.3)
    assert standing([(1, None)]) is None
