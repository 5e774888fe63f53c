"""Bytes of requests in memory at one server: a lane for each kind of caller and of message.

Requests of some KiB have a lane of their own: no push that crawls in, and no caller that sends none, delays a
heartbeat. The learner and the operator have room of their own, which others' bytes never take.
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
"""Of a lane, the part that one site may have."""
RETRY_AFTER_S = 1.0


@dataclass(frozen=True, slots=True)
class Caller:
    """Who is counted; `is_privileged` may also use what is kept from samplers."""

    name: str
    is_privileged: bool
    is_proven: bool
    site: str = ""
    """What certificates of one owner have in common: the first label of their site."""

    @property
    def owner(self) -> str:
        """The site; where none is stated, the holder itself."""
        return self.site or self.name


class Reservation:
    """What is taken for one message, bytes."""

    __slots__ = ("_lane", "holder", "num_bytes", "reading")

    def __init__(self, lane: MessagePool, holder: Caller, num_bytes: int) -> None:
        self._lane = lane
        self.holder = holder
        self.num_bytes = num_bytes
        self.reading: asyncio.Timeout | None = None

    def shrink(self, num_bytes: int) -> None:
        """Keep only so many bytes, where that is less."""
        self._lane.give_back(self, max(0, self.num_bytes - num_bytes))

    def close(self) -> None:
        """Give all back; once more is harmless."""
        self._lane.give_back(self, self.num_bytes)


class MessagePool:
    """Room for messages of one kind: bytes in memory at once, of all, of each site and of each holder.

    gRPC gives a message whole. How long it is, a server sees when it is here: room for the longest is taken before, and
    the rest given back after. So a caller that sends nothing holds room, and there are rules:

    - Room that comes back goes to the site that holds least, then to the holder that holds least, then by arrival.
    - A holder without any room does not wait for silent ones: the longest silent read of the largest holder of the
      largest site ends. A push may crawl in over a slow line, so the last read of a holder ends only now and then.

    Guarantees: a holder that takes all of its own waits for itself alone; one site never takes a whole lane; a read
    that brings nothing ends by itself. A wait that is cancelled leaves nothing behind.

    Args:
        total_bytes: of all holders.
        message_bytes: of the longest message, which each read needs.
        of_caller: messages of that length which one holder may have.
        longest: bytes of a message beyond which it is refused.
        limit_s: longest that one may take; None is no limit.
        patience_s: how long a silent read is left alone.
        last_s: least time between two ends of reads that are the last of their holders.
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
        """Bytes that are taken now."""
        return self._used.total()

    async def message(
        self, holder: Caller, read: Callable[[], Awaitable[Any]], *, times: int
    ) -> tuple[Reservation, Any]:
        """Wait for room and for a message; see `MemoryQuota.message`."""
        room = await self.room(holder)
        try:
            data = await self._arrival(room, read)
            if len(data) > self._longest:
                raise InvalidRequest(f"a request of {len(data)} bytes, where {self._longest} are enough")
        except BaseException:
            room.close()
            raise
        room.shrink(times * len(data))
        return room, data

    async def room(self, holder: Caller) -> Reservation:
        """Wait for room for one message."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(holder, {})[turn] = None
        self._wake()
        room = Reservation(self, holder, self._message_bytes)
        try:
            await turn
        except BaseException:
            if turn.done() and not turn.cancelled():
                # Its turn came with the cancellation.
                room.close()
            else:
                self._leave(holder, turn)
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
        """Take bytes off a room and let those go on who wait for them."""
        if not num_bytes:
            return
        room.num_bytes -= num_bytes
        self._add(room.holder, -num_bytes)
        self._wake()

    def _add(self, holder: Caller, num_bytes: int) -> None:
        self._free -= num_bytes
        self._used[holder] += num_bytes
        self._of_site[holder.owner] += num_bytes
        if not self._used[holder]:
            # Names of connections are ever new.
            del self._used[holder]
        if not self._of_site[holder.owner]:
            del self._of_site[holder.owner]

    def _leave(self, holder: Caller, turn: asyncio.Future[None]) -> None:
        turns = self._waiting.get(holder, {})
        turns.pop(turn, None)
        if not turns:
            self._waiting.pop(holder, None)

    def _has_own(self, holder: Caller) -> bool:
        return self._used[holder] + self._message_bytes <= self._own_bytes

    def _is_full(self, holder: Caller) -> bool:
        """Whether the site has all that one may have."""
        return self._of_site[holder.owner] + self._message_bytes > self._site_bytes

    def _wake(self) -> None:
        while self._free >= self._message_bytes:
            fitting = [each for each in self._waiting if self._has_own(each) and not self._is_full(each)]
            if not fitting:
                break
            holder = min(fitting, key=lambda each: (self._of_site[each.owner], self._used[each]))
            turn = next(iter(self._waiting[holder]))
            self._leave(holder, turn)
            if not turn.done():
                self._add(holder, self._message_bytes)
                turn.set_result(None)
        self._hurry()

    def _hurry(self) -> None:
        """End silent reads for holders that have no room at all; look again when one will have been silent for long."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if math.isinf(self._patience_s):
            return
        loop = asyncio.get_running_loop()
        now, again = loop.time(), math.inf
        ending = {room for room in self._silent if room.reading is None}
        for waiting in [each for each in self._waiting if self._used[each] < self._message_bytes]:
            if ending:
                # What these give back may be enough.
                ending.pop()
                continue
            room, due = self._longest_silent(waiting)
            if room is None:
                continue
            if due > now:
                again = min(again, due)
                continue
            assert room.reading is not None
            if self._used[room.holder] < 2 * self._message_bytes:
                self._last_ended_at = now
            room.reading.reschedule(now)
            room.reading = None
        if again < math.inf:
            self._timer = loop.call_at(again, self._hurry)

    def _longest_silent(self, waiting: Caller) -> tuple[Reservation | None, float]:
        """The read that may end for a holder, and when."""
        is_own_site = self._is_full(waiting)
        candidates = [
            room
            for room in self._silent
            if room.reading is not None
            and room.holder != waiting
            and (not is_own_site or room.holder.owner == waiting.owner)
        ]
        if not candidates:
            return None, math.inf

        def size(room: Reservation) -> tuple[bool, int, int]:
            used = self._used[room.holder]
            return used >= 2 * self._message_bytes, self._of_site[room.holder.owner], used

        # Of equals the first, which is the longest silent.
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
        "/grpc.health.v1.Health/Watch",
    }
)
"""Methods of samplers and relays whose longest request has at most SHORT_BYTES."""
SHORT_BYTES = 1 << 16
OF_CALLER, OF_PRIVILEGED = 4, 16
"""Messages of the largest size that one holder may have in a lane. A learner's streams are seldom written to."""
SHORT_PART = 4
"""One byte in this many of the total is the short lane's."""
SHORT_S, LONG_S = 10.0, 900.0
"""Longest that a message may take. A short one is sent with its call; 900 s are 16 MiB at 18 kB/s."""
SHORT_PATIENCE_S, LONG_PATIENCE_S = 0.5, 10.0
"""How long a read is left alone that brings nothing while a holder without room waits."""
LAST_S = 30.0
"""Least time between two ends of a long read that is the last one of its holder."""


