"""The optimizer of stacked runs against torch's own."""

import pytest
import torch

from heterorl.learner.train.backend_config import TorchBackendConfig
from heterorl.learner.train.step import apply_gradients
from heterorl_research.lab.fast.adam import Adam

SETTINGS = TorchBackendConfig(weight_decay=0.1)
RATES = [1e-2, 3e-3]


def test_each_run_is_a_torch_adamw_with_a_clipped_gradient():
    torch.manual_seed(0)
    start = torch.randn(2, 50)
    adam = Adam(start.clone(), SETTINGS)
    rows = [torch.nn.Parameter(row.clone()) for row in start]
    optimizers = [
        torch.optim.AdamW([row], lr=rate, betas=SETTINGS.betas, weight_decay=SETTINGS.weight_decay)
        for row, rate in zip(rows, RATES, strict=True)
    ]
    for step in range(5):
        gradients = torch.randn(2, 50) * (0.01 if step % 2 else 10.0)
        expected = []
        for row, optimizer, rate, gradient in zip(rows, optimizers, RATES, gradients, strict=True):
            row.grad = gradient.clone()
            expected.append(apply_gradients([row], optimizer, loss=0.0, lr=rate * (step + 1), grad_clip=1.0)[1])
        sizes = [rate * (step + 1) for rate in RATES]
        assert adam.step(gradients, step_sizes=sizes, is_finite=[True, True]) == pytest.approx(expected, rel=1e-6)

    assert torch.allclose(adam.masters_RP, torch.stack([row.detach() for row in rows]), atol=1e-6, rtol=1e-5)


def test_a_run_that_is_not_finite_stays_and_the_others_go_on():
    adam = Adam(torch.ones(3, 4), SETTINGS)
    gradients = torch.ones(3, 4)
    gradients[1, 2] = torch.nan
    adam.step(gradients, step_sizes=[0.1] * 3, is_finite=[True, True, False])

    assert torch.equal(adam.masters_RP[1:], torch.ones(2, 4))
    assert (adam.masters_RP[0] < 1).all()
