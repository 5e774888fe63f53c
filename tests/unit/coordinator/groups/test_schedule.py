"""Prompts in an order that the run's seed decides, paced so that none is too stale when trained."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heterorl.coordinator.coordinator_config import CoordinatorConfig
from heterorl.coordinator.groups.schedule import decide_grant, permute, prompt_of, seed_of


@given(st.integers(1, 300), st.text(max_size=5))
def test_permutation_is_a_bijection(size, key):
    assert sorted(permute(index, size=size, key=key) for index in range(size)) == list(range(size))


def test_every_prompt_comes_once_per_pass_in_another_order():
    passes = [[prompt_of(100 * number + i, num_prompts=100, seed=3) for i in range(100)] for number in range(3)]

    assert all(sorted(one) == list(range(100)) for one in passes)
    assert passes[0] != passes[1] != passes[2]
    assert passes[0] != [prompt_of(i, num_prompts=100, seed=4) for i in range(100)]


def test_sampling_seeds_are_63_bit_and_differ():
    seeds = {seed_of(number, seed=0) for number in range(1000)}

    assert len(seeds) == 1000
    assert max(seeds) < 2**63
    assert seed_of(0, seed=0) != seed_of(0, seed=1)


@pytest.mark.parametrize(
    ("head", "version", "outstanding", "wanted", "granted"),
    [
        (0, 0, 0, 5, 5),
        (10, 10, 0, 100, 64),  # by the limit
        (10, 5, 0, 100, 36),  # (8 - 5 + 1) * 9
        (10, 2, 8, 100, 1),  # the last place of the last version
        (10, 2, 9, 100, 0),
        (10, 1, 0, 100, 0),  # too old
    ],
)
def test_grants_follow_the_two_bounds(head, version, outstanding, wanted, granted):
    config = CoordinatorConfig(groups_per_version=9, max_staleness_versions=8, max_outstanding_groups=64)
    load = {"head_version": head, "policy_version": version, "outstanding": outstanding}

    number, reason = decide_grant(config, **load, wanted=wanted)

    assert number == granted
    assert reason


@pytest.mark.parametrize(
    ("lag", "coming", "outstanding", "granted"),
    [
        (0, 8, 9, 5),
        (0, 9, 9, 0),
        (3, 5, 9, 5),
        (3, 6, 9, 0),
        (0, 9, 8, 5),  # the next version cannot come without it
    ],
)
def test_work_that_would_be_too_stale_when_it_is_done_is_not_granted(lag, coming, outstanding, granted):
    config = CoordinatorConfig(groups_per_version=9, max_staleness_versions=8, max_outstanding_groups=64)
    load = {"head_version": 10, "policy_version": 10 - lag, "outstanding": outstanding, "coming": coming}

    number, reason = decide_grant(config, **load, wanted=5, held=1)
    probed, _ = decide_grant(config, **load, wanted=5)

    assert number == granted
    assert probed == (granted or 1), "a site without work shows by one group whether it is faster now"
    assert granted or reason.startswith(f"paced: {coming} versions come while the site makes a group, at {lag} behind")


@given(st.integers(0, 50), st.integers(0, 50), st.integers(0, 200), st.integers(1, 9), st.integers(0, 9))
def test_no_granted_group_can_be_too_stale_when_trained_in_order(head, lag, outstanding, per_version, bound):
    version = max(0, head - lag)
    config = CoordinatorConfig(
        groups_per_version=per_version, max_staleness_versions=bound, max_outstanding_groups=1000
    )
    load = {"head_version": head, "policy_version": version, "outstanding": outstanding}

    granted, _ = decide_grant(config, **load, wanted=50)

    for ahead in range(outstanding, outstanding + granted):
        assert head + ahead // per_version - version <= bound
