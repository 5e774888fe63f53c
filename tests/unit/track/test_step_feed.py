"""What is new since a mark, over pages, rollbacks and reports that come while one looks."""

import dataclasses

import pytest

from heterorl.common import api as module
from heterorl.common.errors import OperatorError
from heterorl.track.follow import StepFeed
from heterorl.track.tracker import Mark, mark_of
from tests.support.run import REPORT


def report(step, version):
    return dataclasses.replace(REPORT, step=step, version=version)


class Listed:
    """ListSteps, as the coordinator answers it; counts what it was asked."""

    def __init__(self, *marks):
        self.reports = [report(step, version) for version, step in marks]
        self.cursors = []

    async def list_steps(self, *, after_step, limit):
        self.cursors.append(after_step)
        found = sorted((r for r in self.reports if r.step > after_step), key=lambda r: (r.step, r.version))
        return tuple(found[:limit])


def marks(reports):
    return [(entry.version, entry.step) for entry in reports]


async def test_goes_on_from_its_cursor():
    api = Listed((1, 1), (2, 2), (3, 3))
    feed = StepFeed(api, after=Mark(1, 1))
    assert marks(await feed.read(2)) == [(2, 2)]
    assert marks(await feed.read(2)) == []
    assert marks(await feed.read(3)) == [(3, 3)]
    assert api.cursors == [0, 2, 3, 1, 2, 3]


@pytest.mark.parametrize("known", [0.0, 1000.0])
async def test_version_that_was_published_again_after_a_restore_is_refused(known):
    """The new history may be longer than the tracker's before somebody looks."""
    api = Listed((1, 1), (2, 2), (3, 3))
    api.reports = [dataclasses.replace(entry, published_time=2000.0 + entry.step) for entry in api.reports]
    feed = StepFeed(api, after=Mark(2, 2), published=known)
    if known:
        with pytest.raises(OperatorError, match=r"newest version was published again.*--run"):
            await feed.read(3)
        return

    assert marks(await feed.read(3)) == [(3, 3)]
    api.reports = [dataclasses.replace(entry, published_time=3000.0) for entry in api.reports] + [report(4, 4)]
    with pytest.raises(OperatorError, match="newest version was published again"):
        await feed.read(4)


async def test_steps_taken_again_are_new_though_they_are_behind_the_cursor():
    api = Listed((1, 1), (2, 2), (3, 3))
    feed = StepFeed(api, after=None)
    await feed.read(3)
    # Version 4 went back to version 1, and by now the run is beyond where it was.
    api.reports = [report(1, 1), report(2, 4), report(3, 5), report(4, 6)]

    assert marks(await feed.read(6)) == [(4, 2), (5, 3), (6, 4)]


async def test_one_version_of_several_steps_taken_again_is_whole():
    api = Listed((1, 1), (1, 2), (1, 3))
    feed = StepFeed(api, after=None)
    await feed.read(1)
    api.reports = [report(step, 2) for step in (1, 2, 3, 4)]

    assert marks(await feed.read(2)) == [(2, 1), (2, 2), (2, 3), (2, 4)]


async def test_a_version_without_steps_hides_none():
    api = Listed((1, 1))
    feed = StepFeed(api, after=None)
    await feed.read(1)
    assert marks(await feed.read(2)) == []
    api.reports.append(report(2, 3))

    assert marks(await feed.read(3)) == [(3, 2)]


async def test_what_is_committed_while_one_lists_is_the_next_reading():
    feed = StepFeed(Listed((1, 1), (2, 2)), after=None)

    assert marks(await feed.read(1)) == [(1, 1)]
    assert marks(await feed.read(2)) == [(2, 2)]


@pytest.mark.parametrize("limit", [2, 3, 4, 5])
async def test_a_page_that_ends_between_two_versions_of_a_step_loses_none(monkeypatch, limit):
    monkeypatch.setattr(module, "PAGE", limit)
    api = Listed((1, 1), (2, 2), (5, 2), (3, 3), (6, 3), (4, 4), (7, 5))
    found = await StepFeed(api, after=None).read(7)

    assert [mark_of(entry).version for entry in found] == [1, 2, 3, 4, 5, 6, 7]


async def test_an_answer_that_ends_early_between_two_versions_of_a_step_loses_none():
    class Full(Listed):
        async def list_steps(self, *, after_step, limit):
            return (await super().list_steps(after_step=after_step, limit=limit))[:2]

    api = Full((1, 1), (2, 2), (5, 2), (3, 3), (6, 3))

    assert [mark_of(entry).version for entry in await StepFeed(api, after=None).read(6)] == [1, 2, 3, 5, 6]


async def test_a_reading_that_failed_is_made_again():
    class Cut(Listed):
        is_cut = True

        async def list_steps(self, *, after_step, limit):
            if self.is_cut:
                raise ConnectionError
            return await super().list_steps(after_step=after_step, limit=limit)

    api = Cut((1, 1))
    feed = StepFeed(api, after=None)
    with pytest.raises(ConnectionError):
        await feed.read(1)
    api.is_cut = False

    assert marks(await feed.read(1)) == [(1, 1)]
