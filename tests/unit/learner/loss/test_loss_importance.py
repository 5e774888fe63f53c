"""Weights of tokens and rollouts that are more than one ratio: V-trace and mixtures."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from heterorl.learner.loss.importance import mixture_log_denominators, v_trace_log_weights

F64 = torch.float64
ratios = st.lists(st.floats(-3.0, 3.0), min_size=2, max_size=9)


@given(ratios)
def test_v_trace_with_caps_that_never_bind_is_the_ratio_of_what_follows(values):
    logs = torch.tensor([values], dtype=F64)

    weights = v_trace_log_weights(logs, torch.ones_like(logs, dtype=torch.bool), rho_cap=1e9, c_cap=1e9)

    assert weights[0].tolist() == pytest.approx([sum(values[t:]) for t in range(len(values))], abs=1e-12)


def test_v_trace_by_hand():
    # rho = min(2, r), c = min(1, r); the last token of the first row is its third.
    mask = torch.tensor([[True, True, True, False], [True, False, False, False]])
    logs = torch.log(torch.tensor([[4.0, 3.0, 1.5, 7.0], [5.0, 1.0, 1.0, 1.0]], dtype=F64))

    weights = v_trace_log_weights(logs, mask, rho_cap=2.0, c_cap=1.0).exp()

    # 2 x 1 x 1.5, 2 x 1.5, 1.5: the last token has rho wherever it stands; then 2
    assert weights[mask].tolist() == pytest.approx([3.0, 3.0, 1.5, 2.0], abs=1e-12)


@given(st.floats(-5, 0), st.floats(-5, 0), st.integers(0, 400))
def test_mixture_lies_between_learner_and_sampler_by_age(learner, sampler, age):
    share = 1 / (1 + math.exp(min(700, age - 8)))
    rows = [torch.tensor([[x]], dtype=F64) for x in (learner, sampler, age)]

    log_mixture = float(mixture_log_denominators(*rows, age=8.0, slope=1.0))

    expected = share * math.exp(learner) + (1 - share) * math.exp(sampler)
    assert math.exp(log_mixture) == pytest.approx(expected, rel=1e-9)
    assert math.exp(learner - log_mixture) <= (1 + 1e-9) / share
