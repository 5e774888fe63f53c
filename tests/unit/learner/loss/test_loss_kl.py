"""The KL penalty: an unbiased estimate that never pushes the wrong way."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from heterorl.learner.loss.objectives import kl_estimates

F64 = torch.float64


def test_kl_gradient_equals_finite_differences():
    generator = torch.Generator().manual_seed(4)
    sampler = -2.0 * torch.rand(2, 3, dtype=F64, generator=generator)
    learner = sampler + 0.3 * torch.randn(2, 3, dtype=F64, generator=generator)
    mask_BT = torch.tensor([[True, True, True], [True, True, False]])

    assert torch.autograd.gradcheck(lambda logprobs: kl_estimates(logprobs, sampler, mask_BT), learner.requires_grad_())


def test_kl_estimate_counts_a_token_that_the_learner_dropped_linearly():
    # log r = -15: e^-15 - 1 + 15; the mis-directed form would give e^15 - 16 = 3.27e6.
    value = kl_estimates(torch.tensor([[-16.0]]), torch.tensor([[-1.0]]), torch.ones(1, 1, dtype=torch.bool))

    assert value.item() == pytest.approx(14.0000003, abs=1e-5)


@settings(max_examples=30)
@given(st.integers(min_value=0, max_value=10_000))
def test_kl_estimate_is_unbiased_for_kl_of_sampler_to_learner(seed):
    # The expectation over q is taken exactly, over a vocabulary of 7.
    generator = torch.Generator().manual_seed(seed)
    learner, sampler = torch.log_softmax(torch.randn(2, 7, dtype=F64, generator=generator), -1)
    learner.requires_grad_()

    estimates = kl_estimates(learner[None], sampler[None], torch.ones(1, 7, dtype=torch.bool))[0]

    exact = (sampler.exp() * (sampler - learner)).sum()
    expected = (sampler.exp() * estimates).sum()
    assert (estimates >= 0).all()
    assert expected.item() == pytest.approx(exact.item(), abs=1e-12)


def test_kl_gradient_pulls_the_learner_towards_the_sampler_from_both_sides():
    learner = torch.tensor([[-1.0, -3.0]], requires_grad=True)

    kl_estimates(learner, torch.tensor([[-2.0, -2.0]]), torch.ones(1, 2, dtype=torch.bool)).sum().backward()

    assert learner.grad[0, 0] > 0
    assert learner.grad[0, 1] < 0


def test_kl_estimate_has_no_gradient_beyond_its_cap():
    learner = torch.tensor([[-0.1]], requires_grad=True)

    value = kl_estimates(learner, torch.tensor([[-1000.0]]), torch.ones(1, 1, dtype=torch.bool))
    value.sum().backward()

    assert value.isfinite().all()
    assert learner.grad.item() == 0.0
