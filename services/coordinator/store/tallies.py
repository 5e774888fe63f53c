"""Counts of assignments in temporary tables, kept up to date by triggers.

They change in the transaction of the rows, so an undone operation is not counted. A start fills them from the leased
assignments. Instants are of this process's monotonic clock. Waiting groups are few and counted by queries over indexes.

    tally     assignments that count as outstanding (`out`) or are away with a silent site (`away`), sites that share
              the work (`wanting`)
    out_work  assignments that are out: since when, and whether they are away
    holder    holders of assignments, and when to look at them again (groups/work_assignments.py)
    sharer    each site's assignments, how many count, when it asked, its debt

Sites share assignments equally. A single site may hold everything; if it works ahead, it leaves a quarter for a
newcomer. A site that never answers sinks to one assignment and regains one for each group that it delivers. A site
whose assignments are all away takes no share. A restart clears debts.

Held-out prompts (HELD_OUT and more) are in out_work and holder only: evaluation uses no share of training.
"""

from __future__ import annotations

import sqlite3

from heterorl.common.types.evaluation import HELD_OUT
from heterorl.coordinator.store.database import Connection

SOON = -1e300
"""An instant before all others."""
TABLES = f"""
CREATE TEMP TABLE tally (name TEXT PRIMARY KEY, count INTEGER NOT NULL) WITHOUT ROWID;
CREATE TEMP TABLE out_work (
    assignment INTEGER PRIMARY KEY, site TEXT NOT NULL, incarnation TEXT NOT NULL, request_id TEXT NOT NULL,
    since REAL, is_away INTEGER NOT NULL DEFAULT 0);
CREATE INDEX temp.out_by_holder ON out_work (site, incarnation, since);
CREATE INDEX temp.out_by_request ON out_work (site, incarnation, request_id);
CREATE TEMP TABLE holder (
    site TEXT NOT NULL, incarnation TEXT NOT NULL, held INTEGER NOT NULL,
    away INTEGER NOT NULL DEFAULT 0, due REAL NOT NULL DEFAULT {SOON},
    PRIMARY KEY (site, incarnation)) WITHOUT ROWID;
CREATE INDEX temp.holder_due ON holder (due);
CREATE TEMP TABLE sharer (
    site TEXT PRIMARY KEY, held INTEGER NOT NULL DEFAULT 0, counted INTEGER NOT NULL DEFAULT 0, asked REAL,
    owed INTEGER NOT NULL DEFAULT 0) WITHOUT ROWID;
CREATE INDEX temp.sharer_asked ON sharer (asked) WHERE asked IS NOT NULL;
CREATE INDEX temp.sharer_owed ON sharer (owed) WHERE owed > 0;
"""
GROUP_ENTERS = """
    -- A group that was taken wins back one of the assignments that its site left unanswered.
    UPDATE sharer SET owed = owed - 1 WHERE site = NEW.site AND owed > 0;"""
WORK_ENTERS = """INSERT INTO out_work (assignment, site, incarnation, request_id)
    VALUES (NEW.assignment, NEW.site, NEW.incarnation, NEW.request_id);"""
WORK_LEAVES = "DELETE FROM out_work WHERE assignment = OLD.assignment;"
OUT_ENTERS = f"""
    INSERT INTO holder (site, incarnation, held) VALUES (NEW.site, NEW.incarnation, 1)
        ON CONFLICT (site, incarnation) DO UPDATE SET held = holder.held + 1;
    INSERT INTO sharer (site) VALUES (NEW.site) ON CONFLICT DO NOTHING;
    UPDATE sharer SET held = held + 1, counted = counted + 1 WHERE site = NEW.site AND NEW.assignment < {HELD_OUT};
    UPDATE tally SET count = count + 1 WHERE name = 'out' AND NEW.assignment < {HELD_OUT};"""
