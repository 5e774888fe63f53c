"""A run whose sites are behind a relay: the relay is killed, and nothing is lost or done twice."""

import pytest

from heterorl.common.rpc.client import CoordinatorClient
from tests.support.certificates import Certificates
from tests.support.cluster import Cluster, account
from tests.support.ports import free_port

FIRST, SECOND = "eu.gpu1", "eu.gpu2"


@pytest.mark.timeout(600)
@pytest.mark.slow
async def test_a_killed_relay_costs_a_pause_and_nothing_else(tmp_path):
    certificates = Certificates(tmp_path / "certs", run="kills")
    address = f"127.0.0.1:{free_port()}"
    cluster = Cluster(tmp_path, certificates=certificates, relay={"listen": address}, sampler={"coordinator": address})
    kept = tmp_path / "relay" / "payloads"
    try:
        for name in ("coordinator", "learner", "relay", FIRST):
            cluster.start(name)
        async with CoordinatorClient(cluster.address, tls=certificates.tls("operator", "desk")) as client:
            # Each version takes four groups of the site, and each is pulled through the relay.
            before = await cluster.until(client, lambda status: status.head_version >= 4)
            cluster.kill("relay")
            num_kept = len(list(kept.iterdir()))
            cluster.start("relay")
            # One site goes on, the other begins.
            cluster.start(SECOND)
            after = await cluster.until(
                client,
                lambda status: (
                    status.head_version >= before.head_version + 6
                    and {entry.site for entry in status.sites if entry.groups_accepted} == {FIRST, SECOND}
                ),
            )
            assert [await cluster.end(site) for site in (FIRST, SECOND)] == [0, 0]
    finally:
        cluster.stop()

    assert 0 < num_kept < len(list(kept.iterdir()))
    found = account(cluster, set(), [FIRST, SECOND])
    assert found["versions"] > after.head_version
    assert (found["lost"], found["duplicated"], found["ledger_balanced"], found["dense"]) == (0, 0, True, True)
