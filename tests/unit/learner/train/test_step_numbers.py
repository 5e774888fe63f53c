"""Numbers by which algorithms are compared, on the golden rollouts and on values small enough to do by hand."""

import math

import pytest
import torch

from heterorl.learner.loss.loss_config import (
    GepoConfig,
    GepoWholeConfig,
    GrpoConfig,
    GspoConfig,
    ReinforceConfig,
    ToprConfig,
)
from heterorl.learner.loss.loss_spec import loss_spec_of
from heterorl.learner.loss.policy_loss import policy_loss
from heterorl.learner.train.batch import build_batch, collate
from heterorl.learner.train.step import step_coefficients
from heterorl.learner.train.step_report import SequenceSample, join, measure, step_extras, step_size_factor
from tests.support.losses import GOLDEN_LEARNER, GOLDEN_REWARDS, GOLDEN_SAMPLER, groups_of

F64 = torch.float64
GEPO = [1.25721138029115826668, 0.977812587786816919649, 1.07078934059147382785, 0.43209754310255703]
GSPO = [1.0919881220281975, 0.8751733190429474, 1.1416790160891845, 0.7788007830714049]
PRODUCTS = [1.552707218511, 0.670320046036, 1.698932308619, 0.606530659713]


def _golden(config, parts=((0, 1, 2, 3),)):
    spec = loss_spec_of(config)
    batch = build_batch(groups_of([GOLDEN_SAMPLER], [GOLDEN_REWARDS]), loss=config)
    samples = []
    for part in parts:
        inputs = collate([batch.sequences[i] for i in part], batching="padded").loss_inputs
        rows = torch.cat([torch.tensor(GOLDEN_LEARNER[i], dtype=F64) for i in part])
        learner = inputs.padded(rows)
        coefficients = step_coefficients(spec, inputs.mask_BT, batch, max_new_tokens=8)
        samples.append(measure(spec, inputs, learner, policy_loss(spec, inputs, learner, coefficients_BT=coefficients)))
    return join(samples)


def _mean(values):
    return sum(values) / len(values)


def _variance(values):
    return _mean([(x - _mean(values)) ** 2 for x in values])


def _ess(values):
    return sum(values) ** 2 / (len(values) * sum(x * x for x in values))


@pytest.mark.parametrize("config", [GepoConfig(), GspoConfig(advantage="mean"), GrpoConfig(advantage="mean")])
def test_weights_of_both_kinds_are_reported_whatever_is_trained(config):
    extras = step_extras(_golden(config))

    for name, weights in (("gepo", GEPO), ("gspo", GSPO)):
        products = [w * a for w, a in zip(weights, [0.5, -0.5, 0.5, -0.5], strict=True)]
        assert extras[f"bias_{name}"] == pytest.approx(_mean(products) ** 2, abs=1e-12)
        assert extras[f"iw_variance_{name}"] == pytest.approx(_variance(weights), abs=1e-12)
        assert extras[f"ess_fraction_{name}"] == pytest.approx(_ess(weights), abs=1e-12)
    assert extras["ess_fraction_sequence"] == pytest.approx(0.8384697801161, abs=1e-12)
    # 0.0379214285714 is the mean square over the 14 tokens.
    assert extras["second_moment"] == pytest.approx(0.0379214285714, abs=1e-12)


def test_clip_fractions_are_by_sign_of_the_advantage():
    # GEPO clips the first (good) and the last (bad); GRPO, by token, exp(.2) twice and exp(.5) of 9 good, none of 5 bad:
    # ratios of the bad ones are exp(-.15, -.05, -.2, -.3, -.2), of which exp(-.3) = .74 is below .8.
    gepo, grpo = step_extras(_golden(GepoConfig())), step_extras(_golden(GrpoConfig()))

    assert (gepo["clip_fraction_positive"], gepo["clip_fraction_negative"]) == (0.5, 0.5)
    assert grpo["clip_fraction_positive"] == pytest.approx(3 / 9)
    assert grpo["clip_fraction_negative"] == pytest.approx(1 / 5)


def test_advantage_estimate_uses_the_weights_of_the_loss():
    gepo, gspo = step_extras(_golden(GepoConfig())), step_extras(_golden(GspoConfig(advantage="mean")))

    assert gepo["advantage_estimate"] == pytest.approx(0.5 * (GEPO[0] - GEPO[1] + GEPO[2] - GEPO[3]) / 4, abs=1e-12)
    assert gspo["advantage_estimate"] == pytest.approx(0.5 * (GSPO[0] - GSPO[1] + GSPO[2] - GSPO[3]) / 4, abs=1e-12)