OUT_LEAVES = f"""
    UPDATE holder SET held = held - 1, away = away - OLD.is_away
        WHERE site = OLD.site AND incarnation = OLD.incarnation;
    DELETE FROM holder WHERE site = OLD.site AND incarnation = OLD.incarnation AND held = 0;
    UPDATE sharer SET held = held - 1, counted = counted - 1 + OLD.is_away
        WHERE site = OLD.site AND OLD.assignment < {HELD_OUT};
    UPDATE tally SET count = count - 1
        WHERE name = CASE OLD.is_away WHEN 0 THEN 'out' ELSE 'away' END AND OLD.assignment < {HELD_OUT};"""
OUT_GOES_AWAY = f"""
    UPDATE sharer SET counted = counted - 1 WHERE site = NEW.site AND NEW.assignment < {HELD_OUT};
    UPDATE holder SET away = away + 1 WHERE site = NEW.site AND incarnation = NEW.incarnation;
    UPDATE tally SET count = count - 1 WHERE name = 'out' AND NEW.assignment < {HELD_OUT};
    UPDATE tally SET count = count + 1 WHERE name = 'away' AND NEW.assignment < {HELD_OUT};"""
_WANTS = "{0}.counted > 0 OR {0}.asked IS NOT NULL"
WANTS_CHANGE = f"({_WANTS.format('OLD')}) <> ({_WANTS.format('NEW')})"
SHARER_WANTS = f"""
    UPDATE tally SET count = count + CASE WHEN {_WANTS.format("NEW")} THEN 1 ELSE -1 END
        WHERE name = 'wanting';"""
_TRIGGERS = f"""
CREATE TEMP TRIGGER group_enters AFTER INSERT ON main.groups WHEN NEW.state = 'pending' BEGIN {GROUP_ENTERS} END;
CREATE TEMP TRIGGER work_begins AFTER INSERT ON main.work WHEN NEW.is_leased = 1 BEGIN {WORK_ENTERS} END;
CREATE TEMP TRIGGER work_moves AFTER UPDATE OF is_leased, site, incarnation ON main.work
    WHEN OLD.is_leased = 1 AND NEW.is_leased = 1 BEGIN {WORK_LEAVES} {WORK_ENTERS} END;
CREATE TEMP TRIGGER work_leaves AFTER UPDATE OF is_leased ON main.work
    WHEN OLD.is_leased = 0 AND NEW.is_leased = 1 BEGIN {WORK_ENTERS} END;
CREATE TEMP TRIGGER work_opens AFTER UPDATE OF is_leased ON main.work
    WHEN OLD.is_leased = 1 AND NEW.is_leased = 0 BEGIN {WORK_LEAVES} END;
CREATE TEMP TRIGGER work_ends AFTER DELETE ON main.work WHEN OLD.is_leased = 1 BEGIN {WORK_LEAVES} END;
CREATE TEMP TRIGGER out_enters AFTER INSERT ON temp.out_work BEGIN {OUT_ENTERS} END;
CREATE TEMP TRIGGER out_leaves AFTER DELETE ON temp.out_work BEGIN {OUT_LEAVES} END;
CREATE TEMP TRIGGER out_goes_away AFTER UPDATE OF is_away ON temp.out_work WHEN OLD.is_away = 0 AND NEW.is_away = 1
    BEGIN {OUT_GOES_AWAY} END;
CREATE TEMP TRIGGER sharer_wants AFTER UPDATE OF counted, asked ON temp.sharer WHEN {WANTS_CHANGE}
    BEGIN {SHARER_WANTS} END;
"""
FILL = """
INSERT INTO temp.tally VALUES ('out', 0), ('away', 0), ('wanting', 0);
INSERT INTO temp.out_work (assignment, site, incarnation, request_id)
    SELECT assignment, site, incarnation, request_id FROM main.work WHERE is_leased = 1;
"""


def begin(connection: sqlite3.Connection) -> None:
    """Make the tables, and count the leased assignments; once for each connection."""
    connection.executescript(f"{TABLES} {_TRIGGERS} {FILL}")


def read(connection: Connection, name: str) -> int:
    """One count of `tally`."""
    return int(connection.execute("SELECT count FROM temp.tally WHERE name = ?", (name,)).fetchone()[0])


