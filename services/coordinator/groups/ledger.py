"""The ledger: acked = pending + leased + consumed + sum(dropped).

Every group has exactly one account.

`acked` and the final accounts are counters, changed in the transaction that moves the group. Pending and leased are
counted from the groups, so a lost or doubly counted group breaks the equation. Assignments closed without a group have
accounts outside it. Refused groups, which a hostile site can send without end, leave few rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from heterorl.common.types.rollout import DropReason, ReturnReason
from heterorl.common.types.run import LedgerCounts
from heterorl.coordinator.store.database import Connection

ACKED = "acked"
CONSUMED = "consumed"
REFUSED_KEPT = 1024
"""Newest refused groups of a site whose rows stay, for repeats."""
_FORGOTTEN = "forgotten/"
"""Accounts of refused groups whose rows were deleted, by reason; accounts of dropped groups count them too."""


def account_of(reason: DropReason) -> str:
    """Account of groups dropped for a reason."""
    return f"dropped/{reason.value}"


def closed_account_of(reason: ReturnReason) -> str:
    """Account of assignments closed for a reason without a group."""
    return f"closed/{reason.value}"


def add(connection: Connection, account: str, count: int) -> None:
    """Move `count` groups into an account (negative: out of it)."""
    connection.execute(
        "INSERT INTO ledger VALUES (?, ?) ON CONFLICT (account) DO UPDATE SET count = ledger.count + excluded.count",
        (account, count),
    )


def forget_refused(connection: Connection, site: str) -> None:
    """Delete the rows of a site's older refused groups.
    Accounts keep their numbers for a recount."""
    rows = connection.execute(
        "DELETE FROM groups WHERE state = 'refused' AND site = ? AND arrival <= (SELECT arrival FROM groups"
        " WHERE state = 'refused' AND site = ? ORDER BY arrival DESC LIMIT 1 OFFSET ?) RETURNING reason",
        (site, site, REFUSED_KEPT),
    ).fetchall()
    for (reason,) in rows:
        add(connection, f"{_FORGOTTEN}{reason}", 1)


def counts(connection: Connection) -> LedgerCounts:
    """Read all accounts."""
    accounts = dict(connection.execute("SELECT account, count FROM ledger"))
    waiting = {
        state: connection.execute("SELECT count(*) FROM groups WHERE state = ?", (state,)).fetchone()[0]
        for state in ("pending", "leased")
    }
    return LedgerCounts(
        acked=accounts.get(ACKED, 0),
        pending=waiting["pending"],
        leased=waiting["leased"],
        consumed=accounts.get(CONSUMED, 0),
        dropped={reason: accounts[account_of(reason)] for reason in DropReason if accounts.get(account_of(reason))},
        closed=_closed(accounts),
    )


def recount(connection: Connection) -> LedgerCounts:
    """Count every account from the groups themselves; slower, independent of the counters."""
    accounts = dict(connection.execute("SELECT account, count FROM ledger"))
    rows = connection.execute("SELECT state, reason, count(*) FROM groups GROUP BY state, reason").fetchall()
    by_state = {state: count for state, reason, count in rows if not reason}
    dropped = Counter({name.removeprefix(_FORGOTTEN): n for name, n in accounts.items() if name.startswith(_FORGOTTEN)})
    for _, reason, count in rows:
        dropped[reason] += count
    del dropped[""]
    return LedgerCounts(
        acked=sum(by_state.values()) + dropped.total(),
        pending=by_state.get("pending", 0),
        leased=by_state.get("leased", 0),
        consumed=by_state.get("consumed", 0),
        dropped={DropReason(reason): count for reason, count in dropped.items()},
        # No row of groups shows them.
        closed=_closed(accounts),
    )


def _closed(accounts: Mapping[str, int]) -> dict[ReturnReason, int]:
    counted = {reason: accounts.get(closed_account_of(reason), 0) for reason in ReturnReason}
    return {reason: count for reason, count in counted.items() if count}
