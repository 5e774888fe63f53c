"""Lists of samples: every condition alone and together, pages that follow one another, and what a page costs."""

import itertools

import pytest
import pytest_asyncio

from heterorl.common.errors import InvalidRequest, UnknownSample
from heterorl.common.types.sample import SampleFilter, SampleKind, SamplePage
from heterorl.coordinator import sample_ring
from heterorl.coordinator.coordinator_config import CoordinatorConfig
from heterorl.coordinator.core import Coordinator
from tests.support.clock import ManualClock

pytestmark = pytest.mark.asyncio(loop_scope="module")
NUM = 15_000
WHY = ("consumed", "reward_mismatch", "stale_at_lease", "evaluation")
KINDS = ("consumed", "rejected", "dropped", "evaluation")
INSERT = (
    "INSERT INTO samples (id, kind, kept_because, detail, site, incarnation, sequence, version, oldest_version, kept,"
    " prompt_index, num_rollouts, num_truncated, num_tokens, reward_min, reward_mean, reward_max, num_bytes, has_texts,"
    " prompt_preview, completion_preview)"
    " VALUES (?, ?, ?, '', ?, 'i', ?, ?, 0, 1.5, 0, 8, ?, 100, ?, ?, ?, 6144, 0, '', '')"
)


def rows(count):
    """Each three-thousandth is of another kind than the rest."""
    for number in range(1, count + 1):
        which = 1 + number // 3_000 % 3 if number % 3_000 == 0 else 0
        low = number % 100 / 100
        reward = (None, None, None) if number % 1000 == 7 else (low, low, low + 0.5)
        yield (
            number, KINDS[which], WHY[which], f"site-{number % 5}", number, number // 15, int(number % 2 == 0), *reward,
        )  # fmt: skip


@pytest.fixture(scope="module")
def many():
    return list(rows(NUM))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def core(tmp_path_factory, many):
    """Tests only read it: so many rows are inserted once."""
    core = await Coordinator.open(CoordinatorConfig(data_dir=tmp_path_factory.mktemp("listing")), ManualClock())
    await core.database.run(lambda connection: connection.executemany(INSERT, many))
    yield core
    await core.close()


def expected(many, wanted):
    """A slow reference over all rows."""
    found = []
    for number, kind, why, site, _, version, truncated, low, _, high in many:
        if wanted.site and site != wanted.site:
            continue
        if wanted.kind is not None and kind != wanted.kind.value:
            continue
        if wanted.kept_because and why != wanted.kept_because:
            continue
        if wanted.first_version is not None and version < wanted.first_version:
            continue
        if wanted.last_version is not None and version > wanted.last_version:
            continue
        if wanted.min_reward is not None and not (high is not None and high >= wanted.min_reward):
            continue
        if wanted.max_reward is not None and not (low is not None and low <= wanted.max_reward):
            continue
        if wanted.is_truncated is not None and bool(truncated) != wanted.is_truncated:
            continue
        found.append(number)
    return found


async def walk(core, wanted, page):
    """Ids of all pages, one after another."""
    found, rest = [], page
    while rest is not None:
        listed = await core.list_samples(wanted=wanted, page=rest)
        assert len(listed.samples) <= page.limit
        found += [entry.id for entry in listed.samples]
        rest = listed.next_page
    return found


@pytest.mark.parametrize(
    "wanted",
    [
        SampleFilter(site="site-3", first_version=980),
        SampleFilter(kind=SampleKind.REJECTED),
        SampleFilter(kept_because="stale_at_lease"),
        SampleFilter(first_version=999, last_version=999),
        SampleFilter(first_version=3, last_version=5),
        SampleFilter(min_reward=1.48, site="site-4"),
        SampleFilter(max_reward=0.01, is_truncated=True, first_version=900),
        SampleFilter(is_truncated=False, site="site-1", kind=SampleKind.CONSUMED, last_version=40),
        SampleFilter(site="nobody"),
        SampleFilter(min_reward=3.0),
    ],
)
async def test_pages_hold_just_what_is_asked_for_in_both_orders(core, many, wanted):
    right = expected(many, wanted)

    assert await walk(core, wanted, SamplePage(limit=200)) == right[::-1]
    assert await walk(core, wanted, SamplePage(limit=200, is_oldest_first=True)) == right


async def test_bounds_of_ids_are_left_out(core):
    page = SamplePage(limit=5, before=1000, after=10, is_oldest_first=True)

    assert list(itertools.islice(await walk(core, SampleFilter(), page), 3)) == [11, 12, 13]
    listed = await core.list_samples(wanted=SampleFilter(), page=SamplePage(limit=3, before=1000))
    assert [entry.id for entry in listed.samples] == [999, 998, 997]
    assert listed.next_page == SamplePage(limit=3, before=997)


@pytest.mark.sqlite
@pytest.mark.parametrize(
    "wanted",
    [
        SampleFilter(),
        SampleFilter(site="site-3"),
        SampleFilter(kind=SampleKind.REJECTED),
        SampleFilter(kept_because="evaluation"),
        SampleFilter(first_version=7, last_version=7),
        SampleFilter(first_version=3, last_version=5, min_reward=1.4),
    ],
)
async def test_no_page_reads_the_list_from_its_beginning(core, wanted):
    statements = []

    def operation(connection):
        connection.set_trace_callback(statements.append)
        sample_ring.read_page(connection, wanted, SamplePage(limit=50))
        connection.set_trace_callback(None)
        return [
            str(row[3]) for statement in statements for row in connection.execute(f"EXPLAIN QUERY PLAN {statement}")
        ]

    plans = await core.database.run(operation)
    assert plans
    assert all(plan.startswith("SEARCH samples") for plan in plans), plans


async def test_a_number_that_the_store_cannot_count_to_is_refused_before_it(core):
    for page in (SamplePage(before=1 << 63), SamplePage(after=1 << 63)):
        with pytest.raises(InvalidRequest, match="is not an id of a sample"):
            await core.list_samples(wanted=SampleFilter(), page=page)
    with pytest.raises(UnknownSample):
        await core.get_sample(sample_id=(1 << 64) - 1)
