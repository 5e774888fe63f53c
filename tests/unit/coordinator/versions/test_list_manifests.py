"""Manifests of a range: newest first, exact, and no more than fit."""

import sqlite3

import pytest

from heterorl.common.errors import InvalidRequest, UnknownVersion
from heterorl.coordinator.coordinator_config import CoordinatorConfig
from heterorl.coordinator.core import Coordinator
from heterorl.coordinator.versions import pull_plans
from heterorl.coordinator.versions.chain import MAX_MANIFESTS, Chain
from tests.support.clock import ManualClock
from tests.support.run import Run

SIZES = [10, 20, 30, 40, 50]


@pytest.fixture
def connection():
    made = sqlite3.connect(":memory:")
    made.execute("CREATE TABLE stated (version INTEGER PRIMARY KEY, manifest BLOB, variant TEXT DEFAULT '')")
    yield made
    made.close()


def fill(connection, sizes):
    data = [bytes([version % 256]) * size for version, size in enumerate(sizes)]
    connection.executemany("INSERT INTO stated (version, manifest) VALUES (?, ?)", enumerate(data))
    return data


def test_range_comes_newest_first(connection):
    data = fill(connection, SIZES)

    assert Chain(connection).manifests(first=1, last=3) == (data[3], data[2], data[1])
    assert Chain(connection).manifests(first=2, last=2) == (data[2],)


@pytest.mark.parametrize(("max_bytes", "count"), [(1, 1), (50, 1), (89, 1), (90, 2), (149, 4), (150, 5), (999, 5)])
def test_answer_holds_as_many_as_fit_and_at_least_one(connection, max_bytes, count):
    data = fill(connection, SIZES)

    assert Chain(connection).manifests(first=0, last=4, max_bytes=max_bytes) == tuple(data[::-1][:count])


def test_number_of_manifests_is_bounded(connection):
    data = fill(connection, [1] * (MAX_MANIFESTS + 10))

    assert Chain(connection).manifests(first=0, last=MAX_MANIFESTS + 5) == tuple(data[6 : MAX_MANIFESTS + 6][::-1])


def test_impossible_ranges_are_refused(connection):
    fill(connection, SIZES)

    with pytest.raises(InvalidRequest):
        Chain(connection).manifests(first=3, last=2)
    with pytest.raises(UnknownVersion):
        Chain(connection).manifests(first=3, last=5)
    # A range that begins before the first version holds what there is.
    assert len(Chain(connection).manifests(first=-(2**63), last=4)) == 5


async def test_plan_over_large_manifests_carries_its_targets_alone_and_the_others_are_listed(tmp_path, monkeypatch):
    core = await Coordinator.open(CoordinatorConfig(data_dir=tmp_path / "data", merged_bytes=0), ManualClock())
    run = Run(core, tmp_path)
    await run.begin()
    for _ in range(9):
        await run.publish()
    target = await core.get_signed_manifest(version=8)

    async def plan():
        return await core.plan_pull(have_version=0, have_root=run.roots[0], want_version=-1)

    small = await plan()
    assert len(small.manifests) == len(small.payloads) == 8
    monkeypatch.setattr(pull_plans, "MAX_MANIFEST_BYTES", 3 * len(target.data))
    large = await plan()

    assert large.payloads == small.payloads
    assert large.manifests == (target.data,)
    listed = await core.list_manifests(first_version=1, last_version=8)
    assert tuple(reversed(listed)) == small.manifests
    await core.close()