def outstanding(connection: Connection) -> int:
    """Groups queued or with the learner, and assignments that count."""
    (waiting,) = connection.execute("SELECT count(*) FROM groups WHERE state IN ('pending', 'leased')").fetchone()
    return int(waiting) + read(connection, "out")


def waiting_bytes(connection: Connection, site: str) -> int:
    """Bytes of a site's groups in the queue.
    The learner's do not count: it may hold part of a version and wait for the rest."""
    query = "SELECT coalesce(sum(num_bytes), 0) FROM groups WHERE site = ? AND state = 'pending'"
    return int(connection.execute(query, (site,)).fetchone()[0])


def waiting_by_site(connection: Connection) -> dict[str, int]:
    """The same of each site that has any."""
    query = "SELECT site, sum(num_bytes) FROM groups WHERE state = 'pending' GROUP BY site"
    return {site: int(count) for site, count in connection.execute(query)}


def held(connection: Connection, site: str) -> int:
    """Assignments that a site holds, also while it is away."""
    row = connection.execute("SELECT held FROM temp.sharer WHERE site = ?", (site,)).fetchone()
    return 0 if row is None else int(row[0])


def look_soon(connection: Connection, site: str) -> None:
    """Make a site's holders due for the next look."""
    connection.execute("UPDATE temp.holder SET due = ? WHERE site = ?", (SOON, site))


ASKED_S = 60.0
"""A site shares the work if it asked within so many seconds, or holds assignments that count."""


def equal_share(limit: int, wanting: int) -> int:
    """The share of each site while none owes anything."""
    return -(-limit // wanting)


def decide_share(
    *, limit: int, at_least: int, wanting: int, owed: int, debtors: int, works_ahead: bool
) -> tuple[int, int]:
    """Assignments that the site may hold, and its debt from now on.
    A single site gets `at_least`, one version's groups. `wanting` sites share, with this one; `debtors` of them owe an
    equal share or more."""
    if wanting == 1:
        # A single site delays only itself.
        ahead = min(limit, max(at_least, limit - limit // 4))
        return ahead if works_ahead else limit, owed
    equal = equal_share(limit, wanting)
    share = equal if owed >= equal else equal_share(limit, wanting - debtors)
    # A debt is at most the share, so that as many groups win it back.
    owed = min(owed, share)
    return max(1, share - owed), owed


def note_asked(connection: Connection, site: str, now: float) -> None:
    """Note that a site wants work."""
    connection.execute("INSERT INTO temp.sharer (site) VALUES (?) ON CONFLICT DO NOTHING", (site,))
    connection.execute("UPDATE temp.sharer SET asked = ? WHERE site = ?", (now, site))


def note_expired(connection: Connection, site: str, count: int) -> None:
    """Count expired assignments as debt.
    Each accepted group of the site lowers it."""
    connection.execute("UPDATE temp.sharer SET owed = owed + ? WHERE site = ?", (count, site))


def allowance(connection: Connection, site: str, *, limit: int, at_least: int, works_ahead: bool, now: float) -> int:
    """Assignments that a site may hold, as `decide_share` says."""
    connection.execute("UPDATE temp.sharer SET asked = NULL WHERE asked < ?", (now - ASKED_S,))
    row = connection.execute(
        "SELECT owed, counted > 0 OR asked IS NOT NULL FROM temp.sharer WHERE site = ?", (site,)
    ).fetchone()
    owed, is_counted = (int(row[0]), bool(row[1])) if row else (0, False)
    wanting = read(connection, "wanting") + (not is_counted)
    equal = equal_share(limit, wanting)
    (debtors,) = connection.execute(
        "SELECT count(*) FROM temp.sharer WHERE owed > 0 AND owed >= ? AND (counted > 0 OR asked IS NOT NULL)", (equal,)
    ).fetchone()
    debtors = int(debtors) + (not is_counted and owed >= equal)
    allowed, left = decide_share(
        limit=limit, at_least=at_least, wanting=wanting, owed=owed, debtors=debtors, works_ahead=works_ahead
    )
    if left != owed:
        connection.execute("UPDATE temp.sharer SET owed = ? WHERE site = ?", (left, site))
    return allowed
