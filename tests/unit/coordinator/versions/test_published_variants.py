"""Names of a run's quantised variants, as a learner states them."""

import pytest

from heterorl.common.errors import InvalidRequest
from heterorl.coordinator.versions.published_variants import MAX_VARIANTS, check_names

MOST = [f"int8_{number}" for number in range(MAX_VARIANTS)]


@pytest.mark.parametrize("names", [[], ["fp8"], ["a" * 32], MOST])
def test_sound_names_are_taken(names):
    check_names(names)


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ([*MOST, "fp8"], f"at most {MAX_VARIANTS}"),
        (["fp8", "fp8"], "different"),
        (["a" * 33], "1 to 32"),
        ([""], "1 to 32"),
        (["../fp8"], "1 to 32"),
        (["FP8"], "1 to 32"),
        (["fp8\n"], "1 to 32"),
    ],
)
def test_names_that_no_path_may_have_are_refused(names, said):
    with pytest.raises(InvalidRequest, match=said):
        check_names(names)
