"""Which epoch of a store in PostgreSQL each committed transaction belonged to, in the order of the commits.

Triggers note the epoch that a session took, and with each transaction that changes a table the epoch of its session.
Their rows are read out of the server's log (logical decoding), which has what was committed and nothing else, one
transaction after another as they were committed: no clock and nothing that a coordinator says is part of the proof.

The server needs wal_level=logical; Debian's has the plugin test_decoding.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import psycopg
from psycopg import sql

_TRAIL = """
CREATE TABLE trail (xid xid8 PRIMARY KEY, epoch text NOT NULL);
CREATE FUNCTION note_transaction() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    INSERT INTO trail VALUES (pg_current_xact_id(), coalesce(current_setting('trail.epoch', true), '0'))
        ON CONFLICT DO NOTHING;
    RETURN NULL;
END $$;
CREATE FUNCTION note_epoch() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    PERFORM set_config('trail.epoch', NEW.epoch::text, false);
    INSERT INTO trail VALUES (pg_current_xact_id(), NEW.epoch::text)
        ON CONFLICT (xid) DO UPDATE SET epoch = excluded.epoch;
    RETURN NULL;
END $$;
CREATE TRIGGER takes_epoch AFTER UPDATE OF epoch ON store FOR EACH ROW EXECUTE FUNCTION note_epoch();
"""
_NOTED = """
CREATE TRIGGER noted AFTER INSERT OR UPDATE OR DELETE ON {} FOR EACH STATEMENT EXECUTE FUNCTION note_transaction();
"""
_LOGGED_TABLES = """
SELECT relname FROM pg_class WHERE relnamespace = current_schema()::regnamespace AND relkind = 'r'
    AND relpersistence = 'p' AND relname NOT IN ('store', 'trail')
"""
_SLOT = "trail"
_ROW = re.compile(r"\.trail: (?:INSERT|UPDATE): .*epoch\[text\]:'(\d+)'")
NO_EPOCH = 0
"""Of a session that took none and wrote all the same."""


def begin(url: str) -> None:
    """Note all transactions from now on; the tables must be there, and no coordinator."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(_TRAIL)
        for (name,) in connection.execute(_LOGGED_TABLES).fetchall():
            connection.execute(sql.SQL(_NOTED).format(sql.Identifier(name)))
        connection.execute("SELECT pg_create_logical_replication_slot(%s, 'test_decoding')", (_SLOT,))


def committed(url: str) -> list[int]:
    """The epoch of each transaction since `begin`, in the order of their commits."""
    epochs: list[int] = []
    with psycopg.connect(url, autocommit=True) as connection:
        changes = connection.execute(
            "SELECT xid::text, data FROM pg_logical_slot_peek_changes(%s, NULL, NULL) WHERE data LIKE '%%.trail: %%'",
            (_SLOT,),
        )
        last = ""
        for xid, data in changes:
            found = _ROW.search(data)
            assert found is not None, data
            if xid == last:
                # Whoever takes an epoch may have written before it in the same transaction.
                epochs.pop()
            epochs.append(int(found[1]))
            last = xid
    return epochs


@dataclass(frozen=True, slots=True)
class Order:
    """What the order of commits says of epochs."""

    transactions: int
    epochs: int
    at_once: int
    """The most epochs of which each had commits before and after one of another's; 1 where they follow one another."""
    late: int
    """Commits of an epoch after one of a later epoch, and those of no epoch."""


def order_of(epochs: Sequence[int]) -> Order:
    """Judge transactions, given by their epochs in the order of commits."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    highest = late = 0
    for place, epoch in enumerate(epochs):
        first.setdefault(epoch, place)
        last[epoch] = place
        late += epoch < highest or epoch == NO_EPOCH
        highest = max(highest, epoch)
    steps = Counter[tuple[int, int]]()
    for epoch in first:
        # At one place the end of an epoch counts after its beginning: an epoch of one commit is there once.
        steps[first[epoch], 0] += 1
        steps[last[epoch], 1] -= 1
    open_now = at_once = 0
    for step in sorted(steps):
        open_now += steps[step]
        at_once = max(at_once, open_now)
    return Order(transactions=len(epochs), epochs=len(first), at_once=at_once, late=late)
