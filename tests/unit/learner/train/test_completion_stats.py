"""The numbers of a step's completions against slow references in Python's own float64 and fractions."""

import dataclasses
import math
import statistics
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from heterorl.common.types.common import MAX_REPORTED_PARTS, MAX_REPORTED_SITES, SiteId
from heterorl.common.types.rollout import GIVEN, FinishReason, RewardPart, Span
from heterorl.learner.train.batch import has_signal
from heterorl.learner.train.step_report import completion_numbers
from tests.support.learner_world import make_group

# length, reward, whether it was cut
_members = st.lists(
    st.tuples(st.integers(1, 40), st.sampled_from([0.0, 0.1, 0.5, 1.0, -2.0]), st.booleans()), min_size=1, max_size=5
)


def group_of(members, *, sequence=1, site="eu-1", parts=()):
    base = make_group(sequence)
    made = [
        dataclasses.replace(
            base.rollouts[0],
            token_ids=np.zeros(length, np.int32),
            sampler_logprobs=np.zeros(length, np.float32),
            reward=reward,
            reward_parts=tuple(parts[number]) if parts else (RewardPart(name="r", value=reward),),
            finish_reason=FinishReason.LENGTH if is_cut else FinishReason.EOS,
        )
        for number, (length, reward, is_cut) in enumerate(members)
    ]
    return dataclasses.replace(base, id=dataclasses.replace(base.id, site=SiteId(site)), rollouts=tuple(made))


def percentile(values, share):
    """Linear interpolation between the two nearest of the sorted values."""
    ordered = sorted(values)
    place = Fraction(share) * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return float(ordered[low] + (place - low) * (ordered[high] - ordered[low]))


@given(st.lists(_members, min_size=1, max_size=6))
@example([[(1, 0.5, False), (5, 0.1, False), (5, 1.0, False)], [(1, 0.0, False), (1, -2.0, False), (10, 1.0, False)]])
@example([[(1, 0.1, False)] * 3])
def test_numbers_are_those_of_a_slow_reference(groups):
    numbers = completion_numbers([group_of(members, sequence=n + 1) for n, members in enumerate(groups)])

    everyone = [member for members in groups for member in members]
    lengths = [length for length, _, _ in everyone]
    exact = [Fraction(reward) for _, reward, _ in everyone]
    mean = sum(exact) / len(exact)
    high = [length for length, reward, _ in everyone if Fraction(reward) > mean]
    low = [length for length, reward, _ in everyone if Fraction(reward) <= mean]
    assert numbers.length_mean == pytest.approx(statistics.fmean(lengths), rel=1e-12)
    assert numbers.length_p95 == pytest.approx(percentile(lengths, "0.95"), rel=1e-12)
    assert numbers.length_max == max(lengths)
    assert numbers.length_high_reward == (pytest.approx(statistics.fmean(high), rel=1e-12) if high else None)
    assert numbers.length_low_reward == (pytest.approx(statistics.fmean(low), rel=1e-12) if low else None)
    assert numbers.truncated_fraction == sum(cut for _, _, cut in everyone) / len(everyone)
    equal = [len({reward for _, reward, _ in members}) <= 1 for members in groups]
    assert numbers.uniform_fraction == sum(equal) / len(equal)


def test_numbers_of_a_step_by_hand():
    groups = [
        group_of([(2, 1.0, False), (4, 0.0, True)], sequence=1),
        group_of([(6, 1.0, False), (8, 1.0, True)], sequence=2, site="us-2"),
    ]

    numbers = completion_numbers(groups)

    # Lengths 2 4 6 8: the 95th percentile lies 0.85 of the way from the third to the fourth.
    assert (numbers.length_mean, numbers.length_p95, numbers.length_max) == (5.0, pytest.approx(7.7), 8)
    # Rewards 1 0 1 1 have mean 0.75.
    assert (numbers.length_high_reward, numbers.length_low_reward) == (pytest.approx(16 / 3), 4.0)
    assert (numbers.truncated_fraction, numbers.uniform_fraction) == (0.5, 0.5)
    assert [(site.site, site.num_groups, site.num_tokens) for site in numbers.sites] == [
        ("eu-1", 1, 6),
        ("us-2", 1, 14),
    ]


