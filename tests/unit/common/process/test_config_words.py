"""What is said of a wrong configuration holds no secret of it."""

import re

import pytest
from pydantic import ValidationError

from heterorl.common.process.config_file import FORMER, all_keys, explain, load, problems_of, read_tables
from heterorl.coordinator.coordinator_config import CoordinatorConfig
from heterorl.learner.learner_config import LearnerConfig
from heterorl.learner.loss.loss_spec import ALGORITHMS
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
    ("table", "said"),
    [
        ({"flavour": "int8"}, "flavour: is a key no longer; it is `variant`"),
        ({"ballast_bytes": 1}, "ballast_bytes: is a key no longer; .* see min_free_bytes"),
        ({"evaluation_lease_s": 9.0}, "evaluation_lease_s: is a key no longer; .* work_lease_s; see evaluation_hold_s"),
        ({"payloads": {"take_over": "ab"}}, r"payloads\.take_over: is a key no longer; .*operate\.md"),
    ],
)
def test_key_of_an_earlier_release_says_what_stands_in_its_place(table, said):
    assert re.search(said, problem(table))


@pytest.mark.parametrize("former", FORMER)
def test_no_former_key_is_a_key_today(former):
    known = {key for schema in (CoordinatorConfig, LearnerConfig, SamplerConfig) for key in all_keys(schema)}

    assert former not in known
    assert former.removeprefix("loss.kind = ") not in ALGORITHMS


@pytest.mark.parametrize(
    ("table", "said"),
    [
        (
            {"loss": {"kind": "vcpo"}},
            "loss.kind: 'vcpo' is a kind no longer; .*function of vcpo: see docs/own-losses.md",
        ),
        (
            {"loss": {"kind": "gepo", "beta": 1}},
            "loss.beta: is a key no longer; .*function of tba: see docs/own-losses.md",
        ),
        (
            {"publish_interval": {"kind": "ucb", "price": 1}},
            "publish_interval: is a key no longer; set steps_per_version",
        ),
    ],
)
def test_key_or_kind_of_an_earlier_loss_says_where_it_is(table, said):
    assert re.search(said, problem(table, LearnerConfig))


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
