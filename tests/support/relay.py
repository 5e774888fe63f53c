"""A line between a client and a server that can be cut and restored; real sockets, no bytes changed."""

from __future__ import annotations

import asyncio
import contextlib


class Relay:
    """Listens on a port of loopback and copies bytes to another one, both ways, while it is whole."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._is_cut = False
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.port = 0

    async def __aenter__(self) -> Relay:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *exception: object) -> None:
        self.cut()
        self._server.close()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut(self) -> None:
        """Break every connection, and take no new ones."""
        self._is_cut = True
        for writer in self._writers:
            writer.transport.abort()

    def restore(self) -> None:
        """Take connections again."""
        self._is_cut = False

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._is_cut:
            writer.transport.abort()
            return
        there, back = await asyncio.open_connection("127.0.0.1", self._target)
        self._writers |= {writer, back}
        for source, sink in ((reader, back), (there, writer)):
            task = asyncio.create_task(self._copy(source, sink))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _copy(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(1 << 16):
                sink.write(data)
                await sink.drain()
        sink.close()
        self._writers.discard(sink)
