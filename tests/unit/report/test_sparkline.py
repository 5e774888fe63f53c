"""What a screen of text shows of a run's numbers."""

import dataclasses
import math

from heterorl.report.figures import newest_evaluated, sparkline
from tests.support.run import REPORT


def test_the_newest_accuracy_is_of_the_last_step_that_has_one():
    scored = dataclasses.replace(REPORT, evaluation_accuracy=0.5)

    assert newest_evaluated([REPORT]) is None
    assert newest_evaluated([scored, REPORT]) == scored


def test_sparkline_goes_from_low_to_high():
    assert sparkline([]) == ""
    assert sparkline([0, 1, 2, 3, 4, 5, 6]) == "_.-=+*#"
    assert len(sparkline(list(range(300)))) <= 50
    assert set(sparkline([1, 1])) == {"_"}


def test_sparkline_leaves_out_numbers_that_are_not_finite():
    assert sparkline([math.nan, 0, math.inf, 6, -math.inf]) == "_#"
    assert sparkline([-1.7e308, 0, 1.7e308, 6]) == "_#"
    assert sparkline([math.nan]) == ""
