"""Where the store is, as the configuration says it."""

import pytest

from heterorl.common.errors import ConfigError
from heterorl.common.process.config import load
from heterorl.coordinator.config import CoordinatorConfig
from heterorl.coordinator.store.choice import standby_at


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://me:hunter2@db.example/run",
        "postgresql://db.example/run?user=me&password=hunter2",
        "postgresql://db.example/run?sslpassword=hunter2",
        "mysql://me:hunter2@db.example/run",
    ],
)
def test_url_with_a_password_is_refused_and_not_repeated(url):
    with pytest.raises(ConfigError, match=r"store\.url") as refused:
        load(CoordinatorConfig, None, [f"store.url={url}"])

    assert "hunter2" not in f"{refused.value} {refused.value.action}"


def test_url_of_a_server_is_taken():
    url = "postgresql://me@a.example,b.example:5433/run?sslmode=verify-full"

    assert load(CoordinatorConfig, None, [f"store.url={url}"]).store.url == url


def test_nobody_stands_by_for_a_file(tmp_path):
    with pytest.raises(ConfigError, match="in PostgreSQL"):
        standby_at(tmp_path, "")
