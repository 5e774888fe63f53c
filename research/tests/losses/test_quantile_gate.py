"""Which bad rollouts the gate by a quantile of the step leaves out."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from heterorl_research.losses.gepo_quantile import within_quantile

F64 = torch.float64
values = st.lists(st.tuples(st.floats(-3, 3), st.sampled_from([-1.5, -0.1, 0.0, 0.2, 1.0])), min_size=1, max_size=9)


def test_quantile_gate_by_hand():
    # Six bad rollouts with ratios 8, 1, 1, 1, 1, 0: 144 / (6 x 68) = .353 of 6 is 2.1, so three stay, and ties with them.
    logs = torch.log(torch.tensor([8.0, 1.0, 9.0, 1.0, 1.0, 1.0, 1e-30], dtype=F64))
    advantages = torch.tensor([-1.0, -0.1, 1.0, -1.0, -1.0, -1.0, -1.0], dtype=F64)

    assert within_quantile(logs, advantages, least=0.1).tolist() == [True] * 6 + [False]
    assert within_quantile(logs, advantages, least=0.9).tolist() == [True] * 7


def test_quantile_gate_keeps_the_least_share_where_one_ratio_outweighs_all():
    logs = torch.arange(10, dtype=F64) * 50.0
    ones = torch.ones(10, dtype=F64)

    assert within_quantile(logs, -ones, least=0.3).tolist() == [False] * 7 + [True] * 3
    assert within_quantile(logs, ones, least=0.3).all()
    # .28 x 25 is 7 and a rounding.
    many = torch.arange(25, dtype=F64) * 50.0
    assert int(within_quantile(many, -torch.ones(25, dtype=F64), least=0.28).sum()) == 7
    # The good ones neither leave nor count.
    mixed = torch.where(torch.arange(10) % 2 == 0, ones, -ones)
    assert within_quantile(logs, mixed, least=0.4).tolist() == [True, False] * 3 + [True, True] * 2


@given(values, st.floats(0.05, 1.0), st.floats(-1000, 1000))
def test_quantile_gate_sees_no_common_shift(pairs, least, shift):
    logs = torch.tensor([d for d, _ in pairs], dtype=F64).round(decimals=3)
    advantages = torch.tensor([a for _, a in pairs], dtype=F64)

    kept = within_quantile(logs, advantages, least=least)

    bad = [z for z, a in zip(logs.tolist(), advantages.tolist(), strict=True) if a < 0]
    assert kept[advantages >= 0].all()
    assert int(kept[advantages < 0].sum()) >= least * len(bad) - 1e-6
    if len(set(bad)) == len(bad):
        # Rounding of shifted values may move a share that is an exact number of rollouts.
        shifted = within_quantile(logs + shift, advantages, least=least)
        assert abs(int(shifted.sum()) - int(kept.sum())) <= 1
    if len(set(bad)) <= 1:
        assert kept.all()
