"""The engine that these tests run on: SQLite, or PostgreSQL where HETERORL_TEST_STORE says so.

A store is where its file would be: its path becomes a schema of one server. Tests marked `sqlite` are of its file, its
errors or its plans.
"""

import os

import pytest

from heterorl.coordinator.store.sqlite.engine import SqliteEngine

IS_POSTGRES = os.environ.get("HETERORL_TEST_STORE", "sqlite") == "postgres"


def pytest_collection_modifyitems(items):
    if IS_POSTGRES:
        for item in items:
            if item.get_closest_marker("sqlite"):
                item.add_marker(pytest.mark.skip(reason="of SQLite's file"))


@pytest.fixture(scope="session")
def postgres_of_all():
    from tests.support.postgres import PostgresServer, binaries

    if binaries() is None:
        pytest.skip("PostgreSQL is not installed: make postgres")
    server = PostgresServer()
    yield server
    server.stop()


@pytest.fixture(autouse=True)
def _engine(request, monkeypatch):
    if not IS_POSTGRES or request.node.get_closest_marker("sqlite"):
        yield
        return
    from heterorl.coordinator.store.postgres.engine import open_store

    server = request.getfixturevalue("postgres_of_all")
    monkeypatch.setattr(SqliteEngine, "open", lambda path: open_store(server.make_schema(str(path.resolve()))))
    yield
    server.drop_schemas()
