"""Limits of a server: memory of requests in flight, and file descriptors.

Memory is counted by kind of caller and message.

Short requests have a pool of their own, so neither a push over a slow line nor a silent caller delays a heartbeat. The
learner and the operator have a pool that samplers never use.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
import resource
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from heterorl.common.errors import ConfigError, InvalidRequest, QuotaExceeded

K = TypeVar("K")
OF_SITE = 0.75
"""Largest share of a pool for one site."""
RETRY_AFTER_S = 1.0


@dataclass(frozen=True, slots=True)
class Caller:
    """The caller that memory is counted for.

    `is_privileged` callers use the pool kept from samplers.
    """

    name: str
    is_privileged: bool
    is_proven: bool
    site: str = ""
    """First label of the site, which all certificates of one owner share."""

    @property
    def owner(self) -> str:
        return self.site or self.name


class Reservation:
    """Memory taken for one message, bytes."""

    __slots__ = ("_lane", "caller", "num_bytes", "reading")

    def __init__(self, lane: MessagePool, caller: Caller, num_bytes: int) -> None:
        self._lane = lane
        self.caller = caller
        self.num_bytes = num_bytes
        self.reading: asyncio.Timeout | None = None

    def shrink(self, num_bytes: int) -> None:
        self._lane.give_back(self, max(0, self.num_bytes - num_bytes))

    def close(self) -> None:
        """Give all back; a second call is harmless."""
        self._lane.give_back(self, self.num_bytes)


class _Ranks(Generic[K]):
    """Keys by rank, the lowest first.

    A change costs the logarithm of their number. A rank ends with a number that no other key has.
    """

    def __init__(self) -> None:
        self._ranks: dict[K, tuple[float, ...]] = {}
        self._heap: list[tuple[tuple[float, ...], K]] = []

    def place(self, key: K, rank: tuple[float, ...] | None) -> None:
        if rank is None:
            self._ranks.pop(key, None)
        elif self._ranks.get(key) != rank:
            self._ranks[key] = rank
            heapq.heappush(self._heap, (rank, key))
        if len(self._heap) > 2 * len(self._ranks) + 8:
            self._heap = [(each, key) for key, each in self._ranks.items()]
            heapq.heapify(self._heap)

    def first(self) -> tuple[tuple[float, ...], K] | None:
        while self._heap and self._ranks.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0] if self._heap else None


class _Order:
    """Callers by rank, where their site's memory is the second part."""

    def __init__(self) -> None:
        self._sites: _Ranks[str] = _Ranks()
        self._callers: dict[str, _Ranks[Caller]] = {}

    def place(self, caller: Caller, rank: tuple[float, ...] | None, *, of_site: float | None) -> None:
        """Without a rank a caller has no place, without `of_site` its site."""
        if rank is None and caller.owner not in self._callers:
            return
        callers = self._callers.setdefault(caller.owner, _Ranks())
        callers.place(caller, rank)
        first = callers.first()
        if first is None:
            del self._callers[caller.owner]
        of_first = None if first is None or of_site is None else (first[0][0], of_site, *first[0][1:])
        self._sites.place(caller.owner, of_first)

    def first(self, site: str | None = None) -> Caller | None:
        """The first caller, of one site if given."""
        if site is None:
            found = self._sites.first()
            site = found[1] if found else ""
        first = self._callers[site].first() if site in self._callers else None
        return first[1] if first else None


