"""Log-probs that a site made up, finite and at most 0, must not let one rollout own the step of all sites."""

import numpy as np
import pytest
import torch

from heterorl.learner.backends.ranks.passes import alone
from heterorl.learner.loss.loss_config import (
    DecoupledPpoConfig,
    DsGspoConfig,
    GepoConfig,
    GepoProductConfig,
    GrpoConfig,
    GspoConfig,
    ImpalaConfig,
    MisConfig,
    MoisConfig,
    TisConfig,
    ToprConfig,
)
from heterorl.learner.train.batch import build_batch
from tests.support.training import SAMPLING, random_groups, tiny_model

# Of the tokens of one rollout of 16. An untrained model gives each about -3: ratios of e^2, e^5, e^17 and e^20, the
# last below the bound at which weights would overflow, and one beyond any bound.
FORGED = (-5.0, -8.0, -20.0, -23.0, -1e30)


MODEL = tiny_model()


def _gradient(loss, forged=None, *, spread=None):
    """The gradient of a step over four groups of four, one rollout of which states other log-probs."""
    groups = [queued.group for queued in random_groups(seed=9)]
    if forged is not None:
        groups[0].rollouts[2].sampler_logprobs[:] = forged
    if spread is not None:
        rng = np.random.default_rng(3)
        for rollout in (rollout for group in groups for rollout in group.rollouts):
            rollout.sampler_logprobs[:] = -3.0 + spread * rng.standard_normal(rollout.token_ids.size)
    MODEL.zero_grad(set_to_none=True)
    passes = alone(
        MODEL, loss=loss, temperature=1.0, max_new_tokens=SAMPLING.max_new_tokens, micro_batch_tokens=4096,
        batching="padded",
    )  # fmt: skip
    passes.accumulate(build_batch(groups, loss=loss, head_version=2))
    gradient = torch.cat([parameter.grad.double().flatten() for parameter in MODEL.parameters()])
    assert gradient.isfinite().all()
    return gradient


def _worst(loss):
    honest = _gradient(loss)
    return max(float(_gradient(loss, value).norm() / honest.norm()) for value in FORGED)


@pytest.mark.parametrize(
    "config",
    [
        GepoConfig, GspoConfig, DsGspoConfig, GrpoConfig, MisConfig, TisConfig, ToprConfig, DecoupledPpoConfig,
        GepoProductConfig, ImpalaConfig, MoisConfig,
    ],
)  # fmt: skip
def test_forged_rollout_counts_for_at_most_twenty_of_its_peers(config):
    # The worst rollout has about the gradient of all others together, hence a little more than e^3.
    assert _worst(config()) < 30


def test_without_the_bound_a_forged_rollout_owns_the_step():
    """The control: the same sweep over the published algorithm finds what is bounded."""
    assert _worst(GepoConfig(max_log_weight=20.0)) > 1e4


def test_default_algorithm_keeps_the_direction_of_its_step():
    honest = _gradient(GepoConfig())
    for value in FORGED:
        forged = _gradient(GepoConfig(), value)
        assert float(torch.dot(honest, forged) / (honest.norm() * forged.norm())) > 0.7


def test_honest_log_probs_give_the_published_gradient():
    for config in (GepoConfig(), GspoConfig(), GrpoConfig()):
        published = config.model_copy(update={"max_log_weight": 20.0})
        assert torch.equal(_gradient(config, spread=0.5), _gradient(published, spread=0.5))
