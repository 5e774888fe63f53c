"""Losses without published numbers, on the golden rollouts: against numpy, and against the numbers that numpy gave."""

import numpy as np
import pytest

from heterorl.learner.loss.loss_config import (
    DecoupledPpoConfig,
    GepoConfig,
    GepoOneSidedConfig,
    GepoProductConfig,
    GepoWholeConfig,
    GrpoConfig,
    ImpalaConfig,
    MoisConfig,
    ReinforceConfig,
)
from tests.support.losses import GOLDEN_LEARNER, GOLDEN_REWARDS, GOLDEN_SAMPLER, groups_of, run_loss

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


def _reinforce():
    return -(A * MEANS * LENGTHS).sum() / 14, -A * LENGTHS / 14


def _one_sided():
    # The last, bad, has w = .432 < .8.
    return -np.where(W < 0.8, 0.8 * A, W * A).mean(), np.where(W < 0.8, 0, -A * W) / 4


def _whole():
    # The bad ones have lost .4 and .5 nats, both more than .3.
    return -np.where(IS_GOOD, W * A, 0).mean(), np.where(IS_GOOD, -A * W, 0) / 4


def _product():
    return _halves(W * A, np.minimum(1, np.exp(Z)))


def _leave_one_out():
    q = np.exp(SAMPLER_MEANS)
    others = [np.delete(q, i) for i in range(4)]
    w = np.exp(MEANS) / [(x**2).sum() / x.sum() for x in others]
    is_outside = np.where(IS_GOOD, w > 1.2, w < 0.8)
    return -np.where(is_outside, w.clip(0.8, 1.2) * A, w * A).mean(), np.where(is_outside, 0, -A * w) / 4


def _impala():
    # With both caps at 1 the weight of a token is the product of min(1, r) from it to the end.
    weights = [np.cumprod(np.minimum(1, np.exp(p - q))[::-1])[::-1] for p, q in zip(P, Q, strict=True)]
    value = -sum((w * a * p).sum() for w, a, p in zip(weights, A, P, strict=True)) / 14
    return value, np.array([-a * w.sum() / 14 for w, a in zip(weights, A, strict=True)])


def _mois(is_full):
    value, rows = 0.0, []
    for p, q, a in zip(P, Q, A, strict=True):
        # Eight versions old: half learner, half sampler. One ratio, 1.245, is beyond the clip.
        r = 2 * np.exp(p) / (np.exp(p) + np.exp(q))
        is_outside = (r > 1.2) if a > 0 else (r < 0.8)
        value -= (np.where(is_outside, r.clip(0.8, 1.2), r) * a).mean() / 4
        rows.append(-(np.where(is_outside, 0, r * (1 - r / 2 if is_full else 1)) * a).mean() / 4)
    return value, np.array(rows)


def _dual():
    value, rows = 0.0, []
    for p, q, a in zip(P, Q, -A / STD, strict=True):
        r = np.exp(p - q)
        clipped = np.minimum(r * a, r.clip(0.8, 1.2) * a)
        value -= np.maximum(clipped, 1.3 * a).mean() / 4 if a < 0 else clipped.mean() / 4
        is_outside = (r > 1.3) | (r < 0.8) if a < 0 else r > 1.2
        rows.append(-(np.where(is_outside, 0, r) * a).mean() / 4)
    return value, np.array(rows)


def _decoupled():
    value, rows = 0.0, []
    for p, q, a in zip(P, Q, -A / STD, strict=True):
        # Eight versions old: the proximal policy is 7/8 of the way. One product, e^.4375 capped at 1.3 times e^.0625,
        # is beyond e^.3.
        behaviour, r = np.minimum(np.exp(0.875 * (p - q)), 1.3), np.exp(0.125 * (p - q))
        product = behaviour * r
        value -= (product.clip(max=np.exp(0.3)) * a).sum() / 14
        rows.append(-(np.where(product > np.exp(0.3), 0, product) * a).sum() / 14)
    return value, np.array(rows)


# Configuration, rewards, numpy's way, value, gradient summed over each rollout.
CASES = {
    "reinforce": (
        ReinforceConfig(), GOLDEN_REWARDS, _reinforce,
        -0.025714285714286, [-0.178571428571429, 0.107142857142857, -0.142857142857143, 0.071428571428571],
    ),
    "gepo_1s": (
        GepoOneSidedConfig(), GOLDEN_REWARDS, _one_sided,
        -0.068773516636977, [-0.157151422536395, 0.122226573473352, -0.133848667573934, 0],
    ),
    "gepo_product": (
        GepoProductConfig(), GOLDEN_REWARDS, _product,
        -0.454000775827732, [-0.157151422536395, 0.083790005754455, -0.133848667573934, 0.075816332464079],
    ),
    # Nothing has drifted by 1.1 nats.
    "gepo_whole": (
        GepoWholeConfig(), GOLDEN_REWARDS, _one_sided,
        -0.068773516636977, [-0.157151422536395, 0.122226573473352, -0.133848667573934, 0],
    ),
    "gepo_whole within .3": (
        GepoWholeConfig(drift_limit=0.3), GOLDEN_REWARDS, _whole,
        -0.291000090110329, [-0.157151422536395, 0, -0.133848667573934, 0],
    ),
    "gepo leaving itself out": (
        GepoConfig(denominator="leave_one_out"), GOLDEN_REWARDS, _leave_one_out,
        -0.052543919742514, [0, 0.128599714863158, -0.131143634605672, 0],
    ),
    "impala": (
        ImpalaConfig(), GOLDEN_REWARDS, _impala,
        0.022897096140109, [-0.177864238332384, 0.080994699363751, -0.141442762379054, 0.050902193313951],
    ),
    "mois": (
        MoisConfig(), GOLDEN_REWARDS, lambda: _mois(False),
        -0.036049875403869, [-0.130483276846802, 0.116686563404964, -0.094218597696513, 0.109465435734483],
    ),
    "mois differentiated": (
        MoisConfig(mixture_gradient="full"), GOLDEN_REWARDS, lambda: _mois(True),
        -0.036049875403869, [-0.062242285613779, 0.062163282872543, -0.046863676046731, 0.061496860550326],
    ),
    # The long ratios belong to bad rollouts: e^.5 = 1.65 is above 1.3.
    "grpo with dual clip": (
        GrpoConfig(dual_clip=1.3), [0.0, 1.0, 0.0, 1.0], _dual,
        0.113228075515585, [0.237437132931975, -0.189819243200483, 0.164054699351916, -0.168796892235880],
    ),
    "decoupled_ppo loglinear": (
        DecoupledPpoConfig(proximal="loglinear", behaviour_cap=1.3, max_log_weight=0.3), [0.0, 1.0, 0.0, 1.0], _decoupled,
        0.351015811935961, [0.339195904188536, -0.162702208457556, 0.187491084973618, -0.096455366991931],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("config", "rewards", "way", "value", "rows"), CASES.values(), ids=CASES.keys())
def test_loss_equals_golden_value_and_gradient(config, rewards, way, value, rows):
    outcome = run_loss(config, GOLDEN_LEARNER, groups_of([GOLDEN_SAMPLER], [rewards]), head_version=9)
    expected, expected_rows = way()

    assert expected == pytest.approx(value, abs=1e-13)
    assert expected_rows.tolist() == pytest.approx(rows, abs=1e-13)
    assert outcome.value == pytest.approx(expected, abs=1e-13)
    assert outcome.row_sums == pytest.approx(expected_rows.tolist(), abs=1e-13)
