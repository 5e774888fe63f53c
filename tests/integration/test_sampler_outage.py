"""A sampler's process that loses its coordinator, or its life, in the middle of its work."""

import asyncio
import datetime
import sqlite3

import pytest

from heterorl.common.identity.tls import TlsConfig
from heterorl.common.rpc.client import CoordinatorClient
from tests.support.cluster import Cluster, account
from tests.support.relay import Relay

REWARD = "import time\ndef score(prompt, completion, answer):\n    time.sleep(0.1)\n    return float(len(completion))\n"


def cluster_of(directory, **sampler):
    (directory / "slow.py").write_text(REWARD)
    task = {"name": "arithmetic", "digits": 1, "reward": "slow:score", "reward_path": str(directory)}
    return Cluster(
        directory,
        coordinator={"max_outstanding_groups": 400, "work_lease_s": 60.0},
        learner={"task": task},
        sampler={"task": {**task, "reward_workers": 1}, "engine": {"batch_rows": 4, "threads": 1}, **sampler},
    )


def next_sequence(cluster):
    with sqlite3.connect(cluster.directory / "site-a" / "outbox.sqlite") as connection:
        (row,) = connection.execute("SELECT value FROM meta WHERE key = 'next_sequence'").fetchall()
    connection.close()
    return int(row[0])


def site_of(status):
    return next((site for site in status.sites if site.site == "site-a"), None)


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_site_cut_off_works_on_from_its_reserve_and_delivers_everything_afterwards(tmp_path):
    cluster = cluster_of(tmp_path, work_ahead_s=60.0)
    try:
        cluster.start("coordinator")
        cluster.start("learner")
        async with (
            Relay(cluster.address, one_way_s=0.075).open() as relay,
            CoordinatorClient(cluster.address, tls=TlsConfig(insecure=True)) as client,
        ):
            cluster.sampler["coordinator"] = f"127.0.0.1:{relay.port}"
            cluster.start("site-a")
            # 10 completions a second, two a group: the reserve holds many times what is under way.
            status = await cluster.until(
                client, lambda status: (site := site_of(status)) is not None and site.work_leased >= 60
            )
            # The answer with the reserve has arrived when groups came after it.
            acked = status.ledger.acked
            await cluster.until(client, lambda status: status.ledger.acked >= acked + 3)
            relay.cut()
            made = next_sequence(cluster)
            while next_sequence(cluster) < made + 30:  # noqa: ASYNC110 - another process's file
                await asyncio.sleep(0.1)
            relay.mend()
            made = next_sequence(cluster)
            await cluster.until(client, lambda status: status.ledger.acked >= made - 1)
            assert await cluster.end("site-a") == 0
    finally:
        cluster.stop()

    found = account(cluster, set(), ["site-a"])
    assert (found["lost"], found["duplicated"], found["ledger_balanced"]) == (0, 0, True)


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_signal_in_the_middle_of_long_completions_gives_them_up_and_hands_everything_back(
    tmp_path, record_property
):
    # Rewards are computed at once, so that the engine is full at any instant; the tiny model has room for 256 tokens.
    long = {"max_new_tokens": 200}
    task = {"name": "arithmetic", "digits": 1, "reward_workers": 1}
    cluster = Cluster(
        tmp_path,
        coordinator={"max_outstanding_groups": 400, "work_lease_s": 60.0},
        learner={"task": task, "sampling": long},
        sampler={"task": task, "sampling": long, "engine": {"batch_rows": 64, "threads": 1}},
    )
    try:
        cluster.start("coordinator")
        cluster.start("learner")
        child = cluster.start("site-a")
        async with CoordinatorClient(cluster.address, tls=TlsConfig(insecure=True)) as client:
            await cluster.until(
                client,
                lambda status: (
                    (site := site_of(status)) is not None and site.work_leased >= 32 and status.ledger.acked > 0
                ),
            )
            assert await cluster.end("site-a") == 0
            spooled = cluster.outbox_sequences("site-a")[1]
            await cluster.until(client, lambda status: site_of(status).work_leased <= len(spooled))
    finally:
        cluster.stop()

    begun, ended = (instant_of(child.log.read_text(), words) for words in ("the sampler stops with", "stopped: "))
    assert begun <= ended
    record_property("end_s", (ended - begun).total_seconds())


def instant_of(log, words):
    (line,) = [line for line in log.splitlines() if words in line]
    return datetime.datetime.fromisoformat(line.split()[0])
