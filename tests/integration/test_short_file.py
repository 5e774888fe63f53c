"""The statement over a real socket with certificates: from the learner's lease to a sampler that asks."""

import asyncio

import pytest

from heterorl.common.errors import ConfigError, InvalidRequest
from heterorl.common.process.clock import SystemClock
from heterorl.common.wire.common_messages import contract_to_pb
from heterorl.common.wire.statement import MAX_STATEMENT_BYTES
from heterorl.sampler.adoption import adopted
from heterorl.sampler.sampler_config import SamplerConfig
from heterorl.v1 import policy_pb2
from tests.support.run import CONTRACT
from tests.support.secure_run import SecureRun
from tests.support.statements import stated


@pytest.fixture
async def secure(tmp_path):
    async with SecureRun(tmp_path) as secure:
        yield secure


def short(secure, **changes):
    return SamplerConfig(
        site="eu-1", coordinator=secure.address, tls=secure.certificates.tls("sampler"), join={}, **changes
    )


async def state(secure, **changes):
    await secure.learner.acquire_lease(
        holder="learner", contract=CONTRACT, request_id="again", statement=stated(CONTRACT, **changes)
    )


async def test_sampler_is_told_what_the_learner_stated(secure, caplog):
    caplog.set_level("INFO")
    await state(secure)
    found = await adopted(short(secure), SystemClock(), asyncio.Event())

    assert found is not None
    assert (found.config.group_size, found.config.task.digits) == (2, 1)
    found.check(CONTRACT)
    assert "the sampler joins with group_size = 2, as the run states it" in caplog.text


async def test_run_whose_learner_states_nothing_is_said(secure):
    with pytest.raises(ConfigError, match="join: the learner of run run states no configuration"):
        await adopted(short(secure), SystemClock(), asyncio.Event())


async def test_what_is_not_accepted_ends_the_start(secure):
    await state(secure, task={"name": "jsonl:/etc/passwd"})
    with pytest.raises(ConfigError, match="join.accept: the run's task reads /etc/passwd"):
        await adopted(short(secure), SystemClock(), asyncio.Event())


async def test_signal_ends_the_question(secure):
    stop = asyncio.Event()
    stop.set()
    config = short(secure).model_copy(update={"coordinator": "127.0.0.1:1"})

    assert await adopted(config, SystemClock(), stop) is None


async def test_statement_above_the_bound_is_refused_before_it_is_parsed(secure):
    request = policy_pb2.AcquireLeaseRequest(
        request_id="big", holder="learner", contract=contract_to_pb(CONTRACT), statement=bytes(MAX_STATEMENT_BYTES + 1)
    )
    error = await secure.attempt(secure.certificates.pair("learner", "eu-1"), "AcquireLease", request)

    assert isinstance(error, InvalidRequest)
    assert "statement" in str(error)
    assert str(MAX_STATEMENT_BYTES) in str(error)