def test_lost_members_are_in_no_number_of_a_step():
    whole = group_of([(2, 1.0, False), (4, 0.0, True), (9, 0.5, False), (0, 0.7, False)])
    lost = dataclasses.replace(whole.rollouts[2], finish_reason=FinishReason.TOOL_LOST)
    group = dataclasses.replace(whole, rollouts=(*whole.rollouts[:2], lost, whole.rollouts[3]))

    assert completion_numbers([group]) == completion_numbers([group_of([(2, 1.0, False), (4, 0.0, True)])])


def test_turns_given_tokens_and_endings_of_trajectories():
    base = make_group(1)
    drawn = lambda start, end: Span(version=0, start=start, end=end)  # noqa: E731
    spans = (
        drawn(0, 2),
        Span(version=GIVEN, start=2, end=7),
        drawn(7, 8),
        Span(version=GIVEN, start=8, end=9),
        drawn(9, 10),
    )
    long = dataclasses.replace(
        base.rollouts[0], token_ids=np.zeros(10, np.int32), sampler_logprobs=np.zeros(4, np.float32), spans=spans,
        finish_reason=FinishReason.TURNS,
    )  # fmt: skip
    short = dataclasses.replace(
        base.rollouts[0], token_ids=np.zeros(3, np.int32), sampler_logprobs=np.zeros(3, np.float32),
        spans=(drawn(0, 3),), finish_reason=FinishReason.EOS,
    )  # fmt: skip

    numbers = completion_numbers([dataclasses.replace(base, rollouts=(long, short, short, short))])

    assert (numbers.turns_mean, numbers.turns_max, numbers.given_mean) == (1.5, 3, 1.5)
    assert [(ending.name, ending.mean) for ending in numbers.endings] == [("eos", 0.75), ("turns", 0.25)]


def test_equal_rewards_are_none_above_their_mean():
    # 0.1 + 0.1 + 0.1 over 3 is not 0.1 in binary.
    numbers = completion_numbers([group_of([(1, 0.1, False)] * 3)])

    assert (numbers.length_high_reward, numbers.length_low_reward) == (None, 1.0)


def test_no_completion_has_no_numbers():
    assert completion_numbers([]) is None


def test_parts_are_means_over_the_completions_that_have_them():
    part = lambda name, value: RewardPart(name=name, value=value)  # noqa: E731
    parts = [
        [part("right", 1.0), part("format", 0.5)],
        [part("right", 0.0)],
        # Named twice: its sum is this completion's.
        [part("right", 0.25), part("right", 0.25)],
    ]

    numbers = completion_numbers([group_of([(1, 0.0, False)] * 3, parts=parts)])

    assert [(p.name, p.mean) for p in numbers.reward_parts] == [("format", 0.5), ("right", 0.5)]


def test_parts_whose_sum_is_no_float_have_a_mean():
    parts = [[RewardPart(name="off", value=value, weight=0.0)] for value in (1e308, 1.5e308, 1e308)]

    numbers = completion_numbers([group_of([(1, 0.0, False)] * 3, parts=parts)])

    assert [part.mean for part in numbers.reward_parts] == [pytest.approx(1.1666666666666667e308)]


def test_names_that_a_site_makes_up_are_bounded():
    rare = [RewardPart(name=f"a{number:03}", value=1.0) for number in range(60)]
    common = RewardPart(name="z", value=1.0)
    groups = [
        group_of([(number + 1, 0.0, False)] * 2, site=f"s{number:03}", parts=[[*rare, common], [common]])
        for number in range(40)
    ]

    numbers = completion_numbers(groups)

    assert len(numbers.reward_parts) == MAX_REPORTED_PARTS
    assert numbers.reward_parts[-1].name == "z", "what most completions have is kept"
    assert len(numbers.sites) == MAX_REPORTED_SITES
    assert numbers.sites[-1].site == "s039", "the largest are kept"
    assert "s000" not in {site.site for site in numbers.sites}


def test_one_group_whose_rewards_differ_is_a_signal():
    assert has_signal(group_of([(1, 0.0, False), (1, 1.0, False)]))
    assert not has_signal(group_of([(1, 1.0, False), (1, 1.0, False)]))
    assert not has_signal(group_of([(1, 1.0, False), (0, 0.0, False)]))
