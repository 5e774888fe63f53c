"""Numbers by which algorithms are compared, on the golden rollouts and on values small enough to do by hand."""

import functools
import math

import pytest
import torch

from heterorl.learner.loss.loss_config import (
    GepoConfig,
    GepoProductConfig,
    GepoWholeConfig,
    GmpoConfig,
    GrpoConfig,
    GspoConfig,
    ReinforceConfig,
    ToprConfig,
)
from heterorl.learner.loss.loss_spec import loss_spec_of
from heterorl.learner.train.step_report import SequenceSample, ess_fraction, step_size_factor
from tests.support.losses import golden_sample

F64 = torch.float64
GEPO = [1.25721138029115826668, 0.977812587786816919649, 1.07078934059147382785, 0.43209754310255703]
GSPO = [1.0919881220281975, 0.8751733190429474, 1.1416790160891845, 0.7788007830714049]
PRODUCTS = [1.552707218511, 0.670320046036, 1.698932308619, 0.606530659713]


def _ess(values):
    return sum(values) ** 2 / (len(values) * sum(x * x for x in values))


def test_step_size_is_scaled_by_the_root_of_the_effective_share():
    gepo, grpo = GepoConfig(step_size="ess"), GrpoConfig(step_size="ess")

    assert step_size_factor(loss_spec_of(GepoConfig()), golden_sample(gepo)) == 1.0
    assert step_size_factor(loss_spec_of(gepo), golden_sample(gepo)) == pytest.approx(math.sqrt(_ess(GEPO)), abs=1e-12)
    assert step_size_factor(loss_spec_of(grpo), golden_sample(grpo)) == pytest.approx(0.9156799550695, abs=1e-12)


def test_step_size_may_be_scaled_by_ratios_up_to_the_largest_weight_whatever_the_loss():
    gepo = GepoConfig(step_size="ess_uncapped")

    assert step_size_factor(loss_spec_of(gepo), golden_sample(gepo)) == pytest.approx(0.9156799550695, abs=1e-12)
    # What a site states counts for e^3 at most; e^2.5 and more is beyond the cap of 8.
    expected = (math.exp(2.5) + math.exp(3.0)) ** 2 / (2 * (math.exp(5.0) + math.exp(6.0)))
    assert step_size_factor(loss_spec_of(gepo), _products([2.5, 1e6])) == pytest.approx(math.sqrt(expected), abs=1e-12)
    assert step_size_factor(loss_spec_of(gepo), _products([])) == 0.0


@pytest.mark.parametrize("largest", [math.inf, math.nan])
def test_a_custom_losss_weight_that_is_not_finite_leaves_no_effective_sample(largest):
    assert ess_fraction(torch.tensor([1.0, 2.0, largest], dtype=F64)) == 0.0


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
        (GepoProductConfig(), [PRODUCTS[1], PRODUCTS[3]]),
        (ToprConfig(advantage="mean"), [PRODUCTS[1], PRODUCTS[3]]),
        # The clip takes the gradient of a weight below 0.8.
        (GepoConfig(), [GEPO[1], 0.0]),
        (GepoWholeConfig(drift_limit=0.3), [0.0, 0.0]),
        (GspoConfig(advantage="mean", eps_low=0.2, eps_high=0.2), [GSPO[1], 0.0]),
    ],
)
@pytest.mark.parametrize("parts", [((0, 1, 2, 3),), ((3, 0), (2, 1))])
def test_share_of_bad_rollouts_that_train(config, shares, parts):
    sample = golden_sample(config, parts)

    bad = sample.trained_B[sample.advantages_B < 0].tolist()

    assert sorted(bad, reverse=True) == pytest.approx(shares, abs=1e-10)


@pytest.mark.parametrize("config", [GspoConfig, GmpoConfig, functools.partial(GspoConfig, clip="preserve")])
def test_bad_rollouts_beyond_the_largest_weight_do_not_count_as_trained(config):
    # Mean ratios of e^0.088 and e^0.132, of GMPO up to its clip.
    sample, capped = (
        golden_sample(config(**cap), rewards=[0.0, 1.0, 0.0, 1.0]) for cap in ({}, {"max_log_weight": 0.05})
    )

    assert sample.trained_B[sample.advantages_B < 0].min() > 0.5
    assert capped.trained_B[capped.advantages_B < 0].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("config", [GepoProductConfig(), GspoConfig(negative_weight="product")])
def test_bad_rollouts_with_a_truncated_product_train_whole(config):
    # Products 1.55 and 1.70.
    sample = golden_sample(config, rewards=[0.0, 1.0, 0.0, 1.0])

    assert sample.clipped_B[sample.advantages_B < 0].tolist() == [1.0, 1.0]
    assert sample.trained_B[sample.advantages_B < 0].tolist() == [1.0, 1.0]
