"""What is said of a wrong configuration holds no secret of it."""

import datetime

import pytest
from pydantic import ValidationError

from heterorl.common.process.config_file import explain, load, problems_of, read_tables
from heterorl.coordinator.coordinator_config import CoordinatorConfig
from heterorl.sampler.sampler_config import SamplerConfig


def problem(table, schema=CoordinatorConfig):
    with pytest.raises(ValidationError) as refused:
        schema.model_validate(table)
    return "; ".join(map(str, problems_of(schema, refused.value)))


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
    ("schema", "table", "words"),
    [
        (
            SamplerConfig,
            {"delay": {"seconds": 5}},
            "delay.kind: is not set, and other keys depend on it; one of none, ",
        ),
        (
            SamplerConfig,
            {"task": {"rewards": [{"name": "a", "kind": "http", "url": "ftp://x"}]}},
            "task.rewards[0].url: must be a url that begins with http:// or https:// (the value is not shown, it may hold",
        ),
        (
            SamplerConfig,
            {"task": {"rewards": [{"weight": 1}]}},
            "task.rewards[0].kind: is not set, and other keys depend",
        ),
        (
            SamplerConfig,
            {"task": {"data": {"where": {"reward_model": {"style": "rule"}}}}},
            'task.data.where: reward_model is a table; put the name of a column with dots in quotes: "reward_model.style"',
        ),
        (
            SamplerConfig,
            {"task": {"data": {"at_least": {"extra_info": {"level": {"mean": 1}}}}}},
            "task.data.at_least: extra_info is a table; put the name of a column with dots in quotes:"
            ' "extra_info.level.mean"',
        ),
        (
            SamplerConfig,
            {"task": {"data": {"where": {"day": [datetime.date(2024, 1, 1)]}}}},
            "task.data.where: day must be text, a number, true or false, or a list of those, is [datetime.date(2024",
        ),
        (SamplerConfig, {"delay": "none"}, "delay: must be a table, is 'none'"),
        (SamplerConfig, {"variant": "fp8"}, "variant: 'fp8' is none of empty, int8, fp8_e4m3"),
        (SamplerConfig, {"state_dir": ""}, "state_dir: must be a path, is empty; remove the key for its default"),
        (CoordinatorConfig, {"backup_dir": ""}, "backup_dir: must be a path, is empty; remove the key for its default"),
    ],
)
def test_what_is_wrong_is_said_in_the_words_of_the_file(schema, table, words):
    said = problem(table, schema)

    assert said.startswith(words)
    assert "; task." not in said, "one problem"


def test_source_of_a_key_below_a_table_that_was_set_and_every_empty_table_is_shown(tmp_path):
    path = tmp_path / "sampler.toml"
    path.write_text("[sampling]\ntop_p = 0.9\n[tls]\ninsecure = true\n")
    overrides = ["sampling={temperature = 0.5}"]

    config, (_, sources) = load(SamplerConfig, path, overrides), read_tables(path, overrides)

    shown = {key: (value, source) for key, value, source in explain(config, sources)}
    assert shown["sampling.temperature"] == (0.5, "--set")
    assert shown["sampling.top_p"] == (1.0, "default")
    assert shown["tls.insecure"] == (True, str(path))
    assert shown["chat_template_arguments"] == ({}, "default")
