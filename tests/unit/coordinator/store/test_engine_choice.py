"""Where the store is, as the configuration says it."""

import os
import tempfile
from pathlib import Path

import pytest

from heterorl.common.errors import ConfigError
from heterorl.common.process.config_file import load
from heterorl.coordinator.coordinator_config import CoordinatorConfig
from heterorl.coordinator.store.engine_choice import open_engine, refuse_file, standby_at


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://me:hunter2@db.example/run",
        "postgresql://db.example/run?user=me&password=hunter2",
        "postgresql://db.example/run?sslpassword=hunter2",
        "mysql://me:hunter2@db.example/run",
        "host=db.example password=hunter2",
        # What a library would quote, and where libpq or a reader would find it all the same.
        "postgresql://me:hunter2\u2100@db.example/run",
        "postgresql://me:hunter2@[::1/run",
        "postgresql://me:hunter2@db.example:port/run",
        "postgresql://db.example/run?PASSWORD=hunter2",
        "postgresql://db.example/run?pass%77ord=hunter2",
        "postgresql://db.example/run;password=hunter2",
        "postgresql://db.example/run#?password=hunter2",
        "postgresql://db.example/run#hunter2",
    ],
)
def test_url_with_a_password_is_refused_and_not_repeated(url):
    with pytest.raises(ConfigError, match=r"store\.url") as refused:
        load(CoordinatorConfig, None, [f"store.url={url}"])

    assert "hunter2" not in f"{refused.value} {refused.value.action}"


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://me@a.example,b.example:5433/run?sslmode=verify-full",
        "postgresql:///run?host=%2Frun%2Fpostgresql&passfile=%2Fetc%2Fpgpass&options=-csearch_path%3Drun7",
        "postgres://me@[::1]:5432/run",
    ],
)
def test_url_of_a_server_is_taken(url):
    assert load(CoordinatorConfig, None, [f"store.url={url}"]).store.url == url


@pytest.mark.parametrize(
    "endpoint", ["https://me:hunter2\u2100@s3.example", "https://me:hunter2@[::1", "https://me:hunter2@s3.example:port"]
)
def test_endpoint_that_cannot_be_read_is_not_repeated(endpoint):
    with pytest.raises(ConfigError, match=r"payloads\.endpoint") as refused:
        load(CoordinatorConfig, None, [f"payloads.endpoint={endpoint}"])

    assert "hunter2" not in f"{refused.value} {refused.value.action}"


@pytest.mark.process
@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user takes root")
def test_data_dir_of_another_user_is_refused_by_its_key():
    # tmp_path lies below directories that root alone may enter.
    with tempfile.TemporaryDirectory() as name:
        process = os.fork()
        if process == 0:
            os.setuid(65534)
            refused = 0
            for check in (lambda path: open_engine(path, ""), refuse_file):
                try:
                    check(Path(name))
                except ConfigError as error:
                    refused += "data_dir" in str(error) and "cannot be used: Permission denied" in str(error)
            os._exit(refused)
        _, status = os.waitpid(process, 0)

    assert os.waitstatus_to_exitcode(status) == 2


def test_nobody_stands_by_for_a_file(tmp_path):
    with pytest.raises(ConfigError, match="in PostgreSQL"):
        standby_at(tmp_path, "")
