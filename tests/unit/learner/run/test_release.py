"""A learner that ends while the coordinator is silent."""

import asyncio
from types import SimpleNamespace

from heterorl.learner.run import leader


async def test_lease_that_nobody_takes_back_is_told_with_a_reason(caplog, monkeypatch):
    monkeypatch.setattr(leader, "RELEASE_TIMEOUT_S", 0.01)

    async def silent(*, epoch):
        await asyncio.Event().wait()

    await leader.Leader.release(SimpleNamespace(api=SimpleNamespace(release_lease=silent)), SimpleNamespace(epoch=1))
    assert "runs out by itself: no answer in 0.01 s" in caplog.text
