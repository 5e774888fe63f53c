"""How many calls may be under way at once: of everybody, of one holder, and of one rpc of one holder.

Guarantees: samplers together never take the last places, which are kept for the learner and the operator; one sampler's
certificate takes no more than its share, however many connections it opens, and all of one site no more than three
quarters of what samplers have; a refusal says when to come again and is never final. A place is held from the admission
of a call until its answer has left.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator

from heterorl.common.errors import QuotaExceeded
from heterorl.common.rpc.lanes import OF_SITE, Holder
from heterorl.coordinator.rpc.access import RULES

RESERVED_PART = 8
"""One place in this many is kept for the learner and the operator, and at least two."""
RETRY_AFTER_S = 1.0


class Shares:
    """The places of one server. `per_site` is the share of one certificate."""

    def __init__(self, *, places: int, per_site: int) -> None:
        self._places = places
        self._open = places - max(2, places // RESERVED_PART)
        # Half of what is open at most, so that one never takes all; at least one, so that a small server serves.
        self._per_site = max(1, min(per_site, self._open // 2))
        self._per_connection = max(1, self._open // 2)
        self._of_site_most = max(self._per_site, int(OF_SITE * self._open))
        self._num_all = 0
        self._num_open = 0
        self._of_holder: Counter[Holder] = Counter()
        self._of_site: Counter[str] = Counter()
        self._of_rpc: Counter[tuple[Holder, str]] = Counter()

    @property
    def num_calls(self) -> int:
        """Calls that have a place now."""
        return self._num_all

    @contextlib.contextmanager
    def place(self, holder: Holder, method: str) -> Iterator[None]:
        """Hold a place for one call.

        Raises:
            QuotaExceeded: there is none now; worth repeating.
        """
        problem = self._problem(holder, method)
        if problem:
            raise QuotaExceeded(problem, retry_after_s=RETRY_AFTER_S)
        self._add(holder, method, 1)
        try:
            yield
        finally:
            self._add(holder, method, -1)

    def _problem(self, holder: Holder, method: str) -> str:
        at_once = RULES[method].at_once
        if at_once and holder.is_proven and self._of_rpc[holder, method] >= at_once:
            return f"{holder.name} has {at_once} calls of {method} under way; that is the share of one certificate"
        share = self._share(holder)
        if self._of_holder[holder] >= share:
            return f"{holder.name} has {share} calls under way, its share (site_concurrent_rpcs, max_concurrent_rpcs)"
        if self._num_all >= self._places:
            return f"{self._places} calls are under way (max_concurrent_rpcs)"
        if not holder.is_privileged and self._num_open >= self._open:
            return f"samplers have {self._open} calls under way; the rest of max_concurrent_rpcs is the learner's"
        if not holder.is_privileged and self._of_site[holder.owner] >= self._of_site_most:
            return f"{holder.owner} has {self._of_site_most} calls under way, a site's share (max_concurrent_rpcs)"
        return ""

    def _share(self, holder: Holder) -> int:
        if holder.is_privileged:
            # Two of them, a learner and an operator, always find a place.
            return max(self._per_site, self._places // RESERVED_PART // 2)
        return self._per_site if holder.is_proven else self._per_connection

    def _add(self, holder: Holder, method: str, number: int) -> None:
        self._num_all += number
        if not holder.is_privileged:
            self._num_open += number
        for counts, key in (
            (self._of_holder, holder), (self._of_site, holder.owner), (self._of_rpc, (holder, method)),
        ):  # fmt: skip
            counts[key] += number  # type: ignore[index]
            if not counts[key]:  # type: ignore[index]
                # Names of connections are ever new.
                del counts[key]
