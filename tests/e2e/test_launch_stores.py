"""A run from one run.toml past one machine: PostgreSQL, a bucket, a standby, a relay; its coordinator dies for good."""

import asyncio
import logging
import time
from typing import Any

import pytest

pytest.importorskip("psycopg")
pytest.importorskip("obstore")
pytest.importorskip("moto")

from heterorl.common.identity.tls import TlsConfig, files_in
from heterorl.common.rpc.client import CoordinatorClient
from tests.support.bucket import BucketServer
from tests.support.cluster import Cluster
from tests.support.machine import Machine, rendered, units
from tests.support.ports import free_port
from tests.support.postgres import PostgresServer, binaries

pytestmark = pytest.mark.skipif(binaries() is None, reason="PostgreSQL is not installed: make programs")
_LOG = logging.getLogger(__name__)
FIRST, SECOND = "127.0.0.1", "127.0.0.2"
PREFIX = "launched"


@pytest.fixture
def postgres():
    server = PostgresServer()
    yield server
    server.stop()


@pytest.fixture
def bucket():
    server = BucketServer()
    yield server
    server.stop()


def run_table(cluster: Cluster, postgres: PostgresServer, payloads: dict[str, Any]) -> dict[str, Any]:
    quiet: dict[str, Any] = {"metrics_port": 0}
    reading = {**quiet, "payload_urls": "any"}
    return {
        "run": {
            "id": "launched", "model_dir": str(cluster.model_dir), "group_size": 2, "groups_per_step": 4,
            "max_steps": 1000, "task": {"name": "arithmetic", "digits": 1}, "sampling": {"max_new_tokens": 3},
        },
        "coordinator": {
            "host": FIRST, "port": free_port(), "postgres": {"url": postgres.url(), "standby": [SECOND]},
            "config": {**quiet, "payloads": payloads, "learner_lease_s": 3.0},
        },
        "learner": {"backend": {"lr": 1e-3, "threads": 1}, "config": {**reading, "retry_cap_s": 1.0}},
        "relays": [{"site": "eu", "host": FIRST, "port": free_port(), "config": reading}],
        "samplers": [
            {
                "site": "eu", "count": 2, "relay": "eu", "engine": {"threads": 1, "batch_rows": 16},
                "config": {**reading, "heartbeat_s": 0.5},
            }
        ],
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_run_goes_on_with_the_standby_when_its_coordinator_is_gone_for_good(tmp_path, postgres, bucket):
    cluster = Cluster(tmp_path)
    payloads = bucket.config(tmp_path, prefix=PREFIX).model_dump(mode="json")
    run = run_table(cluster, postgres, payloads) | {"tls": {"directory": str(tmp_path / "authority")}}
    tree = rendered(run, tmp_path)
    first, second = Machine(tree, tmp_path, FIRST), Machine(tree, tmp_path, SECOND)
    begin = time.monotonic()
    try:
        for unit in units(tree):
            machine = second if unit == "heterorl-coordinator-2.service" else first
            machine.start(unit)
            if unit == "heterorl-coordinator.service":
                # Whichever takes the lock first serves: here it is to be the one that dies.
                await first.until_said("coordinator", "listens on port")
        addresses = ",".join(f"{host}:{run['coordinator']['port']}" for host in (FIRST, SECOND))
        async with CoordinatorClient(addresses, tls=TlsConfig(**files_in(tree / "operator"))) as client:
            before = await cluster.until(client, lambda status: (status.head_version or 0) >= 2)
            _LOG.info("%.1f s to version 2", time.monotonic() - begin)
            first.kill("coordinator")
            dead = time.monotonic()
            await cluster.until(client, lambda status: True)
            _LOG.info("%.1f s until the standby answers", time.monotonic() - dead)
            wanted = (before.head_version or 0) + 20
            status = await cluster.until(client, lambda status: (status.head_version or 0) >= wanted)
    except (TimeoutError, asyncio.CancelledError):
        pytest.fail(first.said() + second.said())
    finally:
        first.stop()
        second.stop()

    assert {site.site for site in status.sites} == {"eu.1", "eu.2"}
    assert status.ledger.is_balanced
    assert status.ledger.acked >= 4 * (before.head_version or 0)
    # The first one's directory is as good as gone: what it had taken in, the second one reads from the bucket.
    assert len(bucket.names(PREFIX)) > wanted