class MessagePool:
    """Memory for one kind of messages: bounded, also by site and caller.

    gRPC hands over whole messages, and a server sees the length only then. So room for the longest message is taken
    before, and the rest given back after. A silent caller holds room too, so these rules apply:

    - Free room goes to the site that holds least, then to the caller that holds least, then by arrival.
    - A caller without any room does not wait for silent ones: the longest silent read of the largest caller of the
      largest site ends. The last read of a caller ends only every `last_s`, since a push may crawl over a slow line.

    A caller that uses all its room waits only for itself; one site never takes a whole pool; a read without bytes ends;
    a cancelled wait gives up its room. One caller may have `of_caller` messages of `message_bytes`. `longest` is the
    longest accepted message in bytes, `limit_s` the longest time for one message. After a silence of `patience_s` a
    read may end.
    """

    def __init__(
        self, *, total_bytes: float, message_bytes: int, of_caller: int, longest: int = 0, limit_s: float | None = None,
        patience_s: float = math.inf, last_s: float = 0.0,
    ) -> None:  # fmt: skip
        self._message_bytes = message_bytes
        self._own_bytes = of_caller * message_bytes
        self._free = max(total_bytes, self._own_bytes)
        self._site_bytes = max(OF_SITE * self._free, self._own_bytes)
        self._longest = longest or message_bytes
        self._limit_s = limit_s
        self._patience_s = patience_s
        self._last_s = last_s
        self._last_ended_at = -math.inf
        self._used: Counter[Caller] = Counter()
        self._of_site: Counter[str] = Counter()
        # By number, which is the order of arrival.
        self._numbers = itertools.count()
        self._waiting: dict[Caller, dict[int, asyncio.Future[None]]] = {}
        self._silent: dict[Caller, dict[int, tuple[float, Reservation]]] = {}
        self._next = _Order()
        self._largest = _Order()
        # Callers that wait without any room.
        self._bare = _Order()
        self._full: set[str] = set()
        self._ending: Reservation | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def num_bytes(self) -> int:
        return self._used.total()

    async def message(
        self, caller: Caller, read: Callable[[], Awaitable[Any]], *, times: int
    ) -> tuple[Reservation, Any]:
        room = await self.room(caller)
        try:
            data = await self._arrival(room, read)
            if len(data) > self._longest:
                raise InvalidRequest(f"a request of {len(data)} bytes, where {self._longest} are enough")
        except BaseException:
            room.close()
            raise
        room.shrink(times * len(data))
        return room, data

    async def room(self, caller: Caller) -> Reservation:
        size = self._message_bytes
        if (
            size <= self._free
            and self._used[caller] + size <= self._own_bytes
            and self._of_site[caller.owner] + size <= self._site_bytes
        ):
            self._add(caller, size)
            return Reservation(self, caller, size)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        number = self._enter(self._waiting, caller, turn)
        self._wake()
        room = Reservation(self, caller, size)
        try:
            await turn
        except BaseException:
            if turn.done() and not turn.cancelled():
                # Its turn came with the cancellation.
                room.close()
            else:
                self._leave(self._waiting, caller, number)
            raise
        return room

    async def _arrival(self, room: Reservation, read: Callable[[], Awaitable[Any]]) -> Any:
        began, number = asyncio.get_running_loop().time(), -1
        try:
            async with asyncio.timeout(self._limit_s) as room.reading:
                number = self._enter(self._silent, room.caller, (began, room))
                self._hurry()
                return await read()
        except TimeoutError as error:
            seconds = asyncio.get_running_loop().time() - began
            raise QuotaExceeded(f"no message in {seconds:.1f} s", retry_after_s=RETRY_AFTER_S) from error
        finally:
            if self._ending is room:
                self._ending = None
            self._leave(self._silent, room.caller, number)

    def give_back(self, room: Reservation, num_bytes: int) -> None:
        room.num_bytes -= num_bytes
        self._add(room.caller, -num_bytes)
        self._wake()

    def _add(self, caller: Caller, num_bytes: int) -> None:
        self._free -= num_bytes
        self._used[caller] += num_bytes
        self._of_site[caller.owner] += num_bytes
        if not self._used[caller]:
            # Else names of connections pile up.
            del self._used[caller]
        if not self._of_site[caller.owner]:
            del self._of_site[caller.owner]
        self._place(caller)

    def _enter(self, entries: dict[Caller, dict[int, Any]], caller: Caller, entry: Any) -> int:
        number = next(self._numbers)
        entries.setdefault(caller, OrderedDict())[number] = entry
        self._place(caller)
        return number

    def _leave(self, entries: dict[Caller, dict[int, Any]], caller: Caller, number: int) -> None:
        own = entries.get(caller, {})
        own.pop(number, None)
        if not own:
            entries.pop(caller, None)
        self._place(caller)

    def _place(self, caller: Caller) -> None:
        """Rank a caller, and its site, after a change of either."""
        size, used, of_site = self._message_bytes, self._used[caller], self._of_site[caller.owner]
        turns, reads = self._waiting.get(caller), self._silent.get(caller)
        is_full = of_site + size > self._site_bytes
        (self._full.add if is_full else self._full.discard)(caller.owner)
        rank = (0, used, next(iter(turns))) if turns else None
        open_site = None if is_full else of_site
        self._next.place(caller, rank if used + size <= self._own_bytes else None, of_site=open_site)
        self._bare.place(caller, rank if used < size else None, of_site=open_site)
        rank = (used < 2 * size, -used, next(iter(reads))) if reads else None
        self._largest.place(caller, rank, of_site=-of_site)

    def _wake(self) -> None:
        while self._free >= self._message_bytes and (caller := self._next.first()) is not None:
            number, turn = next(iter(self._waiting[caller].items()))
            self._leave(self._waiting, caller, number)
            if not turn.done():
                self._add(caller, self._message_bytes)
                turn.set_result(None)
        self._hurry()

    def _hurry(self) -> None:
        """End a due silent read for a caller without room.
        One ends at a time; if none is due, it looks again."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if math.isinf(self._patience_s) or self._ending is not None:
            return
        loop = asyncio.get_running_loop()
        now, again = loop.time(), math.inf
        # Callers of a full site get room only where a read of their site ends.
        for site in (None, *self._full):
            caller = self._largest.first(site)
            if caller is None or self._bare.first(site) is None:
                continue
            number, (began, room) = next(iter(self._silent[caller].items()))
            is_last = self._used[caller] < 2 * self._message_bytes
            due = max(began + self._patience_s, self._last_ended_at + self._last_s if is_last else 0.0)
            if due > now:
                again = min(again, due)
                continue
            # Its own limit may have passed before it knows.
            if room.reading is not None and not room.reading.expired():
                room.reading.reschedule(now)
                self._last_ended_at = now if is_last else self._last_ended_at
            self._ending = room
            self._leave(self._silent, caller, number)
            return
        if again < math.inf:
            self._timer = loop.call_at(again, self._hurry)


SHORT = frozenset(
    {
        "/heterorl.v1.PolicyService/WatchHead",
        "/heterorl.v1.PolicyService/GetManifest",
        "/heterorl.v1.PolicyService/ListManifests",
        "/heterorl.v1.PolicyService/PlanPull",
        "/heterorl.v1.PolicyService/ReadPayload",
        "/heterorl.v1.RolloutService/LeaseWork",
        "/heterorl.v1.RolloutService/AbandonWork",
        "/heterorl.v1.RunService/Heartbeat",
        "/grpc.health.v1.Health/Check",
    }
)
"""Methods of samplers and relays whose longest request has at most SHORT_BYTES."""
SHORT_BYTES = 1 << 16
OF_CALLER, OF_PRIVILEGED = 4, 16
"""Messages of the largest size of one caller in a pool; a learner's streams seldom send."""
SHORT_PART = 4
"""The short pool has one part in this many of the total."""
SHORT_S, LONG_S = 10.0, 900.0
"""Longest time of a message. A short one comes with its call; 900 s are 16 MiB at 18 kB/s."""
SHORT_PATIENCE_S, LONG_PATIENCE_S = 0.5, 10.0
"""Silence after which a read may end while a caller without room waits."""
LAST_S = 30.0
"""Least time between two ends of a caller's last long read."""


