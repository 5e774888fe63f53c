"""Cached answers about weights: head, manifests, plans, payloads.

    head      one watch of the coordinator for all watchers here
    answers   in memory, bounded in bytes, the longest unused evicted first

Concurrent equal requests ask the coordinator once. Errors are not cached. While the coordinator is unreachable, an old
answer is given. A plan is kept for PLAN_S and never beyond a new head, a manifest for MANIFEST_S. Both are asked for
again after an outage, in which the run may have gone back unseen. Presigned addresses do not pass: samplers read
payloads here.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import random
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from heterorl.common.api import WeightsApi
from heterorl.common.errors import Draining, HeterorlError, Unreachable
from heterorl.common.process.backoff import Backoff, log_level
from heterorl.common.process.clock import Bell, Clock
from heterorl.common.types.policy import NO_VERSION, HeadUpdate, PullPlan, SignedManifest
from heterorl.relay.cache import CacheDirectory
from heterorl.relay.payloads import Payloads

_LOG = logging.getLogger(__name__)
PLAN_S = 10.0
"""The coordinator merges deltas on request, so a better plan comes some seconds later."""
MANIFEST_S = 600.0
MANIFEST_BYTES, PLAN_BYTES = 64 << 20, 64 << 20
"""Kept in memory at most."""
ValueT = TypeVar("ValueT")


class CachedWeights:
    """The relay's side of heterorl.common.api.WeightsApi."""

    def __init__(self, *, api: WeightsApi, cache: CacheDirectory, clock: Clock) -> None:
        self._api = api
        self.head = Head(api=api, clock=clock, on_change=self._head_changed)
        self._plans: Answers[PullPlan] = Answers(
            clock=clock, keep_s=PLAN_S, max_bytes=PLAN_BYTES, size=lambda plan: 256 + sum(map(len, plan.manifests))
        )
        self._signed: Answers[SignedManifest] = Answers(
            clock=clock, keep_s=MANIFEST_S, max_bytes=MANIFEST_BYTES, size=lambda signed: 256 + len(signed.data)
        )
        self._lists: Answers[tuple[bytes, ...]] = Answers(
            clock=clock, keep_s=MANIFEST_S, max_bytes=MANIFEST_BYTES, size=lambda found: 256 + sum(map(len, found))
        )
        self.payloads = Payloads(api=api, cache=cache, clock=clock, on_gone=self._plans.clear)

    async def get_signed_manifest(self, **asked: Any) -> SignedManifest:
        return await self._signed.get(tuple(asked.items()), functools.partial(self._api.get_signed_manifest, **asked))

    async def list_manifests(self, **asked: Any) -> tuple[bytes, ...]:
        return await self._lists.get(tuple(asked.items()), functools.partial(self._api.list_manifests, **asked))

    async def plan_pull(self, **asked: Any) -> PullPlan:
        plan = await self._plans.get(tuple(asked.items()), functools.partial(self._api.plan_pull, **asked))
        self.payloads.note(plan)
        return plan

    def _head_changed(self, *, went_back: bool, was_away: bool) -> None:
        # In an outage the run may have gone back, and passed the old head again.
        for kept in (self._plans, self._signed, self._lists) if went_back or was_away else (self._plans,):
            if went_back:
                kept.clear()
            else:
                kept.expire()

    async def close(self) -> None:
        self.head.close()
        await self.payloads.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry(Generic[ValueT]):
    value: ValueT
    num_bytes: int
    until: float


@dataclass(slots=True)
class _Question(Generic[ValueT]):
    """A running question; it is cancelled when its last caller leaves."""

    task: asyncio.Task[ValueT]
    num_waiting: int = 0


