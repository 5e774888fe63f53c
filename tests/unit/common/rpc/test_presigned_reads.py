"""What is taken of a store, and what it is told: enough bytes, of the range that was asked for, and nothing of a node."""

import asyncio
import contextlib

import pytest

from heterorl.common.errors import Unreachable
from heterorl.common.process.clock import SystemClock
from heterorl.common.rpc import presigned as reads
from heterorl.common.rpc.client import CoordinatorClient
from heterorl.common.rpc.presigned import UrlClient
from heterorl.learner.learner_config import LearnerConfig
from heterorl.relay.relay_config import RelayConfig
from heterorl.sampler.sampler_config import SamplerConfig


async def _drops():
    while True:
        await asyncio.sleep(0)
        yield b"x"


async def test_drops_are_too_little_however_regular_they_are(monkeypatch):
    monkeypatch.setattr(reads, "BRISK_S", 0.05)

    with pytest.raises(reads.Slow, match="less than 1048576 bytes in 0.05 s"):
        async for _ in reads._brisk(_drops()):
            pass


@contextlib.asynccontextmanager
async def store(begin, content=b"bytes"):
    """An HTTP server whose answers begin at a byte and set a cookie; yields its address and the heads it was sent."""
    heads = []

    async def serve(reader, writer):
        heads.append((await reader.readuntil(b"\r\n\r\n")).lower())
        writer.write(
            b"HTTP/1.1 206 Partial Content\r\nContent-Range: bytes %d-%d/*\r\nContent-Length: %d\r\n"
            b"Set-Cookie: a=b\r\nConnection: close\r\n\r\n%b" % (begin, begin + 4, len(content), content)
        )
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/p", heads


async def read(direct, url):
    address = reads.Address(url=url, num_bytes=20)
    return b"".join([frame async for frame in direct.read(address, offset=10, stop=15)])


async def test_range_that_begins_elsewhere_is_refused():
    connections = UrlClient("any")
    async with store(10) as (right, _), store(9) as (wrong, _):
        direct = reads.PresignedReads(connections, SystemClock())
        assert await read(direct, right) == b"bytes"
        with pytest.raises(Unreachable, match="answers 206"):
            await read(direct, wrong)
    await connections.close()


async def test_no_redirect_is_followed():
    asked = []

    async def elsewhere(reader, writer):
        asked.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(
            b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:%d/other\r\nContent-Length: 0\r\n"
            b"Connection: close\r\n\r\n" % port
        )
        await writer.drain()
        writer.close()

    connections = UrlClient("any")
    server = await asyncio.start_server(elsewhere, "127.0.0.1", 0)
    async with server, store(10) as (there, heads):
        own, port = server.sockets[0].getsockname()[1], int(there.split(":")[2].split("/")[0])
        with pytest.raises(Unreachable, match="answers 302"):
            await read(reads.PresignedReads(connections, SystemClock()), f"http://127.0.0.1:{own}/p")
    await connections.close()

    assert len(asked) == 1
    assert heads == []


@pytest.mark.parametrize(
    ("content", "words"), [(b"bytes and more", "sends more than was asked for"), (b"byte", "ended early")]
)
async def test_answer_of_another_length_is_refused(content, words):
    connections = UrlClient("any")
    async with store(10, content) as (url, _):
        with pytest.raises(Unreachable, match=words):
            await read(reads.PresignedReads(connections, SystemClock()), url)
    await connections.close()


@pytest.mark.parametrize("place", ["192.0.2.1:99999", "192.0.2.1:-1", "_xn--bcher-kva.example"])
async def test_address_that_no_socket_can_have_is_one_that_fails(place):
    connections, url = UrlClient("https"), f"https://{place}/p?signature"

    assert connections.allows(url) == (":" not in place)
    with pytest.raises(Unreachable, match="does not answer") as raised:
        await read(reads.PresignedReads(connections, SystemClock()), url)
    await connections.close()
    assert "signature" not in str(raised.value)


async def test_requests_carry_no_cookie_and_go_by_no_proxy_of_the_environment(monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:1")
    connections = UrlClient("any")
    async with store(10) as (url, heads):
        direct = reads.PresignedReads(connections, SystemClock())
        assert [await read(direct, url) for _ in range(2)] == [b"bytes"] * 2
    await connections.close()

    assert len(heads) == 2
    assert not any(b"cookie" in head for head in heads)


OWN = [
    "127.0.0.1",
    "localhost",
    "s3.localhost",
    "[::1]",
    "[::ffff:127.0.0.1]",
    "0.0.0.0",
    "169.254.169.254",
    "[fe80::1]",
]


@pytest.mark.parametrize("host", [*OWN, "10.0.0.7", "s3.eu.example"])
def test_addresses_of_the_machine_itself_are_asked_only_where_any_are(host):
    url = f"https://{host}/payloads/1"

    assert UrlClient("https").allows(url) == (host not in OWN)
    assert UrlClient("any").allows(url)
    assert not UrlClient("none").allows(url)


@pytest.mark.parametrize(
    ("host", "is_asked"),
    [("s3.example", True), ("S3.Example.", True), ("eu.objects.example", True), ("objects.example", False),
     ("bobjects.example", False), ("10.0.0.7", True), ("10.0.0.8", False), ("other.example", False)],
)  # fmt: skip
def test_addresses_of_named_hosts_alone_are_asked(host, is_asked):
    connections = UrlClient("https", ["s3.example", "*.Objects.example", "10.0.0.7"])

    assert connections.allows(f"https://{host}/payloads/1") == is_asked
    assert not connections.allows(f"http://{host}/payloads/1")


@pytest.mark.parametrize("config", [LearnerConfig, RelayConfig, SamplerConfig])
async def test_each_node_asks_what_its_file_allows(config):
    plain = {"insecure": True}
    named = config.model_validate({"tls": plain, "payload_hosts": ["s3.example"]})
    async with CoordinatorClient.of(named) as client:
        assert client._connections.allows("https://s3.example/payloads/1")
        assert not client._connections.allows("https://s4.example/payloads/1")
    none = config.model_validate({"tls": plain, "payload_urls": "none"})
    async with CoordinatorClient.of(none) as client:
        assert not client._connections.allows("https://s3.example/payloads/1")


def test_this_machine_is_asked_where_it_is_named():
    assert UrlClient("https", ["127.0.0.1"]).allows("https://127.0.0.1:9000/p")


async def test_a_name_that_resolves_to_this_machine_is_sent_nothing():
    foreign, own = UrlClient("https"), UrlClient("any")
    async with store(10) as (url, heads):
        # What `allows` has let through is a name; what it resolves to shows when the connection is there.
        with pytest.raises(Unreachable, match="resolves to this machine or its link"):
            await read(reads.PresignedReads(foreign, SystemClock()), url)
        assert heads == []
        assert await read(reads.PresignedReads(own, SystemClock()), url) == b"bytes"
    await foreign.close()
    await own.close()


async def test_a_proxy_of_the_environment_takes_what_named_hosts_are_asked(monkeypatch):
    async with store(10) as (url, heads):
        monkeypatch.setenv("HTTP_PROXY", url.rpartition("/")[0])
        connections = UrlClient("any", ["payloads.example"])
        assert await read(reads.PresignedReads(connections, SystemClock()), "http://payloads.example/p") == b"bytes"
        await connections.close()

    assert heads[0].startswith(b"get http://payloads.example/p ")
