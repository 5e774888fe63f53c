"""Golden numbers of the losses that the lab keeps: against numpy, against the numbers that numpy gave, and GSPO's."""

import numpy as np
import pytest

from heterorl_research.losses.kinds import (
    GepoQuantileConfig,
    GepoTemperedConfig,
    GspoTokenConfig,
    TbaConfig,
    VcpoConfig,
)
from tests.support.losses import GOLDEN_LEARNER, GOLDEN_REWARDS, GOLDEN_SAMPLER, groups_of, reference_row, run_loss

Q = [np.array(row) for row in GOLDEN_SAMPLER]
P = [np.array(row) for row in GOLDEN_LEARNER]
LENGTHS = np.array([5, 3, 4, 2])
A = np.array([0.5, -0.5, 0.5, -0.5])
IS_GOOD = A > 0
STD = 0.5 / 0.8658754297607
"""std (ddof 1) of (1, 0, 1, 0), + 1e-4."""
Z = np.array([(p - q).sum() for p, q in zip(P, Q, strict=True)])
MEANS = np.array([p.mean() for p in P])
SAMPLER_MEANS = np.array([q.mean() for q in Q])
W = np.exp(MEANS) * np.exp(SAMPLER_MEANS).sum() / np.exp(2 * SAMPLER_MEANS).sum()


def _halves(good_values, bad_weights):
    """A rollout mean of w A for the good and of u A l for the bad ones, and its gradient by row."""
    values = np.where(IS_GOOD, good_values, bad_weights * A * MEANS)
    return -values.mean(), np.where(IS_GOOD, -A * W, -A * bad_weights) / 4


def _quantile():
    # z of the bad ones, -.4 and -.5, is so even that their effective share is .998: ceil(.998 x 2) = 2 stay.
    return _halves(W * A, np.ones(4))


def _tempered(exponent):
    u = np.exp(exponent * Z)
    return _halves(W * A, np.minimum(1, u / u.mean()))


def _vcpo():
    # The loss takes 1 / T of a rollout's gradient.
    weights = np.array([((1 - np.exp(p)) ** 2).sum() for p in P]) * np.exp(2 * Z) / LENGTHS**2
    # The same baseline in units of the reward: the weighted share of right answers.
    advantages = (np.array(GOLDEN_REWARDS) - (weights * GOLDEN_REWARDS).sum() / weights.sum()) / STD
    return -(np.exp(Z) * advantages * MEANS).mean(), -np.exp(Z) * advantages / 4


def _tba():
    gaps = np.array([(p - reference_row(q)).sum() for p, q in zip(P, Q, strict=True)])
    balanced = A - 0.1 * (gaps - gaps.mean())
    return -(balanced * MEANS * LENGTHS).mean(), -balanced * LENGTHS / 4


# Configuration, rewards, numpy's way, value, gradient summed over each rollout.
CASES = {
    "gepo_quantile": (
        GepoQuantileConfig(), GOLDEN_REWARDS, _quantile,
        -0.551416756776996, [-0.157151422536395, 0.125, -0.133848667573934, 0.125],
    ),
    # The effective share of e^z is .838: .5 does not bind, .9 does at the exponent .7368526420419778.
    "gepo_tempered": (
        GepoTemperedConfig(), GOLDEN_REWARDS, lambda: _tempered(1.0),
        -0.434978040672281, [-0.157151422536395, 0.074011426718879, -0.133848667573934, 0.066968308257468],
    ),
    "gepo_tempered to .9": (
        GepoTemperedConfig(tempering_ess=0.9), GOLDEN_REWARDS, lambda: _tempered(0.7368526420419778),
        -0.462597995289774, [-0.157151422536395, 0.086651115571475, -0.133848667573934, 0.080495769184490],
    ),
    "vcpo": (
        VcpoConfig(), GOLDEN_REWARDS, _vcpo,
        -0.063634839116342, [-0.275924723264122, 0.171087222261783, -0.301909736434079, 0.154806120450296],
    ),
    "tba": (
        TbaConfig(beta=0.1), GOLDEN_REWARDS, _tba,
        -0.075910101387799, [-0.550300486987408, 0.335600019925453, -0.431875497385076, 0.212324596870533],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("config", "rewards", "way", "value", "rows"), CASES.values(), ids=CASES.keys())
def test_loss_equals_golden_value_and_gradient(config, rewards, way, value, rows):
    groups = groups_of([GOLDEN_SAMPLER], [rewards])
    outcome = run_loss(config.learner_loss(), GOLDEN_LEARNER, groups, head_version=9)
    expected, expected_rows = way()

    assert expected == pytest.approx(value, abs=1e-13)
    assert expected_rows.tolist() == pytest.approx(rows, abs=1e-13)
    assert outcome.value == pytest.approx(expected, abs=1e-13)
    assert outcome.row_sums == pytest.approx(expected_rows.tolist(), abs=1e-13)


def test_gspo_token_equals_golden_value_and_gradient():
    config = GspoTokenConfig(advantage="mean").learner_loss()

    outcome = run_loss(config, GOLDEN_LEARNER, groups_of([GOLDEN_SAMPLER], [GOLDEN_REWARDS]))

    assert outcome.value == pytest.approx(-0.069811727384304, abs=1e-9)
    assert outcome.row_sums == pytest.approx([-0.136498515253525, 0.109396664880368, -0.142709877011148, 0], abs=1e-9)
