"""Uploads that end early, against a real server: nothing reads the caller's frames any more."""

import asyncio
import contextlib

import grpc.aio
import pytest

from heterorl.common import errors
from heterorl.common.rpc.calls import RetryPolicy
from heterorl.common.rpc.client import CoordinatorClient
from heterorl.common.types.common import Digest
from heterorl.v1 import policy_pb2, policy_pb2_grpc
from tests.support.links import PLAINTEXT
from tests.support.ports import free_port

QUICK = RetryPolicy(budget_s=0.5, base_s=0.01, cap_s=0.05)
DIGEST = Digest("1" * 64)


class Uploads(policy_pb2_grpc.PolicyServiceServicer):
    """Takes `most` messages, then answers: with an error, or as if all had come."""

    def __init__(self, most, code):
        self.most, self.code = most, code
        self.num = 0

    async def UploadPayload(self, request_iterator, context):
        async for _ in request_iterator:
            self.num += 1
            if self.num == self.most:
                break
        if self.code is not None:
            await context.abort(self.code, "gone")
        return policy_pb2.UploadPayloadResponse(num_bytes=7)


@contextlib.asynccontextmanager
async def client_of(servicer):
    server = grpc.aio.server()
    policy_pb2_grpc.add_PolicyServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    client = CoordinatorClient(f"127.0.0.1:{port}", tls=PLAINTEXT, policy=QUICK)
    try:
        yield client
    finally:
        await client.close()
        await server.stop(0)


async def uploaded(client, frames):
    async with contextlib.aclosing(frames):
        return await client.upload_payload(epoch=1, digest=DIGEST, num_bytes=100, offset=0, frames=frames)


async def endless(num=None):
    """Frames without end; after `num` of them, a read that does not return."""
    while True:
        yield b"frame"
        if num is not None:
            num -= 1
            if num <= 0:
                await asyncio.Event().wait()


async def three():
    for _ in range(3):
        yield b"frame"


@pytest.mark.parametrize("most", [1, 2, 50])
@pytest.mark.parametrize("is_stuck", [False, True])
async def test_server_that_ends_the_call_early_is_an_error_and_the_frames_are_closed(most, is_stuck):
    """Also in the middle of a read."""
    async with client_of(Uploads(most, grpc.StatusCode.UNAVAILABLE)) as client:
        frames = endless(most if is_stuck else None)
        # gRPC may see the failed write before the server's status.
        with pytest.raises(errors.Unreachable, match=r"gone|Internal error from Core"):
            await uploaded(client, frames)
        with pytest.raises(StopAsyncIteration):
            await anext(frames)


async def test_server_that_answers_before_it_has_read_all_is_believed():
    async with client_of(Uploads(2, None)) as client:
        assert await uploaded(client, endless()) == 7


async def test_whole_upload_is_answered():
    servicer = Uploads(100, None)
    async with client_of(servicer) as client:
        assert await uploaded(client, three()) == 7
    assert servicer.num == 4


async def test_closed_port_is_an_error():
    client = CoordinatorClient(f"127.0.0.1:{free_port()}", tls=PLAINTEXT, policy=QUICK)
    try:
        with pytest.raises(errors.Unreachable):
            await uploaded(client, endless())
    finally:
        await client.close()


async def test_error_of_the_frames_is_the_callers():
    async def broken():
        yield b"frame"
        raise OSError(5, "Input/output error")

    servicer = Uploads(100, None)
    async with client_of(servicer) as client:
        with pytest.raises(OSError, match="Input/output"):
            await uploaded(client, broken())


async def test_cancelled_upload_ends_at_the_server():
    has_begun, is_over = asyncio.Event(), asyncio.Event()

    class Noting(Uploads):
        async def UploadPayload(self, request_iterator, context):
            has_begun.set()
            context.add_done_callback(lambda _: is_over.set())
            await super().UploadPayload(request_iterator, context)

    async with client_of(Noting(10**9, None)) as client:
        task = asyncio.create_task(uploaded(client, endless()))
        await has_begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await is_over.wait()
