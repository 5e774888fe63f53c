"""Evaluations since a tracker's newest: each once, in order, none before it has ended; and their row."""

import pytest

from heterorl.common import api as module
from heterorl.common.errors import Draining, QuotaExceeded, Unreachable
from heterorl.common.types.evaluation import Estimate, EvaluationState
from heterorl.track.follow import EvaluationFeed
from heterorl.track.tracker import evaluation_row, set_of
from tests.support.evaluations import evaluation

OPEN, RUNNING = EvaluationState.OPEN, EvaluationState.RUNNING


class Listed:
    def __init__(self, *found):
        self.found, self.cursors = list(found), []

    async def list_evaluations(self, *, after_version, limit):
        self.cursors.append(after_version)
        found = sorted((each for each in self.found if each.version > after_version), key=lambda each: each.version)
        # All of a version or none of it.
        last = found[limit - 1].version if len(found) > limit else None
        return tuple(each for each in found if last is None or each.version < last or each.version == found[0].version)


async def read(feed):
    return [(found.version, found.task_set) for found in await feed.read()]


async def test_one_that_has_not_ended_holds_back_the_later_ones_of_its_set():
    api = Listed(evaluation(1), evaluation(2, RUNNING), evaluation(3), evaluation(2, task_set="code"))
    feed = EvaluationFeed(api, after={})
    assert await read(feed) == [(1, "math"), (2, "code")]
    assert feed.is_waiting
    api.found[1] = evaluation(2)
    api.found.append(evaluation(4, OPEN))

    assert await read(feed) == [(2, "math"), (3, "math")]
    assert not feed.is_waiting
    assert await read(feed) == []
    # What cannot change any more is not asked for again.
    assert api.cursors[0] == -1
    assert api.cursors[-2] == 3


async def test_goes_on_behind_what_a_tracker_has_of_each_set():
    api = Listed(evaluation(1), evaluation(2), evaluation(1, task_set="code"))

    assert await read(EvaluationFeed(api, after={"math": 1})) == [(1, "code"), (2, "math")]
    assert await read(EvaluationFeed(api, after={"math": 2, "code": 1})) == []


async def test_pages_are_read_to_the_end(monkeypatch):
    monkeypatch.setattr(module, "PAGE", 2)
    api = Listed(*(evaluation(version) for version in range(1, 6)))

    assert await read(EvaluationFeed(api, after={})) == [(version, "math") for version in range(1, 6)]


async def test_a_coordinator_that_is_away_is_said():
    class Failing(Listed):
        async def list_evaluations(self, *, after_version, limit):
            raise self.found[0]

    for error in (Unreachable("away"), Draining("stopping"), QuotaExceeded("too many calls", retry_after_s=1.0)):
        with pytest.raises(type(error)):
            await read(EvaluationFeed(Failing(error), after={}))


def test_row_has_every_number_under_its_set():
    average = Estimate(mean=0.5, low=0.25, high=0.75, num_prompts=2)

    assert evaluation_row(evaluation(7, average=average)) == {
        "evaluation/math/version": 7, "evaluation/math/is_done": 1, "evaluation/math/num_prompts": 2,
        "evaluation/math/num_samples": 8, "evaluation/math/num_errors": 1, "evaluation/math/mean_tokens": 3.5,
        "evaluation/math/truncated_fraction": 2 / 9, "evaluation/math/mean": 0.5, "evaluation/math/mean_low": 0.25,
        "evaluation/math/mean_high": 0.75, "evaluation/math/pass_at_4": 0.5, "evaluation/math/pass_at_4_low": 0.25,
        "evaluation/math/pass_at_4_high": 0.75,
    }  # fmt: skip
    assert "evaluation/math/mean" not in evaluation_row(evaluation(7, EvaluationState.INCOMPLETE))


@pytest.mark.parametrize(
    ("name", "task_set"),
    [
        ("evaluation/math/version", "math"),
        ("evaluation/a/b/version", "a/b"),
        ("version", None),
        ("evaluation/math/mean", None),
    ],
)
def test_a_version_names_its_set(name, task_set):
    assert set_of(name) == task_set
