"""How many assignments a site may hold where nobody configured it: an equal share, less what it left unanswered.

Guarantees: a site alone may hold everything; a site that answers nothing comes down to one assignment at a time, no
longer counts among those that share, and wins one assignment back with every group that it delivers. In memory, by
site: after a restart all begin without debts. Decides who works, never what is trained on.
"""

from __future__ import annotations

from collections.abc import Collection

ASKED_S = 60.0
"""A site that asked for work so recently, or holds some, is one of those that share."""


class Shares:
    """Who asked for work when, and what each site owes; for store operations alone."""

    def __init__(self) -> None:
        self._asked: dict[str, float] = {}
        self._owed: dict[str, int] = {}

    def note_asked(self, site: str, now: float) -> None:
        """Note that a site wants work; instants are of the monotonic clock."""
        self._asked = {name: at for name, at in self._asked.items() if now - at <= ASKED_S}
        self._asked[site] = now

    def note_expired(self, site: str) -> None:
        """Count an assignment that ran out unanswered."""
        self._owed[site] = self._owed.get(site, 0) + 1

    def note_answered(self, site: str) -> None:
        """Count a group that was taken."""
        owed = self._owed.get(site, 0) - 1
        if owed > 0:
            self._owed[site] = owed
        else:
            self._owed.pop(site, None)

    def allowance(self, site: str, *, holders: Collection[str], limit: int, now: float) -> int:
        """Assignments that a site may hold.

        Args:
            site: the one that asks.
            holders: sites that hold assignments now.
            limit: what all sites together may hold.
            now: instant of the monotonic clock.
        """
        wanting = {site, *holders, *(name for name, at in self._asked.items() if now - at <= ASKED_S)}
        if len(wanting) == 1:
            # Nobody waits for what it does not answer but itself.
            return limit
        equal = -(-limit // len(wanting))
        debtors = {name for name in wanting if self._owed.get(name, 0) >= equal}
        share = equal if site in debtors else -(-limit // len(wanting - debtors))
        owed = min(self._owed.get(site, 0), share)
        if owed:
            # No debt is larger than the share: so many groups at most win it back.
            self._owed[site] = owed
        return max(1, share - owed)