class Answers(Generic[ValueT]):
    """Answers of one kind, kept for `keep_s`; `size` gives one's bytes."""

    def __init__(self, *, clock: Clock, keep_s: float, max_bytes: int, size: Callable[[ValueT], int]) -> None:
        self._clock = clock
        self._keep_s = keep_s
        self._max_bytes = max_bytes
        self._size = size
        self._num_bytes = 0
        self._num_expired = 0
        self._num_cleared = 0
        self._entries: OrderedDict[Hashable, _Entry[ValueT]] = OrderedDict()
        self._asking: dict[Hashable, _Question[ValueT]] = {}

    async def get(self, key: Hashable, ask: Callable[[], Awaitable[ValueT]]) -> ValueT:
        """The answer of a key; `ask` asks the coordinator.
        Raises RemoteError: its error, or Unreachable without a cached answer."""
        entry = self._entries.get(key)
        if entry is not None and self._clock.monotonic() < entry.until:
            self._entries.move_to_end(key)
            return entry.value
        asking = self._asking.get(key)
        if asking is None:
            # A task of its own: the first caller may leave first.
            asking = self._asking[key] = _Question(asyncio.ensure_future(self._ask(key, ask)))
        asking.num_waiting += 1
        try:
            return await asyncio.shield(asking.task)
        except Unreachable:
            entry = self._entries.get(key)
            if entry is None:
                raise
            return entry.value
        finally:
            asking.num_waiting -= 1
            if not asking.num_waiting:
                asking.task.cancel()
            if (not asking.num_waiting or asking.task.done()) and self._asking.get(key) is asking:
                del self._asking[key]

    def expire(self) -> None:
        """Ask again; old answers serve while the coordinator is unreachable."""
        self._num_expired += 1
        self._asking.clear()
        now = self._clock.monotonic()
        for key, entry in self._entries.items():
            self._entries[key] = _Entry(value=entry.value, num_bytes=entry.num_bytes, until=min(entry.until, now))

    def clear(self) -> None:
        self._num_cleared += 1
        self.expire()
        self._entries.clear()
        self._num_bytes = 0

    async def _ask(self, key: Hashable, ask: Callable[[], Awaitable[ValueT]]) -> ValueT:
        expired, cleared = self._num_expired, self._num_cleared
        value = await ask()
        if cleared == self._num_cleared:
            # Asked before the others became old, it is as old as they are.
            self._put(key, value, keep_s=self._keep_s if expired == self._num_expired else 0.0)
        return value

    def _put(self, key: Hashable, value: ValueT, *, keep_s: float) -> None:
        old = self._entries.pop(key, None)
        self._num_bytes -= 0 if old is None else old.num_bytes
        entry = _Entry(value=value, num_bytes=self._size(value), until=self._clock.monotonic() + keep_s)
        self._entries[key] = entry
        self._num_bytes += entry.num_bytes
        while self._num_bytes > self._max_bytes:
            _, oldest = self._entries.popitem(last=False)
            self._num_bytes -= oldest.num_bytes


class Head:
    """The newest version known from the coordinator.

    `on_change` gets whether the run went back, as after a restore from a backup, and whether the watch was broken.
    """

    def __init__(self, *, api: WeightsApi, clock: Clock, on_change: Callable[..., None]) -> None:
        self._api = api
        self._clock = clock
        self._on_change = on_change
        self._bell = Bell()
        self._update: HeadUpdate | None = None
        self._told_at = 0.0
        self._is_heard = False
        self._is_closing = False

    @property
    def version(self) -> int:
        return NO_VERSION if self._update is None else self._update.version

    async def run(self) -> None:
        backoff = Backoff(clock=self._clock, rng=random.Random())
        while True:
            try:
                # From the beginning each time: a head that went back is seen only so.
                async for update in self._api.watch_head(after_version=NO_VERSION):
                    backoff.reset()
                    self._note(update)
                error = HeterorlError("the coordinator ended the watch")
            except HeterorlError as caught:
                error = caught
            # A sampler that saw newer versions elsewhere would take an older head for a run that went back.
            self._is_heard = False
            wait_s = backoff.delay_s(asked_s=getattr(error, "retry_after_s", 0.0))
            _LOG.log(log_level(error), "the head is watched again in %.1f s: %s", wait_s, error)
            await self._clock.sleep(wait_s)

    def _note(self, update: HeadUpdate) -> None:
        went_back, was_away = update.version < self.version, not self._is_heard
        is_new = update.version != self.version
        if went_back:
            _LOG.warning(
                "the run went back from version %d to %d: the relay drops its plans", self.version, update.version
            )
        self._update, self._told_at = update, self._clock.monotonic()
        if is_new or was_away:
            self._on_change(went_back=went_back, was_away=was_away)
            self._is_heard = True
            self._bell.ring()

    async def watch(self, *, after_version: int) -> AsyncIterator[HeadUpdate]:
        """Yield every head that passes the cursor, until the relay stops.
        Yields no head while the coordinator is away.
        Raises Unreachable: the head went back below one that was yielded, so the caller must watch from the start."""
        yielded = NO_VERSION
        while not self._is_closing:
            ticket, update = self._bell.ticket(), self._update
            if update is not None and update.version < yielded:
                raise Unreachable(f"the run went back to version {update.version}", retry_after_s=1.0)
            if self._is_heard and update is not None and update.version > after_version:
                after_version = yielded = update.version
                yield HeadUpdate(version=update.version, age_s=update.age_s + self._clock.monotonic() - self._told_at)
            else:
                await ticket.wait()
        raise Draining("the relay is stopping", retry_after_s=1.0)

    def close(self) -> None:
        self._is_closing = True
        self._bell.ring()
