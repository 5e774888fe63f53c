"""Pushed groups on their way from messages to the store: read ahead, converted off the event loop, committed together.

read      waits for messages of one call, bounded by their room; unblocked by the peer, or the call's end
outcomes  waits for the reader, then for the commit; unblocked by the reader's None, whatever ended it
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator

from heterorl.v1 import rollout_pb2

from services.common.api import CoordinatorApi
from services.common.errors import InvalidRequest
from services.common.metrics import BYTES
from services.common.rpc.door import INLINE_BYTES, Requests
from services.common.types import DropReason, Group, PushOutcome
from services.common.wire import group_from_pb, received, shell_from_pb

PUSH_BATCH = 16
"""Groups of one push stream that share a commit."""


class Intake:
    """The push streams of one coordinator."""

    def __init__(self, api: CoordinatorApi, *, max_prompt_tokens: int) -> None:
        self._api = api
        self._max_prompt_tokens = max_prompt_tokens
        self._converting = asyncio.Semaphore(1)

    async def outcomes(self, requests: AsyncIterator[rollout_pb2.PushGroupsRequest]) -> AsyncIterator[PushOutcome]:
        """One outcome per message, in order.

        Raises:
            RemoteError: a message was refused; those before it are answered.
        """
        arrived: asyncio.Queue[rollout_pb2.PushGroupsRequest | None] = asyncio.Queue(PUSH_BATCH)

        async def read() -> None:
            try:
                async for message in requests:
                    await arrived.put(message)
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
                answered = await self._push([message for message in batch if message is not None])
                batch.clear()
                if isinstance(requests, Requests):
                    requests.settle(len(answered))
                for outcome in answered:
                    yield outcome
        finally:
            reader.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await reader

    async def _push(self, batch: list[rollout_pb2.PushGroupsRequest]) -> list[PushOutcome]:
        """One outcome per message, in order; a group that no value can hold is refused without touching the others."""
        if not batch:
            return []
        num_bytes = sum(message.ByteSize() for message in batch)
        BYTES.labels("groups", "in").inc(num_bytes)
        if num_bytes <= INLINE_BYTES:
            converted = self._convert(batch)
        else:
            # Some 100 ns for each token, in which the event loop answers others; one at a time for the memory of it.
            async with self._converting:
                converted = await asyncio.to_thread(self._convert, batch)
        outcomes = await self._api.push_groups([group for group, _ in converted])
        return [
            dataclasses.replace(outcome, message=problem)
            if problem and outcome.reason is DropReason.INVALID
            else outcome
            for outcome, (_, problem) in zip(outcomes, converted, strict=True)
        ]

    def _convert(self, batch: list[rollout_pb2.PushGroupsRequest]) -> list[tuple[Group, str]]:
        """Groups; where a message is none, its shell and what is wrong with it, so that it is refused and counted."""
        converted: list[tuple[Group, str]] = []
        for message in batch:
            try:
                _check_counts(message.group, max_prompt_tokens=self._max_prompt_tokens)
                converted.append((received(group_from_pb(message.group)), ""))
            except InvalidRequest as error:
                converted.append((shell_from_pb(message.group), str(error)))
        return converted


def _check_counts(group: rollout_pb2.Group, *, max_prompt_tokens: int) -> None:
    """Count before anything becomes objects: a log-prob's four bytes on the wire bound a token, which may cost one.

    Raises:
        InvalidRequest: no contract allows the group.
    """
    num_prompt = len(group.prompt_token_ids)
    if num_prompt > max_prompt_tokens:
        raise InvalidRequest(f"prompt_token_ids: {num_prompt} tokens, max_prompt_tokens is {max_prompt_tokens}")
    for number, rollout in enumerate(group.rollouts):
        num_tokens, num_logprobs = len(rollout.token_ids), len(rollout.sampler_logprobs)
        if num_logprobs != num_tokens:
            raise InvalidRequest(f"rollouts[{number}].sampler_logprobs: {num_logprobs} for {num_tokens} tokens")
        if len(rollout.spans) > num_tokens:
            raise InvalidRequest(f"rollouts[{number}].spans: {len(rollout.spans)} for {num_tokens} tokens")
