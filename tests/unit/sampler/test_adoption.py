"""A short file takes from the run what it leaves out, and nothing else."""

import dataclasses

import pytest

from heterorl.common.errors import ConfigError
from heterorl.common.model.contract import statement_of
from heterorl.common.process.config_file import load
from heterorl.common.wire.statement import statement_from_bytes
from heterorl.learner.learner_config import LearnerConfig
from heterorl.sampler.adoption import adopt, missing_keys
from heterorl.sampler.sampler_config import SamplerConfig
from tests.support.run import CONTRACT
from tests.support.statements import statement


def short(tmp_path, text="[join]\n"):
    path = tmp_path / "site.toml"
    path.write_text('site = "eu-1"\nmodel_dir = "/models/start"\nmetrics_port = 0\n' + text)
    return load(SamplerConfig, path)


def test_what_is_left_out_is_taken(tmp_path):
    config = short(tmp_path)
    found = adopt(config, statement(CONTRACT, task={"digits": 2}))

    assert missing_keys(config) == (
        "task", "sampling", "lora", "chat_template_arguments", "group_size", "use_chat_template",
    )  # fmt: skip
    assert (found.config.task.digits, found.config.group_size, found.config.sampling.max_new_tokens) == (2, 2, 4)
    assert (found.config.site, found.config.model_dir, found.config.metrics_port) == ("eu-1", "/models/start", 0)
    assert found.got["task.digits"] == 2
    found.check(CONTRACT)


def test_without_the_section_nothing_is_left_to_the_run(tmp_path):
    assert missing_keys(short(tmp_path, "")) == ()


def test_contract_that_does_not_come_of_it_is_refused(tmp_path):
    found = adopt(short(tmp_path), statement(CONTRACT))
    with pytest.raises(ConfigError, match="join: with what the run states this node comes to the contract"):
        found.check(dataclasses.replace(CONTRACT, vocab_size=21))


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("group_size = 4\n[join]\n", "group_size: the run has 2, this file 4"),
        ("[join]\n[sampling]\nmax_new_tokens = 3\n", "sampling.max_new_tokens: the run has 4, this file 3"),
        ("use_chat_template = true\n[join]\n", "use_chat_template: the run has False, this file True"),
    ],
)
def test_stated_key_must_agree_and_both_values_are_named(tmp_path, text, key):
    with pytest.raises(ConfigError, match=key):
        adopt(short(tmp_path, text), statement(CONTRACT))


def test_stated_keys_of_a_task_may_be_otherwise_if_they_mean_the_same(tmp_path):
    config = short(tmp_path, '[join]\n[task]\nname = "jsonl:/here.jsonl"\nreward_workers = 2\n')
    found = adopt(config, statement(CONTRACT, task={"name": "jsonl:/there.jsonl"}))

    assert (found.config.task.name, found.config.task.reward_workers) == ("jsonl:/here.jsonl", 2)
    found.check(CONTRACT)
    with pytest.raises(ConfigError, match="task.name: the run has 'jsonl:/there.jsonl', this file 'jsonl:/here.jsonl'"):
        found.check(dataclasses.replace(CONTRACT, num_prompts=51))


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"group_size": 65}, "join.max_group_size"),
        ({"sampling": {"max_new_tokens": 16385}}, "join.max_new_tokens"),
        ({"lora": {"rank": 257}}, "join.max_lora_rank"),
        ({"task": {"size": 1_000_001}}, "join.max_prompts"),
        ({"task": {"size": "1000001"}}, "join.max_prompts"),
        ({"task": {"name": "mixture", "sources": [{"label": "a", "evaluation_size": 1e9}]}}, "join.max_prompts"),
        ({"sampling": {"max_new_tokens": "16385"}}, "join.max_new_tokens"),
    ],
)
def test_numbers_above_the_files_bounds_are_refused(tmp_path, change, key):
    with pytest.raises(ConfigError, match=key):
        adopt(short(tmp_path), statement(CONTRACT, **change))


