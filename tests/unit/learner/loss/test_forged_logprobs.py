"""Log-probs that a site made up, finite and at most 0, must not let one rollout own the step of all sites."""

import numpy as np
import pytest
import torch

from heterorl.learner.backends.torch_backend import TorchBackend
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
from heterorl.learner.train.backend_config import TorchBackendConfig
from tests.support.training import SAMPLING, random_groups, tiny_model

# Of the tokens of one rollout of 16. An untrained model gives each about -3: ratios of e^2, e^5, e^17 and e^20, the
# last below the bound at which weights would overflow, and one beyond any bound.
FORGED = (-5.0, -8.0, -20.0, -23.0, -1e30)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    tiny_model().save_pretrained(path)
    return path


def _gradient(model_dir, loss, forged=None, *, spread=None):
    """The gradient of a step over four groups of four, one rollout of which states other log-probs."""
    backend = TorchBackend(
        model_dir=model_dir, config=TorchBackendConfig(micro_batch_tokens=4096), loss=loss, sampling=SAMPLING
    )
    groups = random_groups(seed=9)
    if forged is not None:
        groups[0].group.rollouts[2].sampler_logprobs[:] = forged
    if spread is not None:
        rng = np.random.default_rng(3)
        for rollout in (rollout for queued in groups for rollout in queued.group.rollouts):
            rollout.sampler_logprobs[:] = -3.0 + spread * rng.standard_normal(rollout.token_ids.size)
    found = {}
    for name, parameter in backend.torch_model.named_parameters():
        if parameter.requires_grad:
            parameter.register_hook(lambda value, name=name: found.__setitem__(name, value.detach().double().flatten()))
    assert backend.train_step(groups, head_version=2, step=3).is_applied
    return torch.cat([found[name] for name in sorted(found)])


def _worst(model_dir, loss):
    honest = _gradient(model_dir, loss)
    return max(float(_gradient(model_dir, loss, value).norm() / honest.norm()) for value in FORGED)


@pytest.mark.parametrize(
    "config",
    [
        GepoConfig, GspoConfig, DsGspoConfig, GrpoConfig, MisConfig, TisConfig, ToprConfig, DecoupledPpoConfig,
        GepoProductConfig, ImpalaConfig, MoisConfig,
    ],
)  # fmt: skip
def test_forged_rollout_counts_for_at_most_twenty_of_its_peers(model_dir, config):
    # The worst rollout has about the gradient of all others together, hence a little more than e^3.
    assert _worst(model_dir, config()) < 30


def test_without_the_bound_a_forged_rollout_owns_the_step(model_dir):
    """The control: the same sweep over the published algorithm finds what is bounded."""
    assert _worst(model_dir, GepoConfig(max_log_weight=20.0)) > 1e4


def test_default_algorithm_keeps_the_direction_of_its_step(model_dir):
    honest = _gradient(model_dir, GepoConfig())
    for value in FORGED:
        forged = _gradient(model_dir, GepoConfig(), value)
        assert float(torch.dot(honest, forged) / (honest.norm() * forged.norm())) > 0.7


def test_honest_log_probs_give_the_published_gradient(model_dir):
    for config in (GepoConfig(), GspoConfig(), GrpoConfig()):
        published = config.model_copy(update={"max_log_weight": 20.0})
        assert torch.equal(_gradient(model_dir, config, spread=0.5), _gradient(model_dir, published, spread=0.5))
