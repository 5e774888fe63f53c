"""A learner that ends while the coordinator is silent."""

import asyncio
from types import SimpleNamespace

import pytest

from heterorl.common.errors import StaleEpoch
from heterorl.learner.run import training_run
from tests.support.learner_world import make_contract, open_coordinator


async def test_lease_that_nobody_takes_back_is_told_with_a_reason(caplog, monkeypatch):
    monkeypatch.setattr(training_run, "RELEASE_TIMEOUT_S", 0.01)

    async def silent(*, epoch):
        await asyncio.Event().wait()

    await training_run.TrainingRun.release(
        SimpleNamespace(api=SimpleNamespace(release_lease=silent)), SimpleNamespace(epoch=1)
    )
    assert "it will expire: no answer in 0.01 s" in caplog.text


async def test_release_whose_answer_was_lost_is_said_again_without_effect(tmp_path, caplog):
    core = await open_coordinator(tmp_path)
    grant = await core.acquire_lease(holder="first", contract=make_contract(), request_id="r1")
    await core.release_lease(epoch=grant.epoch)

    await training_run.TrainingRun.release(SimpleNamespace(api=core), grant)

    assert "could not be released" not in caplog.text
    following = await core.acquire_lease(holder="second", contract=make_contract(), request_id="r2")
    with pytest.raises(StaleEpoch, match="superseded"):
        await core.release_lease(epoch=grant.epoch)
    assert (await core.renew_lease(epoch=following.epoch)).holder == "second"
    await core.close()


async def test_what_was_never_leased_cannot_be_released(tmp_path):
    core = await open_coordinator(tmp_path)
    with pytest.raises(StaleEpoch):
        await core.release_lease(epoch=0)
    await core.close()
