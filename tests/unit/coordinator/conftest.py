"""The engine that these tests run on: SQLite, or PostgreSQL where HETERORL_TEST_STORE says so; and where payloads are:
in files, or in a bucket where HETERORL_TEST_PAYLOADS says `bucket`.

A store is where its file would be: its path becomes a schema of one server, its directory the prefix of a bucket. Tests
marked `sqlite` are of SQLite's file, errors or plans, those marked `files` of the files that payloads are.
"""

import hashlib
import os

import pytest

from heterorl.coordinator import core as core_module
from heterorl.coordinator.coordinator_config import CoordinatorConfig
from heterorl.coordinator.core import Coordinator, open_context
from heterorl.coordinator.store.sqlite import SqliteEngine
from tests.support.clock import ManualClock
from tests.support.run import Run

IS_POSTGRES = os.environ.get("HETERORL_TEST_STORE", "sqlite") == "postgres"


IS_BUCKET = os.environ.get("HETERORL_TEST_PAYLOADS", "files") == "bucket"


def pytest_collection_modifyitems(items):
    for item in items:
        if IS_POSTGRES or IS_BUCKET:
            # The server starts with the first of them.
            item.add_marker(pytest.mark.process)
        if IS_POSTGRES and item.get_closest_marker("sqlite"):
            item.add_marker(pytest.mark.skip(reason="of SQLite's file"))
        if IS_BUCKET and item.get_closest_marker("files"):
            item.add_marker(pytest.mark.skip(reason="of payloads that are files"))


@pytest.fixture(scope="session")
def bucket_of_all():
    from tests.support.bucket import BucketServer

    server = BucketServer()
    yield server
    server.stop()


@pytest.fixture(autouse=True, scope="module")
def _payloads(request, tmp_path_factory):
    if not IS_BUCKET:
        yield
        return
    server, credentials = request.getfixturevalue("bucket_of_all"), tmp_path_factory.mktemp("credentials")

    def open_in_bucket(config, clock, **options):
        name = hashlib.sha256(str(config.data_dir.resolve()).encode()).hexdigest()[:16]
        bucket = server.config(credentials, prefix=name, url_lifetime_s=60.0)
        return open_context(config.model_copy(update={"payloads": bucket}), clock, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(core_module, "open_context", open_in_bucket)
        yield


@pytest.fixture(scope="session")
def postgres_of_all():
    # Whoever asks for it wants no suite that skips itself: the server says what is missing.
    from tests.support.postgres import PostgresServer

    server = PostgresServer()
    yield server
    server.stop()


@pytest.fixture(autouse=True, scope="module")
def _engine(request):
    # Tests marked `sqlite` are skipped before they ask for a store.
    if not IS_POSTGRES:
        yield
        return
    from heterorl.coordinator.store.postgres.postgres_engine import open_store

    server = request.getfixturevalue("postgres_of_all")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SqliteEngine, "open", lambda path: open_store(server.make_schema(str(path.resolve()))))
        yield
    server.drop_schemas()


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def config(tmp_path):
    return CoordinatorConfig(data_dir=tmp_path / "data")


@pytest.fixture
async def core(config, clock):
    core = await Coordinator.open(config, clock)
    yield core
    await core.close()


@pytest.fixture
async def run(core, tmp_path):
    """A run with a version and a registered site."""
    run = Run(core, tmp_path)
    await run.begin()
    await run.publish()
    await run.register()
    return run
