"""The configuration behind the run's contract, as its first learner stated it: a row beside the contract's."""

from __future__ import annotations

from heterorl.common.wire.statement import statement_difference, statement_from_bytes
from heterorl.coordinator.store.connection import Connection


def read_statement(connection: Connection) -> bytes:
    """What was stated; empty where no learner did."""
    row = connection.execute("SELECT value FROM meta WHERE key = 'statement'").fetchone()
    return b"" if row is None else bytes(row[0])


def keep_statement(connection: Connection, statement: bytes) -> str:
    """Keep the first statement of the run's contract; returns in what a later one differs, which changes nothing.

    The contract is the same, so both mean the same prompts; a file may lie elsewhere on another learner.
    """
    if not statement:
        return ""
    kept = read_statement(connection)
    if kept:
        return statement_difference(statement_from_bytes(kept), statement_from_bytes(statement))
    connection.execute("INSERT INTO meta VALUES ('statement', ?)", (statement,))
    return ""
