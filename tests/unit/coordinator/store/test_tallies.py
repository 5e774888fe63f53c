"""What is counted beside the store is what the store holds, whatever is done and undone."""

import random
import sqlite3

import pytest

from heterorl.coordinator.store import tallies
from heterorl.coordinator.store.sqlite import connect


@pytest.fixture
def connection(tmp_path):
    connection = connect(tmp_path / "store.sqlite")
    yield connection
    connection.close()


def counted(connection):
    return {
        table: connection.execute(f"SELECT * FROM temp.{table} ORDER BY 1, 2").fetchall()
        for table in ("tally", "holder", "out_work")
    }


def anew(connection):
    """What a start would count, with what only this process knows."""
    known = dict(connection.execute("SELECT assignment, since FROM temp.out_work"))
    away = [row[0] for row in connection.execute("SELECT assignment FROM temp.out_work WHERE is_away = 1")]
    asked = connection.execute("SELECT site, asked FROM temp.sharer").fetchall()
    for name in ("tally", "holder", "out_work", "sharer"):
        connection.execute(f"DROP TABLE temp.{name}")
    for (name,) in connection.execute("SELECT name FROM temp.sqlite_master WHERE type = 'trigger'").fetchall():
        connection.execute(f"DROP TRIGGER temp.{name}")
    tallies.begin(connection)
    for assignment, since in known.items():
        connection.execute("UPDATE temp.out_work SET since = ? WHERE assignment = ?", (since, assignment))
    for assignment in away:
        connection.execute("UPDATE temp.out_work SET is_away = 1 WHERE assignment = ?", (assignment,))
    for site, at in asked:
        connection.execute("INSERT OR IGNORE INTO temp.sharer (site) VALUES (?)", (site,))
        connection.execute("UPDATE temp.sharer SET asked = ? WHERE site = ?", (at, site))
    return counted(connection)


def some_change(rng):
    """One statement of those that the coordinator runs."""
    site, number = rng.choice("abc"), rng.randrange(12)
    return rng.choice(
        [
            (
                "INSERT INTO groups (site, incarnation, sequence, digest, state, assignment, oldest_version, num_bytes,"
                " arrived) SELECT ?, 'i', 1 + count(*), '', ?, 0, 0, ?, 0 FROM groups",
                (site, rng.choice(["pending", "dropped"]), 10 + number),
            ),
            (
                "UPDATE groups SET state = ? WHERE sequence = ?",
                (rng.choice(["pending", "leased", "consumed", "dropped"]), number),
            ),
            (
                "INSERT OR IGNORE INTO work VALUES (?, 0, 0, ?, ?, ?, '[]', '', '{}', 0)",
                (number, site, rng.choice("ij"), rng.randrange(2)),
            ),
            ("UPDATE work SET is_leased = 0 WHERE assignment = ?", (number,)),
            ("UPDATE work SET is_leased = 1, site = ?, incarnation = 'j' WHERE assignment = ?", (site, number)),
            ("DELETE FROM work WHERE assignment = ?", (number,)),
            ("UPDATE temp.out_work SET is_away = 1 WHERE site = ?", (site,)),
            ("UPDATE temp.sharer SET asked = ? WHERE site = ?", (rng.choice([None, 1.0]), site)),
        ]
    )


@pytest.mark.parametrize("seed", range(5))
def test_counts_are_those_of_the_rows_after_any_changes(connection, seed):
    rng = random.Random(seed)
    for _ in range(300):
        connection.execute("BEGIN")
        connection.execute("SAVEPOINT one")
        for _ in range(rng.randrange(4)):
            connection.execute(*some_change(rng))
        if rng.randrange(3) == 0:
            connection.execute("ROLLBACK TO one")
        connection.execute("RELEASE one")
        connection.execute(rng.choice(["COMMIT", "COMMIT", "ROLLBACK"]))
    before = counted(connection)

    assert before == anew(connection)
    assert any(row[1] for row in before["tally"])


def test_change_that_is_undone_is_not_counted(connection):
    before = counted(connection)
    connection.execute("BEGIN")
    connection.execute("INSERT INTO work VALUES (1, 0, 0, 'a', 'i', 1, '[]', 'r', '{}', 0)")
    assert tallies.outstanding(connection) == 1
    assert tallies.held(connection, "a") == 1
    connection.execute("ROLLBACK")

    assert counted(connection) == before
    assert tallies.held(connection, "a") == 0


def test_counting_writes_nothing_to_the_disk(connection):
    connection.execute("INSERT INTO work VALUES (1, 0, 0, 'a', 'i', 1, '[]', 'r', '{}', 0)")
    names = {row[0] for row in connection.execute("SELECT name FROM main.sqlite_master")}

    assert not names & {"tally", "holder", "out_work", "sharer"}
    with pytest.raises(sqlite3.OperationalError):
        connection.execute("SELECT 1 FROM main.tally")
