"""Calls that a relay carries: bytes both ways, as they are, under the name of the node that made them.

A unary call is a stream of one message on the wire, so all are carried as streams. Deadline, cancellation, metadata,
status and trailing metadata, in which typed errors travel, pass through; a message is read when the one before it has
left, in both directions, so that who is slow at one end slows the other.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio

from heterorl.common.errors import RemoteError
from heterorl.common.identity.carried import NODE_KEY
from heterorl.common.identity.tls import TlsConfig
from heterorl.common.rpc.lanes import Room
from heterorl.common.rpc.link import Link
from heterorl.relay.door import Door, Node

_OWN_KEYS = frozenset({"user-agent", "te", "content-type", NODE_KEY})
"""Metadata of one link alone; and what no node may say of itself."""
_Context = grpc.aio.ServicerContext[Any, Any]


class Forwarder:
    """Carries calls to the coordinator, each node's over a connection of its own."""

    def __init__(self, address: str, *, tls: TlsConfig, max_message_bytes: int, door: Door) -> None:
        self._address = address
        self._tls = tls
        self._max_message_bytes = max_message_bytes
        self._door = door
        # By the names in certificates, so there are as many as the authority issued for this site.
        self._links: dict[str, Link] = {}

    async def close(self) -> None:
        """Close all connections; calls under way are cancelled."""
        for link in self._links.values():
            await link.close()

    async def carry(self, method: str, node: Node, context: _Context) -> AsyncIterator[bytes]:
        """Yield the coordinator's answers to a call; what the node sends goes the other way meanwhile.

        Raises:
            AioRpcError: the coordinator's status, or the transport's.
            RemoteError: the node's message did not come.
        """
        # A call takes nothing at the coordinator before it has something to say.
        room, first = await self._door.message(node, method, context)
        try:
            async with self._link(node).channel() as channel:
                call: Any = channel.stream_stream(method)(
                    metadata=_metadata(node, context), timeout=context.time_remaining()
                )
                sending = asyncio.ensure_future(self._send(method, node, context, call, room, first))
                try:
                    async for message in call:
                        self._door.recheck(node)
                        yield message
                    context.set_trailing_metadata(_passing(await call.trailing_metadata()))
                except asyncio.CancelledError:
                    # The call was cancelled here because nothing came to be sent, or by the node.
                    if sending.done() and not sending.cancelled() and isinstance(sending.exception(), RemoteError):
                        raise sending.exception() from None  # type: ignore[misc]
                    raise
                finally:
                    call.cancel()
                    sending.cancel()
                    await asyncio.gather(sending, return_exceptions=True)
        finally:
            room.close()

    async def _send(self, method: str, node: Node, context: _Context, call: Any, room: Room, message: Any) -> None:
        try:
            while message is not grpc.aio.EOF:
                await call.write(message)
                room.close()
                room, message = await self._door.message(node, method, context)
            await call.done_writing()
        except RemoteError:
            call.cancel()
            raise
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            # The coordinator has answered before it heard all; its status says why.
            return
        finally:
            room.close()

    def _link(self, node: Node) -> Link:
        link = self._links.get(node.name)
        if link is None:
            link = Link(self._address, tls=self._tls, max_message_bytes=self._max_message_bytes)
            self._links[node.name] = link
        return link


def _metadata(node: Node, context: _Context) -> list[tuple[str, str | bytes]]:
    carried = _passing(context.invocation_metadata())
    return [*carried, (NODE_KEY, node.certificate)] if node.certificate else carried


def _passing(metadata: Any) -> list[tuple[str, str | bytes]]:
    pairs = metadata or ()
    return [(key, value) for key, value in pairs if key not in _OWN_KEYS and not key.startswith(("grpc-", ":"))]
