"""Rows of PostgreSQL in a SQLite file, without a server: settings have the type that their readers expect."""

import contextlib
import sqlite3

import pytest

from heterorl.common.wire.common_messages import contract_to_bytes
from heterorl.coordinator.store.database import get_meta
from heterorl.coordinator.store.schema import SCHEMA
from heterorl.coordinator.versions import lineage
from tests.support.run import CONTRACT

pytest.importorskip("psycopg")

from heterorl.coordinator.store.postgres import postgres_tables

STATEMENT = '{"contract":"c","text":"é"}'.encode()
META = [("run_id", b"run"), ("contract", contract_to_bytes(CONTRACT)), ("statement", STATEMENT)]


class Rows:
    """A session whose table has these rows."""

    def cursor(self):
        return contextlib.nullcontext(self)

    def copy(self, statement):
        return contextlib.nullcontext(self)

    def set_types(self, types):
        pass

    def rows(self):
        return iter(META)


@pytest.fixture
def file():
    made = sqlite3.connect(":memory:")
    made.executescript(SCHEMA)
    yield made
    made.close()


def test_settings_of_a_copy_are_read_as_in_the_store(file):
    (meta,) = [table for table in postgres_tables.tables_of(file) if table.name == "meta"]
    postgres_tables._read_table(Rows(), file, meta)

    assert get_meta(file, "run_id") == "run"
    assert lineage.read_contract(file) == CONTRACT
    assert lineage.read_statement(file) == STATEMENT
