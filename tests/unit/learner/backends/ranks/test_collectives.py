"""What ranks make by themselves before they go on together: all go on, or all hear why not."""

import pytest

from heterorl.common.errors import ConfigError
from heterorl.learner.backends.ranks.collectives import MetByAll, RanksDiffer, make_together
from tests.support.thread_ranks import on_all_ranks

ERROR = ConfigError("loss.advantage", "beta needs rewards in [0, 1]")


def _made(failing, *, error=ERROR):
    def work(ranks):
        def make():
            if ranks.rank in failing:
                raise error
            return ranks.rank

        try:
            return make_together(make, ranks)
        finally:
            # The next operation of all is the same one.
            assert ranks.broadcast_bytes(b"next" if ranks.rank == 0 else b"") == b"next"

    return on_all_ranks(3, work)


def test_each_rank_has_its_own():
    assert _made(set()) == [0, 1, 2]


def test_error_of_all_is_rank_0s_own_and_the_others_wait_for_what_is_next():
    first, *others = _made({0, 1, 2})

    assert first is ERROR
    assert [(type(other), str(other)) for other in others] == [(MetByAll, f"rank 0: {ERROR}")] * 2


@pytest.mark.parametrize("error", [ERROR, MemoryError("no room")])
def test_error_of_one_rank_alone_is_told_to_all_and_may_be_gone_at_another_try(error):
    first, *others = _made({1}, error=error)

    assert isinstance(first, RanksDiffer)
    assert first.exit_code == 1
    assert f"rank 1 has met what rank 0 has not: {error}" in str(first)
    assert [type(other) for other in others] == [MetByAll, MetByAll]


def test_error_of_rank_0_alone_is_its_own():
    first, *others = _made({0})

    assert first is ERROR
    assert [type(other) for other in others] == [MetByAll, MetByAll]
