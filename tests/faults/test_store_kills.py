"""Promises of a store in PostgreSQL under SIGKILL, on real processes; and that the order of commits is judged right."""

import json

import pytest

psycopg = pytest.importorskip("psycopg")

from campaigns.store_kills import KINDS, Campaign, is_kept  # noqa: E402
from heterorl.coordinator.store.database import set_meta  # noqa: E402 - needs psycopg
from heterorl.coordinator.store.postgres.postgres_engine import PostgresEngine, connect, open_store  # noqa: E402
from tests.support import commit_order  # noqa: E402
from tests.support.bucket import BucketServer  # noqa: E402
from tests.support.commit_order import Order, order_of  # noqa: E402
from tests.support.postgres import PostgresServer, binaries  # noqa: E402

pytestmark = pytest.mark.skipif(binaries() is None, reason="PostgreSQL is not installed: make programs")


@pytest.fixture
def server():
    server = PostgresServer("wal_level=logical")
    yield server
    server.stop()


@pytest.fixture
def bucket(tmp_path):
    bucket = BucketServer(tmp_path / "bucket")
    yield bucket
    bucket.stop()


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_nothing_acknowledged_is_lost_and_one_epoch_commits_when_all_are_killed(
    server, bucket, tmp_path, record_property
):
    campaign = Campaign(tmp_path, server, bucket, seed=3)
    campaign.answer_s = None
    summary = await campaign.run(kills=len(KINDS), pause_s=(0.0, 0.5))

    record_property("kills", json.dumps(summary))
    assert is_kept(summary), summary
    assert summary["kills"] == dict.fromkeys(KINDS, 1), summary


def test_two_sessions_that_write_by_turns_are_seen(server, tmp_path):
    url = server.make_schema(str(tmp_path))
    open_store(url).close()
    commit_order.begin(url)

    def write(engine, *, is_fenced=True):
        (engine.begin if is_fenced else lambda: engine._raw.execute("BEGIN"))()
        set_meta(engine.connection, "key", "value")
        engine.commit()

    first = open_store(url)
    write(first)
    # Without the lock, and the first one without its fence: what must never happen.
    second = PostgresEngine(connect(url))
    write(second)
    write(first, is_fenced=False)
    write(second)
    for engine in (first, second):
        engine.close()
    with psycopg.connect(url, autocommit=True) as stranger:
        stranger.execute("UPDATE meta SET value = 'x'")

    epochs = commit_order.committed(url)
    assert epochs == [2, 2, 3, 3, 2, 3, 0]
    assert order_of(epochs) == Order(transactions=7, epochs=3, at_once=2, late=2)


@pytest.mark.parametrize(
    ("epochs", "at_once", "late"),
    [([], 0, 0), ([1, 1, 2, 3, 3], 1, 0), ([1, 2, 1], 2, 1), ([2, 2, 1, 1], 1, 2), ([1, 2, 3, 2, 1], 3, 2)],
)
def test_order_of_commits(epochs, at_once, late):
    order = order_of(epochs)
    assert (order.at_once, order.late) == (at_once, late)
