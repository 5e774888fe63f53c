"""Every loss of research: however a step is divided, on long completions, and as a learner's."""

import pytest

from heterorl.learner.train.custom_loss_check import check_custom_loss
from research.tests.support.every_loss import LOSSES
from research.tests.support.loss_checks import (
    DIVISIONS,
    EXTREMES,
    assert_equal_however_divided,
    assert_finite_on_long_completions,
)

pytestmark = pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES.keys())


@pytest.mark.parametrize("division", DIVISIONS)
def test_loss_does_not_depend_on_micro_batches_their_order_or_padding(loss, division):
    assert_equal_however_divided(loss, division)


@pytest.mark.parametrize("sums", EXTREMES.values(), ids=EXTREMES.keys())
def test_loss_and_gradient_are_finite_on_16k_tokens(loss, sums):
    assert_finite_on_long_completions(loss, sums)


def test_a_learner_starts_with_it(loss):
    check_custom_loss(loss)
