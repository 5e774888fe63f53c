"""Numbers of a step, on values small enough to do by hand."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from heterorl.learner.train.step_report import MicroBatchSample, StepEnd, ess_fraction, join
from tests.support.training import group, queued, rollout

F64 = torch.float64


def _sample(loss=0.5, weights=(1.0, 3.0), clipped=(False, True), kl=(0.2, 0.4), entropies=(1.0, 2.0, 3.0)):
    return MicroBatchSample(
        loss=loss,
        weights_M=torch.tensor(weights, dtype=F64),
        is_clipped_M=torch.tensor(clipped),
        kl_B=torch.tensor(kl, dtype=F64),
        entropies_N=torch.tensor(entropies, dtype=F64),
        sequences=join([]),
    )


def _report(samples, groups, *, is_applied=True, **changes):
    end = StepEnd(samples=samples, is_applied=is_applied, grad_norm=0.5, lr=0.0)
    return end.report(groups, **{"step": 7, "head_version": 10, "step_s": 0.1, **changes})


@pytest.mark.parametrize(
    ("weights", "share"),
    [
        ([1.0, 1.0, 1.0], 1.0),
        ([1.0, 0.0, 0.0, 0.0], 0.25),
        ([1.0, 3.0], 0.8),  # 16 / (2 * 10)
        ([math.exp(-400), 3 * math.exp(-400)], 0.8),
        ([0.0, 0.0], 0.0),
        ([], 0.0),
    ],
)
def test_ess_fraction_equals_square_of_sum_over_sum_of_squares(weights, share):
    assert ess_fraction(torch.tensor(weights, dtype=F64)) == pytest.approx(share, abs=1e-12)


def test_report_pools_micro_batches():
    one = _sample()
    other = _sample(loss=0.25, weights=(2.0,), clipped=(True,), kl=(0.9,), entropies=(6.0,))

    report = _report([one, other], [])

    # weights (1, 3, 2): ess 36 / (3 * 14), variance 2 / 3; kl 1.5 / 3; entropy 12 / 4
    assert report.loss == 0.75
    assert report.ess_fraction == pytest.approx(36 / 42)
    assert report.iw_variance == pytest.approx(2 / 3)
    assert report.clip_fraction == pytest.approx(2 / 3)
    assert report.kl == pytest.approx(0.5)
    assert report.entropy == pytest.approx(3.0)
    assert report.num_tokens == 4


def test_report_counts_age_by_the_oldest_version_of_each_group():
    ages = [(3, 1.0), (10, 2.0), (8, 30.0)]
    groups = [
        queued(group([rollout([1], [-1.0], reward)], version=version), policy_age_s=age)
        for reward, (version, age) in zip([0.0, 1.0, 0.5], ages, strict=True)
    ]

    report = _report([_sample()], groups)

    assert (report.staleness_mean, report.staleness_max) == (3.0, 7)
    assert report.policy_age_p50_s == 2.0
    assert report.reward_mean == pytest.approx(0.5)
    assert report.num_groups == 3


def test_report_names_the_version_the_step_leads_to():
    report = _report([_sample()], [], step=3, head_version=41)

    assert (report.step, report.version) == (3, 42)


def test_report_of_nothing_is_finite():
    report = _report([], [], is_applied=False)

    numbers = [report.loss, report.kl, report.ess_fraction, report.iw_variance, report.entropy, report.staleness_mean]
    assert np.isfinite(numbers).all()


def test_kl_without_staleness_is_of_the_tokens_of_the_newest_version_alone():
    groups = [queued(group([rollout([1], [-1.0], 0.0)], version=version)) for version in (10, 9)]
    sequences = join([])
    lengths = torch.tensor([4.0, 3.0, 2.0], dtype=F64)
    sample = dataclasses.replace(
        _sample(kl=(0.2, 0.4, 9.0)),
        places_B=torch.tensor([[0, 0], [0, 1], [1, 0]]),
        sequences=dataclasses.replace(sequences, lengths_B=lengths),
    )

    assert _report([sample], groups).kl_token_fresh == pytest.approx(0.6 / 7)
    assert _report([sample], groups, head_version=11).kl_token_fresh is None
    assert _report([_sample()], []).mask_share_bad is None
