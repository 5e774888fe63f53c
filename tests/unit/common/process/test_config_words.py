"""What is said of a wrong configuration holds no secret of it."""

import re

import pytest
from pydantic import ValidationError

from heterorl.common.process.config_file import problems_of
from heterorl.coordinator.coordinator_config import CoordinatorConfig


def problem(table):
    with pytest.raises(ValidationError) as refused:
        CoordinatorConfig.model_validate(table)
    return "; ".join(map(str, problems_of(CoordinatorConfig, refused.value)))


@pytest.mark.parametrize(
    "table",
    [
        {"store": {"url": ["postgresql://u:pa55word@db/run"]}},
        {"store": {"url": {"password": "pa55word"}}},
        {"store": "postgresql://u:pa55word@db/run"},
        {"payloads": {"endpoint": ["https://KEY:pa55word@s3.example"]}},
        {"payloads": ["https://KEY:pa55word@s3.example"]},
        {"max_versions": "https://u:pa55word@host"},
        {"lease_order": "https://u:pa55word@host"},
    ],
)
def test_value_that_may_be_a_secret_is_not_quoted(table):
    said = problem(table)

    assert "pa55word" not in said
    assert next(iter(table)) in said


def test_other_values_are_quoted():
    assert "'ten'" in problem({"max_versions": "ten"})


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"flavour": "int8"}, "flavour: is a key no longer; it is `variant`"),
        ({"ballast_bytes": 1}, "ballast_bytes: is a key no longer; .* see min_free_bytes"),
        ({"payloads": {"take_over": "ab"}}, r"payloads\.take_over: is a key no longer; .*operate\.md"),
    ],
)
def test_key_of_an_earlier_release_says_what_stands_in_its_place(table, said):
    assert re.search(said, problem(table))
