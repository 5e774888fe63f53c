"""A learner that was stopped past its lease and comes back has no effect (fencing by epoch, never by time)."""

import os
import signal

import pytest

from heterorl.common.rpc.client import CoordinatorClient
from tests.support.cluster import Cluster
from tests.support.links import PLAINTEXT


@pytest.mark.timeout(300)
@pytest.mark.slow
async def test_zombie_learner_has_no_effect_after_another_took_over(tmp_path):
    cluster = Cluster(tmp_path)
    for name in ("coordinator", "learner", "site-a"):
        cluster.start(name)
    async with CoordinatorClient(cluster.address, tls=PLAINTEXT) as client:
        try:
            await cluster.until(client, lambda status: status.head_version >= 3)
            zombie = cluster.children["learner"].process
            # Waits for the lease. A learner that is stopped for a minute may end by its own timer.
            cluster.start("learner-2")
            os.kill(zombie.pid, signal.SIGSTOP)
            taken = await cluster.until(client, lambda status: status.learner == "learner-2")
            await cluster.until(client, lambda s: s.head_version >= taken.head_version + 2)
            os.kill(zombie.pid, signal.SIGCONT)

            # It ends by itself with a typed error; the other goes on.
            zombie.wait()
            head = (await client.get_status()).head_version
            await cluster.until(client, lambda status: status.head_version >= head + 2)
        finally:
            cluster.stop()

    assert zombie.returncode == 1
    assert "superseded" in (tmp_path / "logs" / "learner.log").read_text()
    connection = cluster.database()
    epochs = [epoch for (epoch,) in connection.execute("SELECT epoch FROM versions ORDER BY version")]
    counts = connection.execute(
        "SELECT assignment, count(*) FROM groups WHERE state = 'consumed' GROUP BY assignment HAVING count(*) > 1"
    ).fetchall()
    connection.close()
    assert epochs == sorted(epochs), "a version of the old epoch came after one of the new"
    assert max(epochs) >= 2
    assert counts == []
