"""How many assignments a site may hold where nobody configured it: an equal share, less what it left unanswered.

Guarantees: a site alone may hold everything, but one that works ahead leaves room for a newcomer; a site that answers
nothing comes down to one assignment at a time, no longer counts among those that share, and wins one assignment back
with every group that it delivers. A site whose assignments are all away takes nobody's share. In memory, by site
(store/tallies.py): after a restart all begin without debts. Decides who works, never what is trained on.
"""

from __future__ import annotations

from dataclasses import dataclass

from heterorl.coordinator.store import tallies
from heterorl.coordinator.store.connection import Connection

ASKED_S = 60.0
"""A site that asked for work so recently, or holds some that counts, is one of those that share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """What a site's share depends on.

    Example: Claim(limit=32, at_least=8, wanting=3, debtors=1, owed=0, works_ahead=True)
    """

    limit: int
    """What all sites together may hold."""
    at_least: int
    """One version's worth: a site alone gets so much, whatever room it leaves."""
    wanting: int
    """Sites that share, with this one."""
    owed: int
    """Assignments that this one left unanswered."""
    debtors: int
    """Those of `wanting` that owe an equal share or more, with this one."""
    works_ahead: bool


def equal_share(limit: int, wanting: int) -> int:
    """What each site gets while none owes anything."""
    return -(-limit // wanting)


def decide_share(claim: Claim) -> tuple[int, int]:
    """(assignments that the site may hold, what it owes from now on)."""
    if claim.wanting == 1:
        # Nobody waits for what it does not answer but itself.
        ahead = min(claim.limit, max(claim.at_least, claim.limit - claim.limit // 4))
        return ahead if claim.works_ahead else claim.limit, claim.owed
    equal = equal_share(claim.limit, claim.wanting)
    share = equal if claim.owed >= equal else -(-claim.limit // (claim.wanting - claim.debtors))
    # No debt is larger than the share: so many groups at most win it back.
    owed = min(claim.owed, share)
    return max(1, share - owed), owed


def note_asked(connection: Connection, site: str, now: float) -> None:
    """Note that a site wants work."""
    connection.execute("INSERT INTO temp.sharer (site) VALUES (?) ON CONFLICT DO NOTHING", (site,))
    connection.execute("UPDATE temp.sharer SET asked = ? WHERE site = ?", (now, site))


def note_expired(connection: Connection, site: str, count: int) -> None:
    """Count assignments that ran out unanswered; what is taken of the site counts them down (store/tallies.py)."""
    connection.execute("UPDATE temp.sharer SET owed = owed + ? WHERE site = ?", (count, site))


def allowance(connection: Connection, site: str, *, limit: int, at_least: int, works_ahead: bool, now: float) -> int:
    """Assignments that a site may hold; see `Claim`."""
    # Of one age, oldest first: each is forgotten once.
    connection.execute("UPDATE temp.sharer SET asked = NULL WHERE asked < ?", (now - ASKED_S,))
    row = connection.execute(
        "SELECT owed, counted > 0 OR asked IS NOT NULL FROM temp.sharer WHERE site = ?", (site,)
    ).fetchone()
    owed, is_counted = (int(row[0]), bool(row[1])) if row else (0, False)
    wanting = tallies.read(connection, "wanting") + (not is_counted)
    equal = equal_share(limit, wanting)
    (debtors,) = connection.execute(
        "SELECT count(*) FROM temp.sharer WHERE owed > 0 AND owed >= ? AND (counted > 0 OR asked IS NOT NULL)",
        (equal,),
    ).fetchone()
    claim = Claim(
        limit=limit,
        at_least=at_least,
        wanting=wanting,
        owed=owed,
        debtors=int(debtors) + (not is_counted and owed >= equal),
        works_ahead=works_ahead,
    )
    allowed, left = decide_share(claim)
    if left != owed:
        connection.execute("UPDATE temp.sharer SET owed = ? WHERE site = ?", (left, site))
    return allowed
