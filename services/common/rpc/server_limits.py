"""Limits of a server: memory of requests in flight, and file descriptors.

Memory is counted by kind of caller and message.

Short requests have a pool of their own, so neither a push over a slow line nor a silent caller delays a heartbeat. The
learner and the operator have a pool that samplers never use.
"""

from __future__ import annotations

import asyncio
import math
import resource
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from heterorl.common.errors import ConfigError, InvalidRequest, QuotaExceeded

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

    @property
    def is_ending(self) -> bool:
        return self.reading is None or self.reading.expired()

    def shrink(self, num_bytes: int) -> None:
        self._lane.give_back(self, max(0, self.num_bytes - num_bytes))

    def close(self) -> None:
        """Give all back; a second call is harmless."""
        self._lane.give_back(self, self.num_bytes)


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
        self._waiting: dict[Caller, dict[asyncio.Future[None], None]] = {}
        # Longest first.
        self._silent: dict[Reservation, float] = {}
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
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(caller, {})[turn] = None
        self._wake()
        room = Reservation(self, caller, self._message_bytes)
        try:
            await turn
        except BaseException:
            if turn.done() and not turn.cancelled():
                # Its turn came with the cancellation.
                room.close()
            else:
                self._leave(caller, turn)
            raise
        return room

    async def _arrival(self, room: Reservation, read: Callable[[], Awaitable[Any]]) -> Any:
        began = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(self._limit_s) as room.reading:
                self._silent[room] = began
                self._hurry()
                return await read()
        except TimeoutError as error:
            seconds = asyncio.get_running_loop().time() - began
            raise QuotaExceeded(f"no message in {seconds:.1f} s", retry_after_s=RETRY_AFTER_S) from error
        finally:
            room.reading = None
            self._silent.pop(room, None)

    def give_back(self, room: Reservation, num_bytes: int) -> None:
        if not num_bytes:
            return
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

    def _leave(self, caller: Caller, turn: asyncio.Future[None]) -> None:
        turns = self._waiting.get(caller, {})
        turns.pop(turn, None)
        if not turns:
            self._waiting.pop(caller, None)

    def _is_full(self, caller: Caller) -> bool:
        return self._of_site[caller.owner] + self._message_bytes > self._site_bytes

    def _wake(self) -> None:
        while self._free >= self._message_bytes:
            able = [each for each in self._waiting if self._used[each] + self._message_bytes <= self._own_bytes]
            fitting = [each for each in able if not self._is_full(each)]
            if not fitting:
                break
            caller = min(fitting, key=lambda each: (self._of_site[each.owner], self._used[each]))
            turn = next(iter(self._waiting[caller]))
            self._leave(caller, turn)
            if not turn.done():
                self._add(caller, self._message_bytes)
                turn.set_result(None)
        self._hurry()

    def _hurry(self) -> None:
        """End silent reads for callers without room, again when one is due."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if math.isinf(self._patience_s):
            return
        loop = asyncio.get_running_loop()
        now, again = loop.time(), math.inf
        ending = {room for room in self._silent if room.is_ending}
        for waiting in [each for each in self._waiting if self._used[each] < self._message_bytes]:
            if ending:
                # Their room may be enough.
                ending.pop()
                continue
            room, due = self._longest_silent(waiting)
            if room is None:
                continue
            if due > now:
                again = min(again, due)
                continue
            assert room.reading is not None
            if self._used[room.caller] < 2 * self._message_bytes:
                self._last_ended_at = now
            room.reading.reschedule(now)
            room.reading = None
        if again < math.inf:
            self._timer = loop.call_at(again, self._hurry)

    def _longest_silent(self, waiting: Caller) -> tuple[Reservation | None, float]:
        """The read that may end for a caller, and when."""
        is_own_site = self._is_full(waiting)
        candidates = [
            room
            for room in self._silent
            if not room.is_ending and room.caller != waiting and (not is_own_site or room.caller.owner == waiting.owner)
        ]
        if not candidates:
            return None, math.inf

        def size(room: Reservation) -> tuple[bool, int, int]:
            used = self._used[room.caller]
            return used >= 2 * self._message_bytes, self._of_site[room.caller.owner], used

        # `max` takes the first of equals, which is the longest silent.
        room = max(candidates, key=size)
        due = self._silent[room] + self._patience_s
        if not size(room)[0]:
            due = max(due, self._last_ended_at + self._last_s)
        return room, due


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
