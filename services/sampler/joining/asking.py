"""Asking the coordinator what its learner stated, before anything is loaded; waits for a learner that has not begun."""

from __future__ import annotations

import asyncio
import logging
import random

from heterorl.common.errors import ConfigError
from heterorl.common.process.clock import Clock
from heterorl.common.process.patience import Patience
from heterorl.common.rpc.roles import DiagnosisClient
from heterorl.common.wire.statement import Statement, statement_from_bytes
from heterorl.sampler.config import SamplerConfig
from heterorl.sampler.joining.adoption import Adopted, adopt

_LOG = logging.getLogger(__name__)
ASK_AGAIN_S = 2.0


async def adopted(config: SamplerConfig, clock: Clock, stop: asyncio.Event) -> Adopted | None:
    """The configuration with what the run states; None when `stop` came first. Says each key that it got.

    Raises:
        ConfigError: [join] does not accept what is stated, or nothing is.
        RemoteError: the coordinator refuses this node.
    """
    asking = asyncio.ensure_future(_ask(config, clock))
    stopping = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({asking, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not asking.done():
            return None
        found = adopt(config, asking.result())
    finally:
        for task in (asking, stopping):
            task.cancel()
        await asyncio.gather(asking, stopping, return_exceptions=True)
    for key, value in found.got.items():
        _LOG.info("joining with %s = %.300r, as the run states it", key, value)
    return found


async def _ask(config: SamplerConfig, clock: Clock) -> Statement:
    patience = Patience(clock=clock, rng=random.Random())
    client = DiagnosisClient(config.coordinator, tls=config.tls, clock=clock, bandwidth=config.bandwidth)
    try:
        has_said = False
        while True:
            diagnosis = await patience.insist(client.diagnose)
            if diagnosis.statement:
                return statement_from_bytes(diagnosis.statement)
            if diagnosis.contract is not None:
                raise ConfigError(
                    "join",
                    f"the learner of run {diagnosis.run_id} states no configuration",
                    action="state task, sampling, group_size, lora and template in this file, and leave [join] out",
                )
            if not has_said:
                _LOG.info("waiting for the learner of run %s, which states what to join with", diagnosis.run_id)
            has_said = True
            await clock.sleep(ASK_AGAIN_S)
    finally:
        await client.close()
