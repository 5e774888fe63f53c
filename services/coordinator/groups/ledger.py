"""The ledger: acked = pending + leased + consumed + sum(dropped).

Every group has exactly one account.

`acked` and the final accounts are counters, changed in the transaction that moves the group. Pending and leased are
counted from the groups, so a lost or doubly counted group breaks the equation. Assignments closed without a group have
accounts outside it.
"""

from __future__ import annotations

from collections.abc import Mapping

from heterorl.common.types.rollout import DropReason, ReturnReason
from heterorl.common.types.run import LedgerCounts
from heterorl.coordinator.store.database_engine import Connection

ACKED = "acked"
CONSUMED = "consumed"


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
    rows = connection.execute("SELECT state, reason, count(*) FROM groups GROUP BY state, reason").fetchall()
    by_state = {state: count for state, _, count in rows if state != "dropped"}
    return LedgerCounts(
        acked=sum(count for _, _, count in rows),
        pending=by_state.get("pending", 0),
        leased=by_state.get("leased", 0),
        consumed=by_state.get("consumed", 0),
        dropped={DropReason(reason): count for state, reason, count in rows if state == "dropped"},
        # No row of groups shows them.
        closed=_closed(dict(connection.execute("SELECT account, count FROM ledger"))),
    )


def _closed(accounts: Mapping[str, int]) -> dict[ReturnReason, int]:
    counted = {reason: accounts.get(closed_account_of(reason), 0) for reason in ReturnReason}
    return {reason: count for reason, count in counted.items() if count}
