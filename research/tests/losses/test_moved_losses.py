"""Losses that the lab keeps: against loops over floats."""

import random

import pytest
import torch

from heterorl.common.errors import ConfigError
from heterorl.learner.backends.torch_backend import TorchBackend
from heterorl.learner.loss.loss_config import GspoConfig
from heterorl.learner.train.backend_config import TorchBackendConfig
from heterorl.learner.train.custom_loss_check import check_custom_loss
from heterorl_research.losses.kinds import DsGepoConfig
from research.tests.support.every_loss import LOSSES
from research.tests.support.loss_checks import assert_teaches_nothing, equal_rewards
from research.tests.support.moved_reference import MovedReference
from tests.support.loss_cases import HEAD, assert_equals, case_of, coefficient, groups_of_case
from tests.support.loss_reference import advantage
from tests.support.losses import groups_of, run_loss
from tests.support.training import SAMPLING, random_groups, tiny_model

# Objective, advantage, aggregation.
CASES = {
    "gepo_quantile": (MovedReference.gepo_quantile, "mean", "sequence_mean"),
    "gepo_tempered": (MovedReference.gepo_tempered, "mean", "sequence_mean"),
    "ds_gepo": (MovedReference.ds_gepo, "mean", "sequence_mean"),
    "gspo_token": (MovedReference.gspo_token, "mean_std", "sequence_mean"),
    "vcpo": (MovedReference.vcpo, "mean_std", "sequence_mean"),
    "tba": (MovedReference.tba, "mean", "sequence_sum"),
}


def _value(name, case, learner, fixed):
    objective, kind, aggregation = CASES[name]
    reference = MovedReference(case, learner, fixed)
    rows = range(len(case.group))
    return -sum(
        coefficient(case, i, aggregation, rows) * sum(objective(reference, i, advantage(case, i, kind))) for i in rows
    )


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_loss_and_gradient_equal_the_reference(name, seed):
    case, learner = case_of(seed)

    # The gradient of trajectory balance is that of a square, its value that of another function.
    assert_equals(
        LOSSES[name], case, learner, lambda moved: _value(name, case, moved, learner), has_value=name != "tba"
    )


@pytest.mark.parametrize("name", [name for name in CASES if name != "tba"])
def test_bounds_and_masks_act_on_the_cases(name):
    acted = False
    for seed in (1, 2, 3):
        case, learner = case_of(seed)
        outcome = run_loss(LOSSES[name], learner, groups_of_case(case), max_tokens=6, head_version=HEAD)
        acted |= bool(outcome.terms[0].is_clipped.any())
        # The gate leaves whole rollouts out.
        bad = [gradient for i, gradient in enumerate(outcome.gradients) if advantage(case, i, "mean") < 0]
        acted |= name == "gepo_quantile" and not all(gradient.any() for gradient in bad)
    assert acted


# The pull to the reference is inside tba's advantage.
@pytest.mark.parametrize("name", [name for name in CASES if name != "tba"])
def test_groups_of_equal_rewards_add_no_policy_gradient(name):
    assert_teaches_nothing(equal_rewards(LOSSES[name], 0.5))


def test_gspo_token_equals_gspo():
    rng = random.Random(3)
    sampler = [[-rng.random() for _ in range(2)] for _ in range(5)]
    learner = [[x + 0.3 * rng.gauss(0, 1) for x in row] for row in sampler]
    groups = groups_of([sampler], [[float(number % 2) for number in range(5)]])

    one, other = run_loss(GspoConfig(), learner, groups), run_loss(LOSSES["gspo_token"], learner, groups)

    assert one.value == pytest.approx(other.value, abs=1e-12)
    for left, right in zip(one.gradients, other.gradients, strict=True):
        torch.testing.assert_close(left, right, rtol=0, atol=1e-12)


@pytest.mark.parametrize("fraction", [0.01, 0.1, 0.5])
def test_defensive_weights_are_at_most_one_over_the_fraction(fraction):
    groups = groups_of([[[-9.0], [-8.0], [-0.1]]], [[1.0, 0.0, 0.5]])

    outcome = run_loss(DsGepoConfig(defensive_fraction=fraction).learner_loss(), [[-0.1], [-1e-3], [-9.0]], groups)

    assert (outcome.terms[0].weights <= (1 + 1e-12) / fraction).all()


def test_a_key_that_its_function_has_not_is_refused():
    with pytest.raises(ValueError, match="clip_on does not vary here"):
        DsGepoConfig(clip_on="gspo")


@pytest.mark.parametrize("name", ["gepo_quantile", "gepo_tempered", "vcpo"])
def test_forged_rollout_counts_for_at_most_twenty_of_its_peers(tmp_path, name):
    tiny_model().save_pretrained(tmp_path)

    def gradient(forged):
        config = TorchBackendConfig(micro_batch_tokens=4096)
        backend = TorchBackend(model_dir=tmp_path, config=config, loss=LOSSES[name], sampling=SAMPLING)
        groups = random_groups(seed=9)
        if forged is not None:
            groups[0].group.rollouts[2].sampler_logprobs[:] = forged
        return backend.train_step(groups, head_version=2, step=3).grad_norm

    # The worst rollout has about the gradient of all others together, hence a little more than e^3.
    assert max(gradient(value) for value in (-1e30, -50.0, -9.0, 0.0)) < 30 * gradient(None)


def test_trajectory_balance_without_a_reference_says_which_key():
    with pytest.raises(ConfigError, match=r"set loss\.reads_reference"):
        check_custom_loss(LOSSES["tba"].model_copy(update={"reads_reference": False}))
