"""A put that fails leaves the store alone for a while, and no error has the address."""

import asyncio
import contextlib

import pytest

from heterorl.common.errors import Unreachable
from heterorl.common.rpc.presigned import AGAIN_S, PUT_PAUSE_S, TRIES, PresignedWrites, UrlClient
from heterorl.common.types.policy import PutPlace
from tests.support.clock import ManualClock

BODY = b"payload!" * 1000


@contextlib.asynccontextmanager
async def store(*answers):
    """An HTTP server that gives each request its answer, b"" by hanging up; yields its address and what it was sent."""
    bodies, waiting, ended = [], list(answers), asyncio.Event()

    async def serve(reader, writer):
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            head = await reader.readuntil(b"\r\n\r\n")
            answer = waiting.pop(0)
            if answer:
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                bodies.append(await reader.readexactly(length))
                writer.write(b"HTTP/1.1 %s\r\nContent-Length: 0\r\nConnection: close\r\n\r\n" % answer)
                await writer.drain()
        writer.close()
        ended.set()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/incoming/secret-place?X-Amz-Signature=abc", bodies
        if len(waiting) < len(answers):
            await ended.wait()


async def frames(offset, stop):
    # Of the file as it is, whatever was announced of it.
    for begin in range(offset, len(BODY), 1000):
        yield BODY[begin : begin + 1000]


def asked(*places):
    """What a coordinator answers, one after another; the last one again and again."""
    left = [PutPlace(url=url, offset=offset, num_bytes=num_bytes) for url, offset, num_bytes in places]

    async def ask():
        return left.pop(0) if len(left) > 1 else left[0]

    return ask


async def put(writes, url, num_bytes=None):
    """Put a payload of one piece."""
    num_bytes = num_bytes or len(BODY)
    return await writes.put_all(asked((url, 0, num_bytes), ("", num_bytes, 0)), frames, num_bytes=num_bytes)


@contextlib.asynccontextmanager
async def put_by(allowed="any"):
    clock, connections = ManualClock(), UrlClient(allowed)
    try:
        yield PresignedWrites(connections, clock), clock
    finally:
        await connections.close()


@pytest.mark.parametrize("failure", [b"500 Internal Server Error", b"403 Forbidden", b"307 Temporary Redirect", b""])
async def test_store_that_fails_is_left_alone_for_a_while(failure):
    async with store(failure, b"200 OK") as (url, bodies), put_by() as (writes, clock):
        with pytest.raises(Unreachable) as caught:
            await writes.put_all(asked((url, 0, len(BODY))), frames, num_bytes=len(BODY))
        assert "secret-place" not in str(caught.value)
        assert "abc" not in repr(caught.value.__cause__)
        assert not writes.is_worth_asking
        clock.advance(PUT_PAUSE_S - 1)
        assert not writes.is_worth_asking
        clock.advance(1)
        assert writes.is_worth_asking

        assert await put(writes, url)
        assert bodies[-1] == BODY


@pytest.mark.parametrize(("allowed", "is_worth"), [("https", True), ("none", False)])
async def test_address_that_this_node_does_not_ask_costs_no_request(allowed, is_worth):
    async with store() as (url, bodies), put_by(allowed) as (writes, _):
        assert writes.is_worth_asking is is_worth
        assert not await put(writes, url)
        assert bodies == []
        assert writes.is_worth_asking is is_worth


@pytest.mark.parametrize("announced", [len(BODY) - 1, len(BODY) + 1])
async def test_other_bytes_than_announced_are_no_put(announced):
    async with store(b"200 OK") as (url, _), put_by() as (writes, _):
        with pytest.raises(Unreachable, match=f"not the {announced} bytes"):
            await put(writes, url, announced)
        # The store is not to blame.
        assert writes.is_worth_asking


async def test_answer_of_a_store_is_not_read():
    # Else a hostile one fills the memory of whoever puts, a hundredfold where it says that its words are compressed.
    sent, ended = 0, asyncio.Event()

    async def serve(reader, writer):
        nonlocal sent
        with contextlib.suppress(ConnectionError):
            await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(len(BODY))
            writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
            while sent < 1 << 30:
                writer.write(b"10000\r\n" + bytes(1 << 16) + b"\r\n")
                await writer.drain()
                sent += 1 << 16
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
        ended.set()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server, put_by() as (writes, _):
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/incoming/place"
        assert await put(writes, url)
        await ended.wait()
    assert sent < 1 << 25


async def test_empty_answer_keeps_the_connection():
    connections, ended = 0, asyncio.Event()

    async def serve(reader, writer):
        nonlocal connections
        connections += 1
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(len(BODY))
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        writer.close()
        await writer.wait_closed()
        ended.set()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        async with put_by() as (writes, _):
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/incoming/place"
            for _ in range(3):
                assert await put(writes, url)
        await ended.wait()
    assert connections == 1


class Waiting(ManualClock):
    """Whoever sleeps wakes at once."""

    async def sleep(self, seconds):
        self.slept = [*getattr(self, "slept", ()), seconds]


@pytest.mark.parametrize(("failures", "is_put"), [(TRIES - 1, True), (TRIES, False)])
async def test_piece_that_fails_is_put_again_where_another_one_got_through(failures, is_put):
    half = len(BODY) // 2
    answers = [b"200 OK", *[b"503 Slow Down"] * failures, b"200 OK"]
    async with store(*answers) as (url, bodies), put_by() as (writes, _):
        writes._clock = Waiting()
        places = [(url, 0, half), *[(url, half, len(BODY) - half)] * (failures + 1), ("", len(BODY), 0)]

        async def cut(offset, stop):
            yield BODY[offset:stop]

        if is_put:
            assert await writes.put_all(asked(*places), cut, num_bytes=len(BODY))
        else:
            with pytest.raises(Unreachable, match="answers 503"):
                await writes.put_all(asked(*places), cut, num_bytes=len(BODY))
        assert bodies[0] + bodies[-1] == BODY
        assert writes._clock.slept == [AGAIN_S * 2**number for number in range(TRIES - 1)]
        assert writes.is_worth_asking is is_put


async def test_store_that_has_not_what_it_took_is_left_alone():
    async with store(b"200 OK") as (url, _), put_by() as (writes, _):
        with pytest.raises(Unreachable, match="has not what it took"):
            await writes.put_all(asked((url, 0, len(BODY))), frames, num_bytes=len(BODY))
        assert not writes.is_worth_asking


@pytest.mark.parametrize("place", [(0, 0), (0, len(BODY) + 1), (10, len(BODY))])
async def test_piece_that_is_none_of_the_payload_is_not_put(place):
    async with store() as (url, bodies), put_by() as (writes, _):
        with pytest.raises(Unreachable, match="no piece of the payload"):
            await writes.put_all(asked((url, *place)), frames, num_bytes=len(BODY))
        assert bodies == []
