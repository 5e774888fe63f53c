"""Sites that join with a short file: real processes over mutual TLS, one of them behind a relay."""

import pytest

from heterorl.common.rpc.client import CoordinatorClient
from tests.support.certificates import Certificates
from tests.support.cluster import RUN, Cluster
from tests.support.ports import free_port


class ShortFiles(Cluster):
    """Samplers say nothing of the contract."""

    def tables(self, name):
        service, tables = super().tables(name)
        if service == "sampler":
            tables = {key: value for key, value in tables.items() if key not in RUN} | {"join": {}}
        return service, tables


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_sampler_with_a_short_file_joins_and_its_groups_are_trained_on(tmp_path):
    certificates = Certificates(tmp_path / "certs", run="kills")
    cluster = ShortFiles(tmp_path, certificates=certificates)
    for name in ("coordinator", "site-a", "learner"):
        cluster.start(name)
    async with CoordinatorClient(cluster.address, tls=certificates.tls("operator", "op")) as client:
        try:
            status = await cluster.until(client, lambda status: status.head_version >= 3)
        finally:
            cluster.stop()
    assert [site.groups_accepted > 0 for site in status.sites] == [True]
    assert status.ledger.consumed >= 12
    log = (tmp_path / "logs" / "site-a.log").read_text()
    for said in ("task.name", "task.digits", "group_size", "sampling.max_new_tokens"):
        assert f"joins with {said} = " in log, log


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_sampler_behind_a_relay_joins_with_a_short_file(tmp_path):
    certificates = Certificates(tmp_path / "certs", run="kills")
    address = f"127.0.0.1:{free_port()}"
    cluster = ShortFiles(
        tmp_path, certificates=certificates, relay={"listen": address}, sampler={"coordinator": address}
    )
    for name in ("coordinator", "relay", "eu.gpu1", "learner"):
        cluster.start(name)
    async with CoordinatorClient(cluster.address, tls=certificates.tls("operator", "op")) as client:
        try:
            status = await cluster.until(client, lambda status: status.head_version >= 2)
        finally:
            cluster.stop()
    assert {site.site: site.groups_accepted > 0 for site in status.sites} == {"eu.gpu1": True}
