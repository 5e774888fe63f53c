"""No run makes a site read a file or run code that its own file does not accept."""

import pytest
from pydantic import ValidationError

from heterorl.common.errors import ConfigError
from heterorl.common.tasks.source_config import DataConfig
from heterorl.common.tasks.sources.dataset_files import load_directory
from heterorl.sampler.adoption import check_consent
from heterorl.sampler.sampler_config import JoinConfig


@pytest.fixture
def data(tmp_path):
    (tmp_path / "data" / "deep").mkdir(parents=True)
    (tmp_path / "secret").write_text("x")
    (tmp_path / "data" / "link").symlink_to(tmp_path / "secret")
    return tmp_path / "data"


@pytest.mark.parametrize("name", ["arithmetic", "progression", "reasoning_gym:chain_sum"])
def test_built_in_tasks_are_accepted(name):
    check_consent({"name": name, "match": "math_verify"}, JoinConfig())


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "hf"])
def test_files_below_an_accepted_directory_are_accepted(data, kind):
    join = JoinConfig(accept=(f"{kind}:{data}",))

    check_consent({"name": f"{kind}:{data}/deep/train"}, join)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize(("accepted", "name"), [(".", "deep/train"), ("./deep", "deep/train"), ("deep", "deep/train")])
def test_a_directory_may_be_relative_as_the_tasks_file_is(data, monkeypatch, kind, accepted, name):
    monkeypatch.chdir(data)
    join = JoinConfig(accept=(f"{kind}:{accepted}",))

    check_consent({"name": f"{kind}:{name}"}, join)
    with pytest.raises(ConfigError, match=r"join\.accept"):
        check_consent({"name": f"{kind}:../secret"}, join)


@pytest.mark.parametrize("path", ["../secret", "deep/../../secret", "link", "/etc/passwd"])
@pytest.mark.parametrize("key", ["name", "evaluation_path"])
def test_files_elsewhere_are_refused(data, path, key):
    join = JoinConfig(accept=(f"jsonl:{data}",))
    task = {"name": f"jsonl:{data}/a"} | {key: ("jsonl:" if key == "name" else "") + str(data / path)}
    with pytest.raises(ConfigError, match=r"join.accept: the run's task reads .*(secret|passwd).*add \"jsonl:"):
        check_consent(task, join)


def test_a_path_in_a_home_is_refused_although_a_directory_of_its_name_is_accepted(data, monkeypatch):
    monkeypatch.chdir(data)

    with pytest.raises(ConfigError, match="a home is another one at each site"):
        check_consent({"name": "jsonl:~/deep"}, JoinConfig(accept=("jsonl:.",)))


def test_a_file_of_another_kind_is_refused(data):
    with pytest.raises(ConfigError, match="join.accept"):
        check_consent({"name": f"parquet:{data}/a"}, JoinConfig(accept=(f"jsonl:{data}",)))


@pytest.mark.parametrize(
    "task",
    [
        {"name": "hf:acme/sums@main[train]"},
        {"name": "hf:~/sums"},
        {"name": "jsonl:~/a"},
        {"name": "shell:rm"},
        {"reward": "mine:score"},
        {"reward": "http://127.0.0.1/x"},
        {"rewards": [{"kind": "function", "name": "a", "function": "mine:score"}]},
        {"rewards": [{"kind": "http", "name": "a", "url": "http://127.0.0.1", "api_key_env": "SECRET"}]},
        {"rewards": [{"kind": "code", "name": "a"}]},
        {"rewards": ["x"]},
        {"name": "mixture", "sources": [{"label": "a", "name": "jsonl:/etc/passwd"}]},
        {"name": "mixture", "sources": [{"label": "a", "reward": "mine:score"}]},
        {"name": "mixture", "sources": [5]},
        {"name": "mixture", "sources": {"a": 1}},
        {"name": "jsonl:/a\0b"},
        {"data": {"files": ["/etc/*"]}},
        {"name": "mixture", "data": {"files": ["../*"]}, "sources": [{"label": "a"}]},
        {"name": ["jsonl:/etc/passwd"]},
    ],
)
def test_everything_else_is_refused_by_name(task):
    with pytest.raises(ConfigError, match="join.accept"):
        check_consent(task, JoinConfig())


@pytest.mark.parametrize("revision", ["refs/pr/7", "e" * 40, "main"])
def test_a_data_set_is_accepted_at_its_own_commit_alone(revision):
    task = {"name": f"hf:acme/sums@{revision}[train]"}

    for entry in ("hf:acme/sums", f"hf:acme/sums@{'f' * 40}"):
        with pytest.raises(ConfigError, match=f'add "hf:acme/sums@{revision}"'):
            check_consent(task, JoinConfig(accept=(entry,)))
    check_consent(task, JoinConfig(accept=(f"hf:acme/sums@{revision}",)))


def test_names_that_are_listed_are_accepted():
    join = JoinConfig(accept=("hf:acme/sums@main", "reward:mine:score"))

    check_consent({"name": "hf:acme/sums@main[train]", "reward": "mine:score"}, join)
    check_consent({"rewards": [{"kind": "match", "name": "m"}]}, join)
    with pytest.raises(ConfigError, match="reward:mine:other"):
        check_consent({"reward": "mine:other"}, join)


@pytest.mark.parametrize(
    "pattern",
    ["../*", "file:///etc/passwd", "http://169.254.169.254/x", "hf://datasets/b/c/x.parquet", "zip://a::x.zip", "~/*"],
)
def test_patterns_that_leave_a_data_set_are_refused(data, pattern):
    join = JoinConfig(accept=(f"hf:{data}",))
    with pytest.raises(ConfigError, match="leaves the data set"):
        check_consent({"name": f"hf:{data}", "data": {"files": ["a.jsonl", pattern]}}, join)


def test_address_among_the_patterns_would_be_read(tmp_path):
    # Why it is refused: the library reads what is beside the directory that was accepted.
    for name, prompt in (("ours", "open"), ("other", "secret")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.jsonl").write_text(f'{{"prompt": "{prompt}", "answer": "1"}}\n')
    other = [(tmp_path / "other" / "a.jsonl").as_uri()]

    data = DataConfig(files=tuple(other), cache_dir=str(tmp_path / "cache"))

    found = load_directory("task.name", tmp_path / "ours", "train", data)

    assert found.table.column("prompt").to_pylist() == ["secret"]
    with pytest.raises(ConfigError, match="leaves the data set"):
        check_consent({"data": {"files": other}}, JoinConfig())


def test_an_environment_runs_where_it_is_accepted_by_its_name():
    task = {"name": "seeds", "environment": "textarena:Mastermind-v0"}
    check_consent(task, JoinConfig(accept=("environment:textarena:Mastermind-v0",)))

    for accept in ((), ("environment:textarena:Sokoban-v0",), ("reward:textarena:Mastermind-v0",)):
        for stated in (task, {"name": "mixture", "sources": [task]}):
            with pytest.raises(ConfigError, match='join.accept.*add "environment:textarena:Mastermind-v0"'):
                check_consent(stated, JoinConfig(accept=accept))


@pytest.mark.parametrize("entry", ["jsonl:", "jsonl:~/data", "python:x", "reward:x", "hf:", "environment:", "all"])
def test_entries_that_mean_nothing_are_refused(entry):
    with pytest.raises(ValidationError, match="is none of"):
        JoinConfig(accept=(entry,))
