"""An unreachable coordinator is said within seconds, then ever more rarely."""

import asyncio
import contextlib
import itertools
import logging

import pytest

from heterorl.common.errors import Unauthenticated, Unreachable
from heterorl.common.identity.tls import TlsConfig
from heterorl.common.rpc import calls
from heterorl.common.rpc.calls import Outage, RetryPolicy
from heterorl.common.rpc.client import CoordinatorClient
from heterorl.common.rpc.maintenance import BackupClient
from tests.support.clock import ManualClock


def said(caplog):
    return [record.getMessage() for record in caplog.records if record.name == "heterorl.common.rpc.calls"]


@pytest.mark.parametrize(
    ("note", "words"),
    [
        (
            lambda outage: outage.failed("Register: UNAVAILABLE:\nconnection refused"),
            "has not answered for 2 s, retrying: Register: UNAVAIL",
        ),
        (
            lambda outage: outage.refused(Unauthenticated("the certificate has expired", retry_after_s=5.0)),
            "has refused this node for 2 s, retrying: the certificate has expired (give this node",
        ),
    ],
)
def test_outage_is_said_soon_then_ever_more_rarely_and_once_when_it_ends(caplog, note, words):
    caplog.set_level(logging.INFO)
    clock = ManualClock()
    outage = Outage("host:1", clock=clock)
    times = []
    for _ in range(6 * 3600):
        before = len(said(caplog))
        note(outage)
        if len(said(caplog)) > before:
            times.append(clock.monotonic() - 1000.0)
        clock.advance(1.0)
    outage.answered()

    assert times[:6] == [2, 12, 32, 72, 152, 312]
    assert max(later - sooner for sooner, later in itertools.pairwise(times)) == 600
    assert len(times) < 50
    assert said(caplog)[0].startswith(f"the coordinator at host:1 {words}")
    assert "\n" not in said(caplog)[0]
    assert said(caplog)[-1] == "the coordinator at host:1 answers again, after 21600 s"


def test_blip_is_not_worth_a_line(caplog):
    caplog.set_level(logging.INFO)
    clock = ManualClock()
    outage = Outage("host:1", clock=clock)
    for _ in range(5):
        outage.failed("cut")
        clock.advance(1.0)
        outage.answered()
    assert said(caplog) == []


async def test_address_that_swallows_everything_is_said_while_the_call_hangs(caplog, monkeypatch):
    """No refusal comes back: the call itself would say so after its 20 s at the earliest."""
    monkeypatch.setattr(calls, "SILENT_S", 0.2)
    monkeypatch.setattr(calls, "SAY_AFTER_S", 0.1)
    held = []

    async def swallow(reader, writer):
        held.append(writer)

    server = await asyncio.start_server(swallow, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with CoordinatorClient(f"127.0.0.1:{port}", tls=TlsConfig(insecure=True)) as api:
        call = asyncio.create_task(api.get_status())
        while not said(caplog):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert not call.done()
        call.cancel()
        await asyncio.wait([call])
    for writer in held:
        writer.close()
    server.close()
    assert "GetStatus has no answer for 0.2 s" in said(caplog)[0]


async def test_long_call_takes_its_time_without_a_line(monkeypatch):
    watched = []
    monkeypatch.setattr(calls.Outage, "watching", lambda _, name: watched.append(name) or contextlib.nullcontext())
    how = {"tls": TlsConfig(insecure=True), "policy": RetryPolicy(budget_s=0.0)}
    async with BackupClient("127.0.0.1:1", **how) as long, CoordinatorClient("127.0.0.1:1", **how) as short:
        for call in (long.backup(name="night"), short.get_status()):
            with pytest.raises(Unreachable):
                await call

    assert watched == ["GetStatus"]


async def test_refused_connection_is_said_by_the_client(caplog, monkeypatch):
    monkeypatch.setattr(calls, "SAY_AFTER_S", 0.0)
    policy = RetryPolicy(budget_s=0.1, base_s=0.05, cap_s=0.1)
    async with CoordinatorClient("127.0.0.1:1", tls=TlsConfig(insecure=True), policy=policy) as api:
        with pytest.raises(Unreachable):
            await api.get_status()
    assert any("GetStatus: UNAVAILABLE" in line for line in said(caplog))
