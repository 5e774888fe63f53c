"""Samples of a run as processes: texts from the learner's tokenizer, read by the command; a coordinator killed."""

import asyncio
import json
import sqlite3

import pytest
from typer.testing import CliRunner

from heterorl.cli.main import app
from heterorl.common.rpc.client import CoordinatorClient
from heterorl.common.types.sample import SampleFilter, SampleKind, SamplePage
from tests.support.cluster import RUN, Cluster
from tests.support.links import PLAINTEXT

SAMPLES_BYTES = 200_000
ALL = SampleFilter()


def objects(cluster, *options):
    result = CliRunner().invoke(app, ["samples", "list", cluster.address, "--insecure", "--json", *options])
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.output.splitlines()]


async def everything(client):
    listed = await client.list_samples(wanted=ALL, page=SamplePage(limit=200))
    assert listed.next_page is None
    return listed


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_texts_of_a_run_are_read_bounded_and_survive_the_kill_of_the_coordinator(tmp_path):
    cluster = Cluster(
        tmp_path,
        coordinator={"samples_every": 2, "samples_bytes": SAMPLES_BYTES},
        # Rewards are computed, so that a group that lies is rejected.
        learner={"verification": {"recompute_rewards": True}, "max_steps": 1_000_000},
    )
    for name in ("coordinator", "learner", "site-a"):
        cluster.start(name)
    async with CoordinatorClient(cluster.address, tls=PLAINTEXT) as client:
        try:
            # More than the ring holds: a sample takes 6144 bytes, so 32 fit.
            await cluster.until(client, lambda status: status.ledger.consumed >= 120)
            # Notes of the newest version may be under way.
            assert sum(entry.has_texts for entry in (await everything(client)).samples) > 4
            found = await asyncio.to_thread(objects, cluster, "--limit", "5")
            cluster.kill("learner")
            cluster.kill("site-a")
            before = await everything(client)
            cluster.kill("coordinator")
            with sqlite3.connect(tmp_path / "coordinator" / "coordinator.sqlite") as connection:
                assert connection.execute("PRAGMA quick_check").fetchone() == ("ok",)
                (kept_bytes,) = connection.execute("SELECT sum(num_bytes) FROM samples").fetchone()
                (real_bytes,) = connection.execute(
                    "SELECT sum(length(content) + coalesce(length(note), 0)) FROM sample_payloads"
                ).fetchone()
            connection.close()
            assert real_bytes < kept_bytes <= SAMPLES_BYTES
            cluster.start("coordinator")
            await cluster.until(client, lambda _: True)
            after = await everything(client)
        finally:
            cluster.stop()

    assert after == before
    assert before.kept_bytes <= before.limit_bytes == SAMPLES_BYTES
    assert len(before.samples) < before.samples[0].id, "the oldest made room"
    assert {entry.kind for entry in before.samples} <= set(SampleKind)
    consumed = [entry for entry in found if entry["kept_because"] == "consumed"]
    texts = [entry for entry in consumed if entry["prompt"] is not None]
    assert texts
    for entry in texts:
        left, right = entry["prompt"].rstrip("=").split("+")
        assert left.isdigit()
        assert right.isdigit()
        assert entry["site"] == "site-a"
        assert entry["num_tokens"] <= RUN["sampling"]["max_new_tokens"]
        assert isinstance(entry["log_ratio_mean"], float)
        assert set(entry["reward_parts"])
    # Nothing that was read for the samples is in a log.
    logs = b"".join(path.read_bytes() for path in (tmp_path / "logs").iterdir())
    assert not any(f'"{entry["prompt"]}"'.encode() in logs for entry in texts)
    assert b"Traceback" not in logs
