"""A TCP line with a delay each way that can be cut: what a site sees of a coordinator far away."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

CHUNK = 1 << 16


class Relay:
    """Carries bytes between whoever dials `port` and a target; `cut` ends all connections and refuses new ones."""

    def __init__(self, target: str, *, one_way_s: float) -> None:
        self._host, _, port = target.rpartition(":")
        self._port = int(port)
        self._one_way_s = one_way_s
        self._lines: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self.is_cut = False
        self.port = 0

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[Relay]:
        """Listen on a free port of loopback."""
        server = await asyncio.start_server(self._meet, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            self.cut()
            server.close()
            await asyncio.gather(*self._lines, return_exceptions=True)

    @property
    def num_open(self) -> int:
        """Connections that carry bytes now."""
        return len(self._lines)

    def cut(self) -> None:
        """Break the line."""
        self.is_cut = True
        for writer in self._writers:
            writer.transport.abort()

    def mend(self) -> None:
        """Carry again."""
        self.is_cut = False

    async def _meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.is_cut:
            writer.transport.abort()
            return
        task = asyncio.current_task()
        assert task is not None
        self._lines.add(task)
        self._writers.add(writer)
        try:
            far_reader, far_writer = await asyncio.open_connection(self._host, self._port)
            self._writers.add(far_writer)
            try:
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(self._carry(reader, far_writer))
                    tasks.create_task(self._carry(far_reader, writer))
            finally:
                far_writer.transport.abort()
                self._writers.discard(far_writer)
        except* OSError:
            pass
        finally:
            writer.transport.abort()
            self._writers.discard(writer)
            self._lines.discard(task)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        waiting: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

        async def deliver() -> None:
            while True:
                due, data = await waiting.get()
                await asyncio.sleep(max(0.0, due - loop.time()))
                if not data:
                    raise ConnectionResetError
                writer.write(data)
                await writer.drain()

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(deliver())
            while True:
                data = await reader.read(CHUNK)
                waiting.put_nowait((loop.time() + self._one_way_s, data))
                if not data:
                    return
