"""Numbers by which algorithms are compared, on the golden rollouts."""

import pytest

from heterorl.learner.loss.loss_config import GepoConfig, GrpoConfig, GspoConfig
from heterorl_research.lab.measure import step_extras
from tests.support.losses import golden_sample

GEPO = [1.25721138029115826668, 0.977812587786816919649, 1.07078934059147382785, 0.43209754310255703]
GSPO = [1.0919881220281975, 0.8751733190429474, 1.1416790160891845, 0.7788007830714049]


def _mean(values):
    return sum(values) / len(values)


def _variance(values):
    return _mean([(x - _mean(values)) ** 2 for x in values])


def _ess(values):
    return sum(values) ** 2 / (len(values) * sum(x * x for x in values))


@pytest.mark.parametrize("config", [GepoConfig(), GspoConfig(advantage="mean"), GrpoConfig(advantage="mean")])
def test_weights_of_both_kinds_are_reported_whatever_is_trained(config):
    extras = step_extras(golden_sample(config))

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
    gepo, grpo = step_extras(golden_sample(GepoConfig())), step_extras(golden_sample(GrpoConfig()))

    assert (gepo["clip_fraction_positive"], gepo["clip_fraction_negative"]) == (0.5, 0.5)
    assert grpo["clip_fraction_positive"] == pytest.approx(3 / 9)
    assert grpo["clip_fraction_negative"] == pytest.approx(1 / 5)


def test_advantage_estimate_uses_the_weights_of_the_loss():
    gepo, gspo = step_extras(golden_sample(GepoConfig())), step_extras(golden_sample(GspoConfig(advantage="mean")))

    assert gepo["advantage_estimate"] == pytest.approx(0.5 * (GEPO[0] - GEPO[1] + GEPO[2] - GEPO[3]) / 4, abs=1e-12)
    assert gspo["advantage_estimate"] == pytest.approx(0.5 * (GSPO[0] - GSPO[1] + GSPO[2] - GSPO[3]) / 4, abs=1e-12)


@pytest.mark.parametrize("config", [GspoConfig(), GspoConfig(advantage="mean")], ids=["std", "mean"])
def test_what_is_measured_of_advantages_has_the_unit_of_the_reward(config):
    # Divided by the deviation of (1, 0, 1, 0) the same weights would say 1 / 0.577 times as much.
    extras = step_extras(golden_sample(config))

    assert extras["advantage_estimate"] == pytest.approx(0.5 * (GSPO[0] - GSPO[1] + GSPO[2] - GSPO[3]) / 4, abs=1e-12)
    assert extras["bias_gspo"] == pytest.approx(extras["advantage_estimate"] ** 2, abs=1e-12)


@pytest.mark.parametrize("config", [GepoConfig(opsm_threshold=0.1), GrpoConfig(opsm_threshold=0.1)])
def test_extras_do_not_depend_on_micro_batches(config):
    whole, parts = step_extras(golden_sample(config)), step_extras(golden_sample(config, parts=((3, 0), (2,), (1,))))

    assert parts == pytest.approx(whole, abs=1e-12)
    # mean(log q - log p) is .1333 and .25 for the two bad rollouts of 3 and 2 tokens.
    assert whole["dropped_token_fraction"] == pytest.approx(5 / 14)
