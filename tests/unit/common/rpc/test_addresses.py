"""A coordinator at one of several addresses: a standby listens on none, and no proxy stands before this machine."""

import asyncio
import logging
import socket

import pytest

from heterorl.common.errors import ConfigError
from heterorl.common.identity.tls import TlsConfig
from heterorl.common.process.address import addresses
from heterorl.common.process.config_file import load
from heterorl.common.rpc import channel
from heterorl.common.rpc.channel import CoordinatorChannel
from heterorl.common.rpc.transport_options import channel_options
from heterorl.sampler.sampler_config import SamplerConfig
from tests.support.certificates import Certificates

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
    link_ = CoordinatorChannel(f"{closed},{listening}", tls=PLAIN, max_message_bytes=1 << 20)

    async with link_.held():
        assert link_._address == listening
    await link_.close()


async def test_where_none_is_seen_to_listen_the_next_one_is_tried(closed, monkeypatch):
    monkeypatch.setattr(channel, "KNOCK_S", 0.5)
    link_ = CoordinatorChannel(f"{closed},localhost:1", tls=PLAIN, max_message_bytes=1 << 20)

    seen = []
    for _ in range(2):
        link_._is_lost = True
        async with link_.held():
            seen.append(link_._address)
    assert seen == ["localhost:1", closed]
    await link_.close()


def test_each_address_is_checked():
    with pytest.raises(ConfigError, match=r"b\.example"):
        CoordinatorChannel("127.0.0.1:1,b.example:2", tls=PLAIN, max_message_bytes=1 << 20)


# ---- proxies of the environment

NO_PROXY = ("grpc.enable_http_proxy", 0)


@pytest.fixture(params=["https_proxy", "http_proxy", "grpc_proxy"])
def proxy(request, monkeypatch):
    for name in ("grpc_proxy", "https_proxy", "http_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(request.param, "http://user:secret@proxy.example:3128")
    return request.param


@pytest.mark.parametrize("address", ["127.0.0.1:1", "127.8.0.1:1", "localhost:1", "[::1]:1"])
def test_calls_within_this_machine_go_through_no_proxy(proxy, caplog, address):
    caplog.set_level(logging.INFO)

    assert NO_PROXY in channel_options(address, insecure=False, max_message_bytes=1 << 20)
    assert not caplog.messages


def test_calls_to_another_machine_go_through_the_proxy_and_one_line_says_so(proxy, caplog, monkeypatch):
    caplog.set_level(logging.INFO)

    def options():
        return channel_options("coord.example:50051", insecure=False, max_message_bytes=1 << 20)

    assert NO_PROXY not in options()
    [line] = caplog.messages
    assert proxy in line
    assert "secret" not in line

    caplog.clear()
    monkeypatch.setenv("no_proxy", "other.example,coord.example")
    assert NO_PROXY not in options()
    assert not caplog.messages


async def test_link_with_certificates_to_this_machine_asks_for_no_proxy(tmp_path, proxy, monkeypatch):
    seen = []
    opened = channel.grpc.aio.secure_channel
    monkeypatch.setattr(
        channel.grpc.aio,
        "secure_channel",
        lambda *args, options: (seen.append(options), opened(*args, options=options))[1],
    )
    link_ = CoordinatorChannel(
        "127.0.0.1:1", tls=Certificates(tmp_path / "ca").tls("sampler"), max_message_bytes=1 << 20
    )
    await link_.close()

    [options] = seen
    assert NO_PROXY in options