def test_values_that_this_program_refuses_are_named(tmp_path):
    with pytest.raises(ConfigError, match="join: what the run states does not fit this file: task.digits: must be at"):
        adopt(short(tmp_path), statement(CONTRACT, task={"digits": 50}))


def test_keys_of_one_machine_are_never_taken(tmp_path):
    found = adopt(
        short(tmp_path, '[join]\naccept = ["reward:mine:score"]\n'),
        statement(CONTRACT, task={"reward": "mine:score", "reward_path": "/evil", "reward_timeout_s": 3000.0}),
    )

    assert found.config.task.reward_path == str(tmp_path)
    assert found.config.task.reward_timeout_s == 5.0


def test_own_keys_of_the_data_leave_the_others_to_the_run(tmp_path):
    config = short(tmp_path, '[join]\naccept = ["hf:acme/sums@main"]\n[task.data]\ncache_dir = "/big"\nwhere = {}\n')
    stated = {"prompt": "question", "answer": "solution", "where": {"level": 3}}
    run = {"name": "hf:acme/sums@main[train]", "data": stated}
    found = adopt(config, statement(CONTRACT, task=run))

    data = found.config.task.data
    assert (data.prompt, data.answer, data.where, data.cache_dir) == ("question", "solution", {}, "/big")
    assert found.got["task.data"] == {"prompt": "question", "answer": "solution"}
    with pytest.raises(ConfigError, match=r"join.accept: the run reads 'file:///etc/passwd'"):
        adopt(config, statement(CONTRACT, task={**run, "data": {**stated, "files": ["file:///etc/passwd"]}}))


@pytest.mark.parametrize(("name", "answer"), [("hf:acme/sums[test]", "solution"), ("hf:acme/other[test]", "answer")])
def test_another_data_set_has_its_own_columns(tmp_path, name, answer):
    config = short(
        tmp_path, f'[join]\naccept = ["hf:acme/sums@main"]\n[task]\nname = "{name}"\n[task.data]\nwhere = {{}}\n'
    )
    found = adopt(
        config, statement(CONTRACT, task={"name": "hf:acme/sums@main[train]", "data": {"answer": "solution"}})
    )

    assert found.config.task.data.answer == answer
    assert ("task.data" in found.got) == (answer == "solution")


def test_an_environment_is_that_of_this_site(tmp_path):
    stated = {
        "name": "seeds", "environment": "mine:Game", "environment_path": "/evil", "step_timeout_s": 3000.0,
        "environment_workers": 4000, "environment_memory_bytes": 1 << 50, "max_turns": 3,
    }  # fmt: skip
    accepts = '[join]\naccept = ["environment:mine:Game"]\n'
    adopted = [
        adopt(short(tmp_path, accepts + more), statement(CONTRACT, task=stated)).config.task
        for more in ("", '[task]\nenvironment_path = "lib"\n')
    ]

    assert [task.environment_path for task in adopted] == [str(tmp_path), str(tmp_path / "lib")]
    for task in adopted:
        assert (task.environment, task.max_turns, task.step_timeout_s) == ("mine:Game", 3, 5.0)
        assert (task.environment_workers, task.environment_memory_bytes) == (64, 1 << 30)


def test_learner_states_what_its_file_says_without_the_keys_of_its_machine():
    config = LearnerConfig(
        task={"name": "arithmetic", "digits": 1, "reward": "mine:score", "reward_path": "/home/a", "reward_workers": 3},
        sampling={"max_new_tokens": 4}, group_size=2,
    )  # fmt: skip
    told = statement_from_bytes(statement_of(config, CONTRACT)).settings

    assert told["task"] == {"name": "arithmetic", "digits": 1, "reward": "mine:score"}
    assert told["sampling"]["max_new_tokens"] == 4
    assert told["group_size"] == 2


def test_settings_that_are_too_long_are_not_stated(caplog):
    config = LearnerConfig(task={"system_prompt": "x" * 60_000}, use_chat_template=True)

    assert statement_of(config, CONTRACT) == b""
    assert "must set every key" in caplog.text
