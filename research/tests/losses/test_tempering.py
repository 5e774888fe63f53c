"""Ratios tempered until a step supports them."""

import math

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from heterorl_research.losses.gepo_tempered import log_effective_share, tempered_log_weights

F64 = torch.float64
# Apart by more than rounding, so that multiples of them differ too.
spread = st.lists(st.integers(-300, 300), min_size=3, max_size=12, unique=True).map(lambda xs: [x / 50 for x in xs])


def _share(logs):
    weights = [math.exp(x - max(logs)) for x in logs]
    return sum(weights) ** 2 / (len(weights) * sum(w * w for w in weights))


@given(spread, st.floats(0.2, 0.95))
def test_tempered_weights_have_the_asked_share_or_are_the_ratios(values, share):
    logs = torch.tensor(values, dtype=F64)

    tempered = tempered_log_weights(logs, share=share)

    assert float(tempered.exp().mean()) == pytest.approx(1.0, abs=1e-9)
    whole = _share(values)
    assert _share(tempered.tolist()) == pytest.approx(max(whole, share), abs=1e-6)
    assert math.exp(float(log_effective_share(logs))) == pytest.approx(whole, rel=1e-9)
    # Order is kept: the exponent is not negative.
    assert tempered.argsort().tolist() == logs.argsort().tolist()


@given(spread, st.floats(1.0, 50.0), st.floats(-1000.0, 1000.0))
def test_tempered_weights_see_neither_scale_nor_shift_where_the_share_binds(values, factor, shift):
    logs = 10.0 * torch.tensor(values, dtype=F64)

    assume(float(log_effective_share(logs)) < math.log(0.6))

    one, other = (tempered_log_weights(z, share=0.6) for z in (logs, factor * logs + shift))

    torch.testing.assert_close(one, other, rtol=0, atol=1e-8)


def test_tempered_weights_of_several_steps_are_those_of_each():
    steps = torch.randn(5, 7, dtype=F64, generator=torch.Generator().manual_seed(1)) * 3.0

    together = tempered_log_weights(steps, share=0.5)

    for row, logs in enumerate(steps):
        assert torch.equal(together[row], tempered_log_weights(logs, share=0.5))


@pytest.mark.parametrize("logs", [[0.0, 0.0, 0.0], [-20000.0, -20000.0], [3.0]])
@pytest.mark.parametrize("share", [0.5, 1.0])
def test_tempered_weights_of_equal_ratios_are_one(logs, share):
    weights = tempered_log_weights(torch.tensor(logs, dtype=F64), share=share)

    assert weights.exp().tolist() == pytest.approx([1.0] * len(logs), abs=1e-12)
