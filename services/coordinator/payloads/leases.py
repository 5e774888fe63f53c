"""Who is fetching what: plans under way, and files being read. In memory; a restart waits one term before it deletes.

A lease covers all payloads of one plan, since the last of a chain is asked for when the others have arrived; each frame
of any of them begins its term anew. Equal plans share a lease. Belongs to the event loop.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

from heterorl.common.types.common import Digest
from heterorl.common.types.policy import PayloadRef

MAX_LEASES = 4096
"""Plans remembered; beyond, the one that was silent the longest is forgotten (its caller plans again)."""
_Plan = tuple[int | None, tuple[Digest, ...]]


class PullLeases:
    """Plans with the instants at which they end (monotonic clock)."""

    def __init__(self, *, term_s: float, started: float) -> None:
        self._term_s = term_s
        self._is_known_from = started + term_s
        self._ends: dict[_Plan, float] = {}
        self._plans_of: defaultdict[Digest, list[_Plan]] = defaultdict(list)
        self._reading: Counter[Digest] = Counter()

    def grant(self, *, have_version: int | None, payloads: tuple[PayloadRef, ...], now: float) -> None:
        """Begin the lease of a plan, from a version or from nothing."""
        if payloads:
            self._renew((have_version, tuple(payload.digest for payload in payloads)), now)
            while len(self._ends) > MAX_LEASES:
                self._forget(next(iter(self._ends)))

    @contextmanager
    def reading(self, digest: Digest) -> Iterator[None]:
        """While a payload is read."""
        self._reading[digest] += 1
        try:
            yield
        finally:
            self._reading[digest] -= 1
            if not self._reading[digest]:
                del self._reading[digest]

    def touch(self, digest: Digest, now: float) -> None:
        """A sign of life of whoever fetches a payload."""
        # For each frame that leaves, so not by a look at all leases: a thousand sites have as many.
        for plan in [*self._plans_of.get(digest, ())]:
            self._renew(plan, now)

    def are_known(self, now: float) -> bool:
        """Whether all plans that may be under way are known: plans of an earlier process have ended."""
        return now >= self._is_known_from

    def payloads(self, now: float) -> frozenset[Digest]:
        """Payloads that must stay."""
        self._expire(now)
        return frozenset(digest for plan in self._ends for digest in plan[1]) | frozenset(self._reading)

    def versions(self, now: float) -> frozenset[int]:
        """Versions from which somebody is on the way."""
        self._expire(now)
        return frozenset(start for start, _ in self._ends if start is not None)

    def _renew(self, plan: _Plan, now: float) -> None:
        # Put last: the order is that of the last sign of life.
        if self._ends.pop(plan, None) is None:
            for digest in plan[1]:
                self._plans_of[digest].append(plan)
        self._ends[plan] = now + self._term_s

    def _forget(self, plan: _Plan) -> None:
        del self._ends[plan]
        for digest in plan[1]:
            self._plans_of[digest].remove(plan)
            if not self._plans_of[digest]:
                del self._plans_of[digest]

    def _expire(self, now: float) -> None:
        for plan in [plan for plan, end in self._ends.items() if end <= now]:
            self._forget(plan)