@pytest.mark.parametrize("config", [GspoConfig(), GspoConfig(advantage="mean")], ids=["std", "mean"])
def test_what_is_measured_of_advantages_has_the_unit_of_the_reward(config):
    # Divided by the deviation of (1, 0, 1, 0) the same weights would say 1 / 0.577 times as much.
    extras = step_extras(_golden(config))

    assert extras["advantage_estimate"] == pytest.approx(0.5 * (GSPO[0] - GSPO[1] + GSPO[2] - GSPO[3]) / 4, abs=1e-12)
    assert extras["bias_gspo"] == pytest.approx(extras["advantage_estimate"] ** 2, abs=1e-12)


@pytest.mark.parametrize("config", [GepoConfig(opsm_threshold=0.1), GrpoConfig(opsm_threshold=0.1)])
def test_extras_do_not_depend_on_micro_batches(config):
    whole, parts = step_extras(_golden(config)), step_extras(_golden(config, parts=((3, 0), (2,), (1,))))

    assert parts == pytest.approx(whole, abs=1e-12)
    # mean(log q - log p) is .1333 and .25 for the two bad rollouts of 3 and 2 tokens.
    assert whole["dropped_token_fraction"] == pytest.approx(5 / 14)


def test_step_size_is_scaled_by_the_root_of_the_effective_share():
    gepo, grpo = GepoConfig(step_size="ess"), GrpoConfig(step_size="ess")

    assert step_size_factor(loss_spec_of(GepoConfig()), _golden(gepo)) == 1.0
    assert step_size_factor(loss_spec_of(gepo), _golden(gepo)) == pytest.approx(math.sqrt(_ess(GEPO)), abs=1e-12)
    assert step_size_factor(loss_spec_of(grpo), _golden(grpo)) == pytest.approx(0.9156799550695, abs=1e-12)


def test_step_size_may_be_scaled_by_ratios_up_to_the_largest_weight_whatever_the_loss():
    gepo = GepoConfig(step_size="ess_uncapped")

    assert step_size_factor(loss_spec_of(gepo), _golden(gepo)) == pytest.approx(0.9156799550695, abs=1e-12)
    # What a site states counts for e^3 at most; e^2.5 and more is beyond the cap of 8.
    expected = (math.exp(2.5) + math.exp(3.0)) ** 2 / (2 * (math.exp(5.0) + math.exp(6.0)))
    assert step_size_factor(loss_spec_of(gepo), _products([2.5, 1e6])) == pytest.approx(math.sqrt(expected), abs=1e-12)
    assert step_size_factor(loss_spec_of(gepo), _products([])) == 0.0


def _products(values):
    zeros = torch.zeros(len(values), dtype=F64)
    names = SequenceSample.__dataclass_fields__
    fields = dict.fromkeys(names, zeros) | {"log_products_B": torch.tensor(values, dtype=F64)}
    return SequenceSample(**fields)


@pytest.mark.parametrize(
    ("logs", "share"),
    [
        ([math.log(8.0), 500.0], 1.0),  # capped at 8
        ([math.log(4.0), 500.0], 144 / 160),  # (4 + 8)^2 / (2 (16 + 64))
        ([-20000.0, -20000.0 + math.log(3.0)], 0.8),
        ([], 0.0),
    ],
)
def test_sequence_ratios_are_capped_at_eight_and_never_underflow(logs, share):
    spec = loss_spec_of(GrpoConfig(step_size="ess"))

    assert step_size_factor(spec, _products(logs)) == pytest.approx(math.sqrt(share), abs=1e-12)


@pytest.mark.parametrize(
    ("config", "shares"),
    [
        (ReinforceConfig(), [1.0, 1.0]),
        (ToprConfig(advantage="mean"), [PRODUCTS[1], PRODUCTS[3]]),
        # The clip takes the gradient of a weight below 0.8.
        (GepoConfig(), [GEPO[1], 0.0]),
        (GepoWholeConfig(drift_limit=0.3), [0.0, 0.0]),
        (GspoConfig(advantage="mean", eps_low=0.2, eps_high=0.2), [GSPO[1], 0.0]),
    ],
)
@pytest.mark.parametrize("parts", [((0, 1, 2, 3),), ((3, 0), (2, 1))])
def test_share_of_bad_rollouts_that_train(config, shares, parts):
    sample = _golden(config, parts)

    bad = sample.trained_B[sample.advantages_B < 0].tolist()

    assert sorted(bad, reverse=True) == pytest.approx(shares, abs=1e-10)
