"""One honest and one cheating sampler as processes, against a real coordinator and a real learner that checks."""

import asyncio

import pytest
from typer.testing import CliRunner

from heterorl.cli.main import app
from heterorl.common.rpc.client import CoordinatorClient
from heterorl.common.types.rollout import DropReason
from tests.support.cluster import Cluster, account
from tests.support.links import PLAINTEXT


def site_of(status, name):
    return next((site for site in status.sites if site.site == name), None)


def failed_sites(status):
    return {site.site for site in status.sites if site.groups_failed or site.quarantine}


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_cheater_is_quarantined_the_honest_site_goes_on_and_release_lets_the_cheater_back(tmp_path):
    cluster = Cluster(
        tmp_path,
        coordinator={"quarantine_failures": 2},
        learner={"verification": {"logprob_floor": 1.0, "require_seeded": True}},
        sampler={"seeded_sampling": True},
    )
    for name in ("coordinator", "learner", "honest"):
        cluster.start(name)
    cluster.start("cheater", module="tests.support.cheating_sampler")
    runner = CliRunner()
    async with CoordinatorClient(cluster.address, tls=PLAINTEXT) as client:
        try:
            status = await cluster.until(
                client, lambda status: site_of(status, "cheater") and site_of(status, "cheater").quarantine,
            )  # fmt: skip
            reason = site_of(status, "cheater").quarantine
            accepted = site_of(status, "cheater").groups_accepted
            status = await cluster.until(client, lambda later: later.head_version >= status.head_version + 2)
            assert failed_sites(status) == {"cheater"}
            result = await asyncio.to_thread(
                runner.invoke, app,
                ["sites", "release", "cheater", cluster.address, "--reason", "says it is sorry", "--insecure"],
            )  # fmt: skip
            assert result.exit_code == 0, result.output
            # It gets work again, and is found out again.
            status = await cluster.until(
                client,
                lambda later: (
                    site_of(later, "cheater").groups_accepted > accepted and site_of(later, "cheater").quarantine
                ),
            )
        finally:
            cluster.stop()

    assert "sampling_mismatch, rollouts[" in reason
    assert status.ledger.is_balanced
    assert status.ledger.dropped[DropReason.SAMPLING_MISMATCH] >= 4
    found = account(cluster, set(), ["honest", "cheater"])
    assert (found["lost"], found["duplicated"], found["ledger_balanced"], found["dense"]) == (0, 0, True, True)
    with cluster.database() as connection:
        trained = dict(
            connection.execute("SELECT site, count(*) FROM groups WHERE state = 'consumed' GROUP BY site").fetchall()
        )
    connection.close()
    assert set(trained) == {"honest"}
    directory = str(tmp_path / "coordinator")
    assert runner.invoke(app, ["audit", "verify", directory]).exit_code == 0
    kinds = [
        line.split()[2]
        for line in runner.invoke(app, ["audit", "show", directory, "--subject", "cheater"]).output.splitlines()
    ]
    assert [kind for kind in kinds if kind != "check_failed"] == ["quarantine", "release", "quarantine"]
    assert "says it is sorry" in runner.invoke(app, ["audit", "show", directory]).output
