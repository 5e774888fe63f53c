"""Log-probs that a site made up, finite and at most 0, must not let one rollout own the step of all sites."""

import math

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
from tests.support.losses import groups_of, run_loss
from tests.support.training import SAMPLING, random_groups, tiny_model

# Of the tokens of one rollout of 16. An untrained model gives each about -3: ratios of e^2, e^5, e^17 and e^20, the
# last below the bound at which weights would overflow, and one beyond any bound.
FORGED = (-5.0, -8.0, -20.0, -23.0, -1e30)


MODEL = tiny_model()


def _gradient(loss, forged=None, *, spread=None, head_version=2):
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
    passes.accumulate(build_batch(groups, loss=loss, head_version=head_version))
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


@pytest.mark.parametrize("age", [1, 2, 3, 9])
@pytest.mark.parametrize("cap", [0.5, 5.0, math.inf])
def test_forged_token_with_two_ratios_counts_for_at_most_twenty(age, cap):
    config = DecoupledPpoConfig(proximal="loglinear", behaviour_cap=cap)
    sampler = np.linspace(-40.0, -1.0, 400).tolist()
    # Without a standard deviation of rewards, a token weighs 1 / 800 where p = q.
    outcome = run_loss(
        config, [[-1.0] * 400] * 2, groups_of([[sampler] * 2], [[0.0, 1.0]], version=0), head_version=age,
        advantages=[-1.0, 1.0],
    )  # fmt: skip
    limit = math.exp(3) * (1 + 1e-12)

    assert float(outcome.terms[0].weights.max()) <= limit
    assert max(float(gradient.abs().max()) for gradient in outcome.gradients) * 800 <= limit


def test_without_the_bound_a_forged_rollout_owns_the_step():
    """The control: the same sweep over the published algorithm finds what is bounded."""
    assert _worst(GepoConfig(max_log_weight=20.0)) > 1e4


@pytest.mark.parametrize("clip", ["zero", "preserve"])
def test_good_rollouts_beyond_the_bound_have_no_gradient(clip):
    groups = groups_of([[[-30.0], [-1.0]]], [[1.0, 0.0]])

    outcome = run_loss(GspoConfig(clip=clip, sampler_kl=0.0), [[-1.0], [-1.0]], groups)

    assert [bool(gradient.any()) for gradient in outcome.gradients] == [False, True]


def test_default_algorithm_keeps_the_direction_of_its_step():
    honest = _gradient(GepoConfig())
    for value in FORGED:
        forged = _gradient(GepoConfig(), value)
        assert float(torch.dot(honest, forged) / (honest.norm() * forged.norm())) > 0.7


def test_honest_log_probs_give_the_published_gradient():
    for config in (GepoConfig(), GspoConfig(), GrpoConfig()):
        published = config.model_copy(update={"max_log_weight": 20.0})
        assert torch.equal(_gradient(config, spread=0.5), _gradient(published, spread=0.5))


@pytest.mark.parametrize("age", [1, 2, 9])
def test_two_ratios_below_their_caps_are_their_product(age):
    config = DecoupledPpoConfig(proximal="loglinear")
    published = config.model_copy(update={"max_log_weight": 20.0})

    found, expected = (_gradient(one, spread=0.3, head_version=1 + age) for one in (config, published))

    assert torch.equal(found, expected)
