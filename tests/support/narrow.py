"""A TCP line that is slow, or breaks each connection after so many bytes: what a coordinator sees of a far store."""

from __future__ import annotations

import asyncio

from tests.support.relay import CHUNK, Relay


class Narrow(Relay):
    """Counts bytes. Zeros bound nothing; what is changed holds for connections that are open already."""

    def __init__(self, target: str) -> None:
        super().__init__(target, one_way_s=0.0)
        self.down_bytes_per_s = 0.0
        self.most_down = 0
        """Bytes after which a connection breaks."""
        self.down = 0
        self.num_connections = 0

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        is_down = writer.get_extra_info("sockname")[1] == self.port
        self.num_connections += is_down
        carried = 0
        while data := await reader.read(CHUNK):
            if is_down and self.down_bytes_per_s:
                await asyncio.sleep(len(data) / self.down_bytes_per_s)
            carried += len(data)
            self.down += is_down * len(data)
            if is_down and self.most_down and carried > self.most_down:
                raise ConnectionResetError
            writer.write(data)
            await writer.drain()
        raise ConnectionResetError
