"""Pushed groups on their way from messages to the store: read ahead, looked at off the event loop, committed together.

read      waits for messages of one call, bounded by their room; unblocked by the peer, or the call's end
submit    waits for messages that were read, then for room among the commits; unblocked by either loop beside it
outcomes  waits for a commit, in order; unblocked by the store; ends with the reader, whatever ended it

While some groups of a call wait for their fsync, the next ones are looked at and handed to the store, which commits all
that wait together.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from itertools import chain

from heterorl.common.errors import NotRegistered
from heterorl.common.process.metrics import BYTES
from heterorl.common.process.threads import in_thread
from heterorl.common.types.common import Contract
from heterorl.common.types.rollout import PushOutcome
from heterorl.coordinator.groups.intake import Arrival, examined
from heterorl.coordinator.rollout import RolloutColumn
from heterorl.coordinator.rpc.door import INLINE_BYTES, Requests
from heterorl.v1 import rollout_pb2

READ_AHEAD = 16
"""Messages of one push stream that wait to be looked at."""
BATCH_BYTES = 4 << 20
"""Of those that are looked at together and share a commit; a larger one is alone."""
COMMITS = 3
"""Commits of one push stream that are under way."""
Pushed = Sequence[rollout_pb2.Group]
"""A push as the door has it."""
_Sized = tuple[Pushed, int]
"""A push and its bytes on the wire."""
_Answers = asyncio.Future[list[PushOutcome]]
_Commit = tuple[list[int], _Answers]
"""How many groups each message has, and what becomes of all of them."""


class PushStreams:
    """The push streams of one coordinator."""

    def __init__(self, api: RolloutColumn, *, max_prompt_tokens: int) -> None:
        self._api = api
        self._max_prompt_tokens = max_prompt_tokens
        # Once stated, a contract stays; until then nobody is registered who could push.
        self._contract: Contract | None = None
        self._converting = asyncio.Semaphore(1)

    async def outcomes(self, requests: AsyncIterator[Pushed]) -> AsyncIterator[Sequence[PushOutcome]]:
        """The outcomes of each message's groups, in order.

        Raises:
            RemoteError: a message was refused; those before it are answered.
        """
        if isinstance(requests, Requests):
            # Messages wait in the queues, and are counted until their groups are in the store.
            requests.settle_by_hand()
        arrived: asyncio.Queue[_Sized | None] = asyncio.Queue(READ_AHEAD)
        committing: asyncio.Queue[_Commit | None] = asyncio.Queue(COMMITS)
        commits = asyncio.Semaphore(COMMITS)
        reader = asyncio.create_task(_read(requests, arrived))
        submitter = asyncio.create_task(self._submit(arrived, committing, commits))
        try:
            while (commit := await committing.get()) is not None:
                counts, answers = commit
                outcomes = await answers
                if isinstance(requests, Requests):
                    requests.settle(len(counts))
                first = 0
                for count in counts:
                    if some := outcomes[first : first + count]:
                        yield some
                    first += count
            await submitter
            await reader
        finally:
            for task in (reader, submitter):
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, Exception):
                    await task

    async def _submit(
        self,
        arrived: asyncio.Queue[_Sized | None],
        committing: asyncio.Queue[_Commit | None],
        commits: asyncio.Semaphore,
    ) -> None:
        """Hand what was read to the store, some at a time; ends with None, whatever goes wrong."""
        waiting: _Sized | None = await arrived.get()
        try:
            while waiting is not None:
                batch, num_bytes, is_open = [waiting[0]], waiting[1], True
                waiting = None
                while not arrived.empty():
                    entry = arrived.get_nowait()
                    if entry is None:
                        is_open = False
                        break
                    if num_bytes + entry[1] > BATCH_BYTES:
                        waiting = entry
                        break
                    batch.append(entry[0])
                    num_bytes += entry[1]
                entries = await self._look_at(batch, num_bytes)
                batch.clear()
                if entries:
                    await commits.acquire()
                    answers: _Answers = asyncio.ensure_future(self._api.take_groups(list(chain.from_iterable(entries))))
                    answers.add_done_callback(lambda _: commits.release())
                    # Nobody may ask any more.
                    answers.add_done_callback(_note)
                    await committing.put(([len(groups) for groups in entries], answers))
                if waiting is None and is_open:
                    waiting = await arrived.get()
        except Exception:
            await committing.put(None)
            raise
        await committing.put(None)

    async def _look_at(self, batch: list[Pushed], num_bytes: int) -> list[list[Arrival]]:
        """The arrivals of each message, in order."""
        BYTES.labels("groups", "in").inc(num_bytes)
        if self._contract is None:
            self._contract = await self._api.stated_contract()
        contract = self._contract
        if contract is None:
            raise NotRegistered("no learner has stated the contract yet, so no site is registered")
        limit = self._max_prompt_tokens
        if num_bytes <= INLINE_BYTES:
            return _examined(batch, contract, limit)
        # Some nanoseconds for each token, in which the event loop answers others; one at a time for the memory of it.
        async with self._converting:
            return await in_thread(_examined, batch, contract, limit)


def _examined(pushes: Sequence[Pushed], contract: Contract, max_prompt_tokens: int) -> list[list[Arrival]]:
    return [[examined(group, contract, max_prompt_tokens=max_prompt_tokens) for group in push] for push in pushes]


async def _read(requests: AsyncIterator[Pushed], arrived: asyncio.Queue[_Sized | None]) -> None:
    try:
        async for message in requests:
            # Known where it came in; a message counts its bytes by writing them.
            num_bytes = requests.num_bytes if isinstance(requests, Requests) else sum(g.ByteSize() for g in message)
            await arrived.put((message, num_bytes))
    except Exception:
        # Whatever it is. Groups before it are committed and answered; then it ends the call.
        await arrived.put(None)
        raise
    await arrived.put(None)


def _note(answers: _Answers) -> None:
    if not answers.cancelled():
        answers.exception()
