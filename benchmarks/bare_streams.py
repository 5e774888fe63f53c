"""Best speed of a link: a file streamed over gRPC and TCP by a process without other work."""

from __future__ import annotations

import asyncio
import multiprocessing
import socket
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import grpc.aio

from heterorl.common.rpc.transport_options import keep_freed_frames, link_options
from heterorl.common.weights.payload import FRAME_BYTES
from heterorl.coordinator.store.payload_files import write_all
from heterorl.v1 import policy_pb2

_BARE = "/bench.Bare/Read"


@contextmanager
def serving(serve: Callable[[str, Any], None], path: Path) -> Iterator[int]:
    """A process that serves a file; its port."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(str(path), theirs), daemon=True)
    process.start()
    try:
        yield ours.recv()
    finally:
        process.kill()
        process.join()


def serve_bare(path: str, ready: Any) -> None:
    """A gRPC server that streams a file's frames and does nothing else."""

    keep_freed_frames()

    async def read(_request: bytes, _context: Any) -> AsyncIterator[bytes]:
        with await asyncio.to_thread(Path(path).open, "rb") as file:
            while frame := file.read(FRAME_BYTES):
                yield policy_pb2.ReadPayloadResponse(frame=frame).SerializeToString()

    async def serve() -> None:
        server = grpc.aio.server(options=link_options(16 << 20))
        handler = grpc.unary_stream_rpc_method_handler(read)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bench.Bare", {"Read": handler}),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        ready.send(port)
        await server.wait_for_termination()

    asyncio.run(serve())


async def read_bare(port: int, file: BinaryIO | None = None) -> int:
    """Read everything; write it to a file or drop it."""
    num_bytes = 0
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=link_options(16 << 20)) as channel:
        method = channel.unary_stream(_BARE, response_deserializer=policy_pb2.ReadPayloadResponse.FromString)
        async for message in method(b""):
            num_bytes += len(message.frame)
            if file is not None:
                await asyncio.to_thread(write_all, file, message.frame)
    return num_bytes


async def read_bare_to_file(port: int, directory: Path) -> int:
    """Read everything into a new file."""
    with tempfile.TemporaryFile(buffering=0, dir=directory) as file:
        return await read_bare(port, file)


def serve_tcp(path: str, ready: Any) -> None:
    """Send a file to whoever connects."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        ready.send(server.getsockname()[1])
        while True:
            link, _ = server.accept()
            with link, Path(path).open("rb") as file:
                link.sendfile(file)


async def read_tcp(port: int) -> int:
    """Read everything into one buffer."""
    buffer, num_bytes = bytearray(FRAME_BYTES), 0
    with socket.create_connection(("127.0.0.1", port)) as link:
        while got := link.recv_into(buffer):
            num_bytes += got
    return num_bytes