class MemoryQuota:
    """The lanes of one server. Belongs to the event loop."""

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
        """Bytes that are taken now."""
        return self.short.num_bytes + self.long.num_bytes + self.privileged.num_bytes

    async def message(
        self, holder: Caller, method: str, read: Callable[[], Awaitable[Any]], *, times: int = 1
    ) -> tuple[Reservation, Any]:
        """Wait for room, then for the message that `read` gives; returns it with its room, which the caller closes.

        At the end of a stream the message is gRPC's EOF, whose length is 0. `times` its bytes are what it will take.

        Raises:
            QuotaExceeded: none came in time, or others without room could not wait longer; worth repeating.
            InvalidRequest: the method needs no message of this length.
        """
        lane = self.privileged if holder.is_privileged else self.short if method in SHORT else self.long
        return await lane.message(holder, read, times=times)


PER_CALL = 3
"""A call may bring a connection, and have a payload open, and the pass that proves it."""
OWN = 160
"""Database, log, listening sockets, certificates, metrics, directories."""
ENOUGH = 1 << 16
"""Asked of the system where it allows more still: some give a billion, and some programs count through them."""
MIN_CALLS = 8


def raise_limit(*, calls: int) -> int:
    """Take as many descriptors as `calls` need and the system allows; returns how many there are."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return ENOUGH
    wanted = max(soft, ENOUGH, needed_for(calls))
    limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    except (OSError, ValueError):
        # Some systems state more than they give.
        return soft
    return limit


def needed_for(calls: int) -> int:
    """Descriptors that a process with so many calls at once may need."""
    return OWN + PER_CALL * calls


def calls_within(limit: int, *, wanted: int) -> int:
    """How many calls at once `limit` descriptors are enough for, at most `wanted`.

    Raises:
        ConfigError: not even for a few.
    """
    calls = min(wanted, (limit - OWN) // PER_CALL)
    if calls < MIN_CALLS:
        raise ConfigError(
            "max_concurrent_rpcs",
            f"{limit} file descriptors are not enough for {MIN_CALLS} calls at once",
            action=f"allow at least {needed_for(wanted)} (ulimit -n, LimitNOFILE=), as {wanted} calls need",
        )
    return calls
