"""A TCP line that is slow, or breaks each connection after so many bytes: what a coordinator sees of a far store."""

from __future__ import annotations

import asyncio

from tests.support.relay import CHUNK, Relay


class Narrow(Relay):
    """Counts bytes each way. Zeros bound nothing; what is changed holds for connections that are open already."""

    def __init__(self, target: str) -> None:
        super().__init__(target, one_way_s=0.0)
        self.down_bytes_per_s = 0.0
        self.most_down = 0
        """Bytes after which a connection breaks."""
        self.break_at_up = 0
        """Bytes of all connections after which the one that brought them breaks, once."""
        self.cut_at_down = 0
        """Bytes of all connections after which the line is cut."""
        self.down = self.up = 0
        self.num_connections = 0

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        is_down = writer.get_extra_info("sockname")[1] == self.port
        self.num_connections += is_down
        carried = 0
        while data := await reader.read(CHUNK):
            if is_down and self.down_bytes_per_s:
                await asyncio.sleep(len(data) / self.down_bytes_per_s)
            carried += len(data)
            if is_down:
                self.down += len(data)
            else:
                self.up += len(data)
            if is_down and self.most_down and carried > self.most_down:
                raise ConnectionResetError
            if self.break_at_up and self.up > self.break_at_up:
                self.break_at_up = 0
                raise ConnectionResetError
            if self.cut_at_down and self.down > self.cut_at_down:
                self.cut_at_down = 0
                self.cut()
            writer.write(data)
            await writer.drain()
        raise ConnectionResetError
