"""Servers that all tests of a process share: one of S3's protocol, one PostgreSQL; a test has a prefix, a schema.

A test that kills its server has one of its own.
"""

import pytest

from tests.support.debian import postgres_binaries


@pytest.fixture(scope="session")
def bucket():
    from tests.support.bucket import BucketServer

    server = BucketServer()
    yield server
    server.stop()


@pytest.fixture
def prefix(request):
    """Where this test's payloads are in the bucket."""
    return f"{request.path.stem}/{request.node.name}".replace("[", ".").replace("]", "")


@pytest.fixture(scope="session")
def postgres():
    if postgres_binaries() is None:
        pytest.skip("PostgreSQL is not installed: make programs")
    from tests.support.postgres import PostgresServer

    server = PostgresServer()
    yield server
    server.stop()


@pytest.fixture
def url(request, postgres):
    """The store.url of a schema that this test has alone."""
    yield postgres.make_schema(request.node.nodeid)
    postgres.drop_schemas()
