"""Statements whose text is not the same for every engine: SQLite's here, PostgreSQL's beside it, nowhere else.

An operation names the statement; the engine of PostgreSQL looks its own text up by SQLite's.
"""

from __future__ import annotations

NUMBERS = "(SELECT CAST(value AS BIGINT) FROM json_each(?))"
"""The numbers of a list in JSON."""
NAMES = "(SELECT CAST(value AS TEXT) FROM json_each(?))"
"""The texts of a list in JSON."""
HAS_AUDIT = "SELECT 1 FROM sqlite_master WHERE name = 'audit'"
SET_META = "INSERT INTO meta VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value"
OLDEST_OF_EACH_SITE = (
    # SQLite takes the bare column from the row that has the minimum.
    "SELECT site, min(oldest_version), arrival FROM (SELECT site, oldest_version, arrival FROM groups"
    " WHERE state = 'pending' AND oldest_version >= ? ORDER BY oldest_version, arrival) GROUP BY site"
)
"""Of each site with pending groups: the oldest version that one is of, and the first arrival of that version."""
IN_POSTGRES = {
    HAS_AUDIT: "SELECT 1 WHERE to_regclass('audit') IS NOT NULL",
    SET_META: (
        # Settings are texts beside one that is bytes, in a column that SQLite does not type.
        "INSERT INTO meta VALUES (?, convert_to(CAST(? AS TEXT), 'UTF8'))"
        " ON CONFLICT (key) DO UPDATE SET value = excluded.value"
    ),
    OLDEST_OF_EACH_SITE: (
        "SELECT DISTINCT ON (site) site, oldest_version, arrival FROM groups"
        " WHERE state = 'pending' AND oldest_version >= ? ORDER BY site, oldest_version, arrival"
    ),
}
