"""Pushed groups on their way from messages to the store: read ahead, converted off the event loop, committed together.

read      waits for messages of one call, bounded by their room; unblocked by the peer, or the call's end
outcomes  waits for the reader, then for the commit; unblocked by the reader's None, whatever ended it
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from heterorl.common.errors import NotRegistered
from heterorl.common.process.metrics import BYTES
from heterorl.common.types.common import Contract
from heterorl.common.types.rollout import Group, PushOutcome, SealedGroup
from heterorl.coordinator.groups.intake import Arrival
from heterorl.coordinator.rpc.door import INLINE_BYTES, Requests
from heterorl.coordinator.servicers import arrivals
from heterorl.v1 import rollout_pb2

PUSH_BATCH = 16
"""Groups of one push stream that share a commit."""
_Pushed = tuple[rollout_pb2.PushGroupsRequest, int]
"""A message and its bytes on the wire."""


class Taker(Protocol):
    """Takes groups in, also those which nobody can read, and hands groups on as their bytes."""

    async def take_groups(self, groups: Sequence[Group | SealedGroup | Arrival]) -> list[PushOutcome]: ...

    async def stated_contract(self) -> Contract | None: ...


class PushStreams:
    """The push streams of one coordinator."""

    def __init__(self, api: Taker, *, max_prompt_tokens: int) -> None:
        self._api = api
        self._max_prompt_tokens = max_prompt_tokens
        # Once stated, a contract stays; until then nobody is registered who could push.
        self._contract: Contract | None = None
        self._converting = asyncio.Semaphore(1)

    async def outcomes(self, requests: AsyncIterator[rollout_pb2.PushGroupsRequest]) -> AsyncIterator[PushOutcome]:
        """One outcome per message, in order.

        Raises:
            RemoteError: a message was refused; those before it are answered.
        """
        arrived: asyncio.Queue[_Pushed | None] = asyncio.Queue(PUSH_BATCH)

        async def read() -> None:
            try:
                async for message in requests:
                    # Known where it came in; a message counts its bytes by writing them.
                    num_bytes = requests.num_bytes if isinstance(requests, Requests) else message.ByteSize()
                    await arrived.put((message, num_bytes))
            except Exception:
                # Whatever it is. Groups before it are committed and answered; then it ends the call.
                await arrived.put(None)
                raise
            await arrived.put(None)

        if isinstance(requests, Requests):
            # Messages wait in the queue and in the batch, and are counted until their groups are in the store.
            requests.settle_by_hand()
        reader = asyncio.create_task(read())
        try:
            is_open = True
            while is_open:
                batch = [await arrived.get()]
                while not arrived.empty() and len(batch) < PUSH_BATCH:
                    batch.append(arrived.get_nowait())
                is_open = batch[-1] is not None
                answered = await self._push([pushed for pushed in batch if pushed is not None])
                batch.clear()
                if isinstance(requests, Requests):
                    requests.settle(len(answered))
                for outcome in answered:
                    yield outcome
        finally:
            reader.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await reader

    async def _push(self, batch: list[_Pushed]) -> list[PushOutcome]:
        """One outcome per message, in order; a group that no value can hold is recorded as invalid like any other."""
        if not batch:
            return []
        num_bytes = sum(size for _, size in batch)
        BYTES.labels("groups", "in").inc(num_bytes)
        if self._contract is None:
            self._contract = await self._api.stated_contract()
        contract = self._contract
        if contract is None:
            raise NotRegistered("no learner has stated the contract yet, so no site is registered")
        if num_bytes <= INLINE_BYTES:
            entries = self._read(batch, contract)
        else:
            # Some 20 ns for each token, in which the event loop answers others; one at a time for the memory of it.
            async with self._converting:
                entries = await asyncio.to_thread(self._read, batch, contract)
        return await self._api.take_groups(entries)

    def _read(self, batch: list[_Pushed], contract: Contract) -> list[Arrival]:
        limit = self._max_prompt_tokens
        return [arrivals.read(message.group, contract=contract, max_prompt_tokens=limit) for message, _ in batch]
