"""A coordinator at one of several addresses: a standby listens on none."""

import asyncio
import socket

import pytest

from heterorl.common.errors import ConfigError
from heterorl.common.identity.tls import TlsConfig
from heterorl.common.process.address import addresses
from heterorl.common.process.config import load
from heterorl.common.rpc import link
from heterorl.common.rpc.link import Link
from heterorl.sampler.config import SamplerConfig

PLAIN = TlsConfig(insecure=True)


@pytest.fixture
async def listening():
    async def end(reader, writer):
        writer.close()

    server = await asyncio.start_server(end, "127.0.0.1", 0)
    yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    server.close()
    await server.wait_closed()


@pytest.fixture
def closed():
    # Bound, so that nobody else takes the port, and deaf.
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{deaf.getsockname()[1]}"


def test_configuration_takes_one_address_or_a_list():
    assert load(SamplerConfig, None, ["coordinator=a.example:1"]).coordinator == "a.example:1"
    several = load(SamplerConfig, None, ['coordinator=["a.example:1", "b.example:2"]']).coordinator
    assert addresses(several) == ("a.example:1", "b.example:2")


async def test_calls_go_to_the_address_that_listens(listening, closed):
    link_ = Link(f"{closed},{listening}", tls=PLAIN, max_message_bytes=1 << 20)

    async with link_.stubs():
        assert link_._address == listening
    await link_.close()


async def test_where_none_is_seen_to_listen_the_next_one_is_tried(closed, monkeypatch):
    monkeypatch.setattr(link, "KNOCK_S", 0.5)
    link_ = Link(f"{closed},localhost:1", tls=PLAIN, max_message_bytes=1 << 20)

    seen = []
    for _ in range(2):
        link_._is_lost = True
        async with link_.stubs():
            seen.append(link_._address)
    assert seen == ["localhost:1", closed]
    await link_.close()


def test_each_address_is_checked():
    with pytest.raises(ConfigError, match=r"b\.example"):
        Link("127.0.0.1:1,b.example:2", tls=PLAIN, max_message_bytes=1 << 20)
