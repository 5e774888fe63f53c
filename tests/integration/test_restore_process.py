"""A run that went back to a backup, as processes: its sampler refuses, its operator agrees, and the work goes on."""

import asyncio
import contextlib
import shutil

import pytest
from typer.testing import CliRunner

from heterorl.cli.main import app
from heterorl.common.rpc.calls import RetryPolicy
from heterorl.common.rpc.client import CoordinatorClient
from heterorl.demo.processes import stop
from tests.support.cluster import Cluster
from tests.support.links import PLAINTEXT

_PATIENT = RetryPolicy(base_s=0.05, cap_s=0.5, budget_s=10.0)


async def command(*words):
    result = await asyncio.to_thread(CliRunner().invoke, app, list(map(str, words)))
    assert result.exit_code == 0, result.output
    return result.output


def holds(version):
    """A status in which the sampler has a version or a later one, and so has the run."""
    return lambda status: (
        status.head_version >= version and any(site.policy_version >= version for site in status.sites)
    )


@pytest.mark.slow
@pytest.mark.timeout(280)
async def test_sampler_that_saw_newer_versions_refuses_and_works_on_when_its_operator_agreed(tmp_path):
    cluster = Cluster(tmp_path)
    async with CoordinatorClient(cluster.address, tls=PLAINTEXT, policy=_PATIENT) as client:
        try:
            for name in ("coordinator", "learner", "site-a"):
                cluster.start(name)
            await cluster.until(client, holds(1))
            stop([cluster.children["coordinator"]])
            shutil.copytree(tmp_path / "coordinator", tmp_path / "copy")
            with contextlib.closing(cluster.database()) as connection:
                ((head,),) = connection.execute("SELECT max(version) FROM versions")
            cluster.start("coordinator")
            await cluster.until(client, holds(head + 2))
            cluster.stop()

            cluster.coordinator["data_dir"] = str(tmp_path / "restored")
            (tmp_path / "restored").mkdir()
            coordinator, sampler = (tmp_path / "config" / f"{name}.toml" for name in ("coordinator", "site-a"))
            said = await command(
                "restore", tmp_path / "copy", "--config", coordinator, "--set", f"data_dir={tmp_path / 'restored'}"
            )
            assert f"accept-rewind kills:{head}" in said
            cluster.start("coordinator")
            refused = cluster.start("site-a")
            assert await asyncio.to_thread(refused.process.wait) == 2
            refused.file.close()
            assert "heterorl accept-rewind RUN:V" in refused.log.read_text()

            assert f"must descend from version {head}" in await command(
                "accept-rewind", f"kills:{head}", "--config", sampler, "--yes"
            )
            cluster.start("site-a")
            # The first one's state is of versions that are gone.
            cluster.start("learner-2")
            await cluster.until(client, holds(head + 2))
        finally:
            cluster.stop()
