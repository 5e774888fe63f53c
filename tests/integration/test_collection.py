"""A coordinator process deletes payloads while samplers pull over gRPC, is killed in between, and nobody is left behind."""

import asyncio
import random
import signal

import pytest

from heterorl.common.errors import Unreachable
from heterorl.common.process.clock import SystemClock
from heterorl.common.pull.puller import Puller
from heterorl.common.rpc.calls import RetryPolicy
from heterorl.common.rpc.client import CoordinatorClient
from heterorl.common.types.policy import PayloadKind
from heterorl.demo.processes import start, stop
from tests.support.links import PLAINTEXT
from tests.support.merging import LARGER, Counted, RandomRun
from tests.support.ports import free_port, serves

PATIENT = RetryPolicy(budget_s=60.0, base_s=0.02, cap_s=0.2)
NUM_SAMPLERS = 3
MAX_VERSIONS = 600


async def follow(client, directory, name, run, stop_event, outcome):
    """Pull from nothing, then again and again from what is held, sometimes from nothing; count and check each."""
    chooser = random.Random(name)
    api = Counted(client)
    puller = Puller(api=api, spool=directory / name, layout=LARGER, clock=SystemClock())
    held = None
    while not stop_event.is_set():
        try:
            pulled = await puller.pull(held=held, want_version=-1)
        except Unreachable:
            # The coordinator was killed under the download.
            outcome["broken"] += 1
            continue
        if pulled.version not in run.roots:
            # Published, and the publisher has not heard of it yet.
            assert pulled.version == run.head + 1
        else:
            assert pulled.arena.state_root() == run.roots[pulled.version]
        outcome["pulls"] += 1
        outcome["from snapshots"] += api.kinds[PayloadKind.SNAPSHOT]
        held = chooser.choice([pulled, pulled, held, None])


async def reclaimed(client, run, *, more_than):
    """Publish until more bytes are reclaimed."""
    while (await client.get_status()).reclaimed_bytes <= more_than:
        assert run.head < MAX_VERSIONS
        for _ in range(5):
            await run.publish()
    return (await client.get_status()).reclaimed_bytes


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_samplers_pull_while_payloads_are_deleted_and_the_coordinator_is_killed(tmp_path):
    address = f"127.0.0.1:{free_port()}"
    tables = {
        "run_id": "run", "data_dir": str(tmp_path / "data"), "listen": address, "metrics_port": 0,
        "learner_lease_s": 600.0, "keep_versions": 4, "max_staleness_versions": 2, "snapshot_ratio": 0.05,
        "pull_lease_s": 2.0, "tls": {"insecure": True},
    }  # fmt: skip
    child = start("coordinator", name="coordinator", tables=tables, directory=tmp_path)
    client = CoordinatorClient(address, tls=PLAINTEXT, policy=PATIENT)
    outcome = dict.fromkeys(["pulls", "broken", "from snapshots"], 0)
    try:
        await serves(child.process, address)
        run = RandomRun(client, tmp_path)
        await run.begin()
        await run.publish()
        stop_event = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            for number in range(NUM_SAMPLERS):
                tasks.create_task(follow(client, tmp_path, f"sampler-{number}", run, stop_event, outcome))
            first = await reclaimed(client, run, more_than=0)
            child.process.kill()
            child.process.wait()
            child.file.close()
            child = start("coordinator", name="coordinator", tables=tables, directory=tmp_path)
            await serves(child.process, address)
            second = await reclaimed(client, run, more_than=first)
            stop_event.set()
        # Deltas of some 820 bytes, snapshots of 52 KB: a run without deletion holds several times more. What samplers
        # fetched last stays for a lease longer.
        while (status := await client.get_status()).store_bytes >= run.head * 820 + 4 * 53_000:
            assert run.head < MAX_VERSIONS
            await run.publish()
        last = await Puller(api=client, spool=tmp_path / "last", layout=LARGER, clock=SystemClock()).pull(
            held=None, want_version=-1
        )
        child.process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(child.process.wait) == 0
    finally:
        await client.close()
        stop([child])

    assert 0 < first < second
    assert last.arena.state_root() == run.roots[run.head]
    assert outcome["pulls"] > NUM_SAMPLERS
    assert outcome["from snapshots"] > 0
    assert status.snapshot_version > 0
    log = child.log.read_text()
    assert "out of use" not in log, log