class MemoryQuota:
    """The pools of one server. Belongs to the event loop."""

    def __init__(self, *, total_bytes: int, message_bytes: int) -> None:
        of_short = total_bytes // SHORT_PART
        self.short = MessagePool(
            total_bytes=of_short, message_bytes=message_bytes, of_caller=OF_CALLER, longest=SHORT_BYTES,
            limit_s=SHORT_S, patience_s=SHORT_PATIENCE_S,
        )  # fmt: skip
        self.long = MessagePool(
            total_bytes=total_bytes - of_short, message_bytes=message_bytes, of_caller=OF_CALLER, limit_s=LONG_S,
            patience_s=LONG_PATIENCE_S, last_s=LAST_S,
        )  # fmt: skip
        # A learner's streams may be silent for as long as a step takes.
        self.privileged = MessagePool(total_bytes=math.inf, message_bytes=message_bytes, of_caller=OF_PRIVILEGED)

    @property
    def num_bytes(self) -> int:
        return self.short.num_bytes + self.long.num_bytes + self.privileged.num_bytes

    async def message(
        self, caller: Caller, method: str, read: Callable[[], Awaitable[Any]], *, times: int = 1
    ) -> tuple[Reservation, Any]:
        """Wait for room, then for the message; the caller closes the room.

        At the end of a stream the message is gRPC's EOF, of length 0. The message will take `times` its bytes.

        Raises:
            QuotaExceeded: none came in time, or callers without room could not wait longer; worth a retry.
            InvalidRequest: the message is too long for its method.
        """
        lane = self.privileged if caller.is_privileged else self.short if method in SHORT else self.long
        return await lane.message(caller, read, times=times)


PER_CALL = 3
"""Descriptors of a call: its connection, its payload, and the pass that proves it."""
OWN = 160
"""Descriptors of the process: database, log, sockets, certificates, metrics, directories."""
ENOUGH = 1 << 16
"""Most that is asked for: some systems allow a billion, and some programs close all of them."""
MIN_CALLS = 8


def raise_limit(*, calls: int) -> int:
    """Take the descriptors that `calls` need, if allowed; returns their number."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return ENOUGH
    wanted = max(soft, ENOUGH, needed_for(calls))
    limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    except (OSError, ValueError):
        # Some systems state a limit that they do not grant.
        return soft
    return limit


def needed_for(calls: int) -> int:
    """Descriptors that a process with so many concurrent calls may need."""
    return OWN + PER_CALL * calls


def calls_within(limit: int, *, wanted: int) -> int:
    """Concurrent calls that `limit` descriptors allow, up to `wanted`; ConfigError below MIN_CALLS."""
    calls = min(wanted, (limit - OWN) // PER_CALL)
    if calls < MIN_CALLS:
        raise ConfigError(
            "max_concurrent_rpcs",
            f"{limit} file descriptors are not enough for {MIN_CALLS} calls at once",
            action=f"allow at least {needed_for(wanted)} (ulimit -n, LimitNOFILE=), as {wanted} calls need",
        )
    return calls
