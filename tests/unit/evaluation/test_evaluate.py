"""`heterorl evaluate` of a model: sets from a configuration or from options, numbers for people and programs."""

import asyncio
import dataclasses
import json
from contextlib import contextmanager, nullcontext

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from heterorl.cli.main import app
from heterorl.common.errors import ConfigError, UnknownVersion
from heterorl.common.generation.tiny_model import write_tiny_model
from heterorl.common.process.config_file import load
from heterorl.evaluation import subject
from heterorl.evaluation.subject import configured
from heterorl.sampler import adoption
from heterorl.sampler.sampler_config import SamplerConfig
from tests.support.run import CONTRACT
from tests.support.statements import statement

SETS = """
[engine]
batch_rows = 16

[task]
digits = 1

[[evaluation]]
name = "sums"
num_prompts = 6
samples_per_prompt = 4
temperature = 0.8
max_new_tokens = 4
task = {digits = 2}

[[evaluation]]
name = "greedy"
num_prompts = 3
max_new_tokens = 4
"""


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("model"), seed=0, hidden_size=32, num_layers=2)


@pytest.fixture
def sets(tmp_path):
    path = tmp_path / "sampler.toml"
    path.write_text(SETS)
    return str(path)


def run(*arguments):
    return CliRunner().invoke(app, ["evaluate", *map(str, arguments)], catch_exceptions=False)


@pytest.mark.process
def test_sets_of_a_configuration_as_json_and_again_the_same(model_dir, sets, tmp_path):
    out = tmp_path / "all.json"
    first = json.loads(run(model_dir, "-c", sets, "--json", "--out", out).stdout)
    second = json.loads(run(model_dir, "-c", sets, "--json", "--only", "sums").stdout)

    sums, greedy = first["evaluations"]
    assert [sums["set"], greedy["set"]] == ["sums", "greedy"]
    assert (sums["num_prompts"], sums["num_samples"], sums["version"]) == (6, 24, None)
    assert [entry["k"] for entry in sums["passes"]] == [1, 2, 4]
    assert greedy["num_samples"] == 3
    for entry in sums["passes"]:
        assert 0 <= entry["estimate"]["low"] <= entry["estimate"]["mean"] <= entry["estimate"]["high"] <= 1
    (again,) = second["evaluations"]
    assert {**again, "seconds": 0} == {**sums, "seconds": 0}
    texts = json.loads(out.read_text())["evaluations"][0]["prompts"]
    assert [len(prompt["samples"]) for prompt in texts] == [4] * 6
    assert texts[0]["prompt"].endswith("=")


@pytest.mark.process
def test_a_version_that_is_gone_costs_no_earlier_result(model_dir, sets, tmp_path, monkeypatch):
    @contextmanager
    def open_versions(address, versions, config):
        with subject.open_model(str(model_dir), config) as opened:

            def each():
                yield dataclasses.replace(opened, name="version 0", version=0)
                raise UnknownVersion("version 1 is no longer stored")

            yield each()

    monkeypatch.setattr(subject, "open_versions", open_versions)
    out = tmp_path / "all.json"
    arguments = ["-c", sets, "--only", "greedy", "--version", 0, "--version", 1, "--out", out]
    with pytest.raises(UnknownVersion):
        run("coord.example:50051", *arguments)

    assert [row["version"] for row in json.loads(out.read_text())["evaluations"]] == [0]


def test_a_short_file_takes_the_runs_task_and_template(tmp_path, monkeypatch):
    path = tmp_path / "sampler.toml"
    path.write_text('model_dir = "/models/start"\n[join]\n')
    asked = []

    async def ask(config, clock):
        asked.append(config.coordinator)
        return statement(CONTRACT, task={"digits": 2}, use_chat_template=True)

    monkeypatch.setattr(adoption, "_ask", ask)
    found = subject.joined(load(SamplerConfig, path), "coord.example:50051")

    assert asked == ["coord.example:50051"]
    assert (found.task.digits, found.use_chat_template, found.model_dir) == (2, True, "/models/start")
    stated = SamplerConfig()
    assert subject.joined(stated, "coord.example:50051") is stated

    async def wait(config, clock):
        await asyncio.Event().wait()

    monkeypatch.setattr(adoption, "_ask", wait)
    monkeypatch.setattr(subject, "BUDGET_S", 0.01)
    with pytest.raises(ConfigError, match="join: coord.example:50051 has not stated .* task, sampling"):
        run("coord.example:50051", "-c", path)


@pytest.mark.process
def test_a_task_of_the_options_as_a_table(model_dir):
    found = run(model_dir, "--task", "arithmetic", "--prompts", 2, "--samples", 2, "--temperature", 1,
                "--max-new-tokens", 3, "--set", "engine.batch_rows=4")  # fmt: skip

    assert found.exit_code == 0
    assert "pass@2" in found.stdout
    assert "task" in found.stdout
    # Whoever waits sees what is done, apart from the table.
    said = found.stderr.splitlines()
    assert said[-3:] == [
        f"{model_dir}, task: 2 prompts, 2 completions of each", f"{model_dir}, task: 1 of 2 prompts",
        f"{model_dir}, task: 2 of 2 prompts",
    ]  # fmt: skip
    assert "reading the set task" in said


def test_the_tasks_own_prompts_are_drawn_as_the_file_states():
    def drawn(sampling, **changes):
        (one,) = configured(SamplerConfig.model_validate({"sampling": sampling}), names=(), **changes)
        return one.temperature, one.top_p, one.max_new_tokens

    assert drawn({}) == (0.0, 1.0, 512)
    assert drawn({"max_new_tokens": 5}) == (0.0, 1.0, 5)
    assert drawn({"temperature": 1.0, "top_p": 0.9, "max_new_tokens": 5, "top_k": 3}) == (1.0, 0.9, 5)
    # What the command line names comes first.
    assert drawn({"temperature": 1.0, "max_new_tokens": 5}, temperature=0.5, max_new_tokens=7) == (0.5, 1.0, 7)


@pytest.mark.process
def test_a_set_with_bounded_prompts_counts_the_tokens_of_the_model(model_dir, tmp_path):
    rows = [{"prompt": "1" * number, "answer": "2"} for number in range(1, 9)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    data = f'{{max_prompt_tokens = 4, cache_dir = "{tmp_path}/cache"}}'
    path = tmp_path / "sampler.toml"
    path.write_text(
        f'[[evaluation]]\nname = "short"\nmax_new_tokens = 2\n'
        f'task = {{name = "parquet:{tmp_path}/rows.parquet", data = {data}}}\n'
    )

    (found,) = json.loads(run(model_dir, "-c", path, "--json").stdout)["evaluations"]

    # A character is a token: four prompts are left, half of them held out.
    assert found["num_prompts"] == 2


@pytest.mark.process
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_named_file_is_evaluated_row_for_row(model_dir, tmp_path, kind):
    rows = [{"prompt": f"{number}+1=", "answer": str(number + 1)} for number in range(70)]
    # A row that is there twice is evaluated twice.
    rows.append(rows[0])
    file = tmp_path / f"test.{kind}"
    if kind == "jsonl":
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        pq.write_table(pa.Table.from_pylist(rows), file)
    (tmp_path / "other.jsonl").write_text('{"prompt": "2+2=", "answer": "4"}\n')
    config = tmp_path / "sampler.toml"
    config.write_text(
        SETS.replace("digits = 1", f'evaluation_path = "{tmp_path}/other.jsonl"\ndata.cache_dir = "{tmp_path}/cache"')
    )
    out = tmp_path / "all.json"

    def asked(*options):
        run(model_dir, "-c", config, "--task", f"{kind}:{file}", "--max-new-tokens", 1, "--out", out, *options)
        (found,) = json.loads(out.read_text())["evaluations"]
        return [prompt["prompt"] for prompt in found["prompts"]]

    assert asked() == [row["prompt"] for row in rows]
    assert asked("--prompts", 3) == [row["prompt"] for row in rows[:3]]


@pytest.mark.process
def test_a_named_file_takes_the_place_of_a_mixture_and_of_a_split(model_dir, tmp_path):
    file = tmp_path / "test.parquet"
    pq.write_table(pa.Table.from_pylist([{"prompt": "2+2=", "answer": "4"}]), file)
    config = tmp_path / "sampler.toml"
    config.write_text(
        f'[task]\nname = "mixture"\ndata = {{evaluation_split = "test", cache_dir = "{tmp_path}/cache"}}\n'
        '[[task.sources]]\nlabel = "sums"\n'
    )

    (found,) = json.loads(
        run(model_dir, "-c", config, "--task", f"parquet:{file}", "--max-new-tokens", 1, "--json").stdout
    )["evaluations"]

    assert (found["set"], found["num_prompts"]) == ("task", 1)


def test_a_named_split_is_read_whole_from_its_own_files(tmp_path, monkeypatch):
    for name in ("train", "test"):
        file = tmp_path / "set" / f"{name}-0.parquet"
        file.parent.mkdir(exist_ok=True)
        pq.write_table(pa.Table.from_pylist([{"prompt": f"{name} {n}=", "answer": "4"} for n in range(3)]), file)
    config = tmp_path / "sampler.toml"
    config.write_text(
        f'[task]\nname = "hf:{tmp_path}/set[train]"\n'
        f'data = {{files = ["train-*.parquet"], max_prompt_tokens = 2, cache_dir = "{tmp_path}/cache"}}\n'
    )
    opened = []
    monkeypatch.setattr("heterorl.evaluation.subject.open_model", lambda *_: nullcontext())
    monkeypatch.setattr(
        "heterorl.evaluation.evaluate_sets.evaluate_all", lambda _, sets, **__: opened.extend(sets) or ()
    )

    run("MODEL", "-c", config, "--task", f"hf:{tmp_path}/set[test]", "--set", "task.data.where.answer='4'")

    (found,) = opened
    prompts = [found.task.evaluation_prompt(n).text for n in range(found.task.num_evaluation_prompts)]
    assert prompts == ["test 0=", "test 1=", "test 2="]


@pytest.mark.process
def test_a_named_file_without_rows_is_refused(model_dir, tmp_path):
    (tmp_path / "test.jsonl").write_text("\n")

    with pytest.raises(ConfigError, match=r"task\.name: .*test\.jsonl has no prompts"):
        run(model_dir, "--task", f"jsonl:{tmp_path}/test.jsonl")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--only", "sum"], "--only: there is no set sum; there are sums, greedy"),
        (["--samples", "4", "--only", "greedy"], "temperature 0 repeats one completion"),
        (["--version", "3"], "--version: .* is a model, which has no versions"),
        (["--max-new-tokens", "9999"], r"evaluation\.sums\.max_new_tokens: 9999 new tokens leave no room"),
        (["--max-new-tokens", "9999", "--task", "arithmetic"], r"sampling\.max_new_tokens: 9999 new tokens"),
    ],
)
def test_a_wrong_option_is_named(model_dir, sets, arguments, words):
    with pytest.raises(ConfigError, match=words):
        run(model_dir, "-c", sets, *arguments)


def test_a_file_that_cannot_be_written_is_named_before_any_work(tmp_path):
    with pytest.raises(ConfigError, match="--out: cannot write"):
        run("no-such/model", "--out", tmp_path / "missing" / "all.json")


def test_a_set_twice_is_refused(model_dir, tmp_path):
    path = tmp_path / "sampler.toml"
    path.write_text('[[evaluation]]\nname = "a"\n[[evaluation]]\nname = "a"\n')

    with pytest.raises(ConfigError, match="evaluation has two sets named a"):
        run(model_dir, "-c", path)


def test_versions_are_pulled_from_where_the_file_allows(monkeypatch, tmp_path):
    allowed = []

    class Puller:
        def __init__(self, *, api, **_):
            self.urls = api._connections

        async def build(self, *_, **__):
            allowed.extend(self.urls.allows(f"https://{host}/payloads/1") for host in ("s3.example", "s4.example"))

    monkeypatch.setattr(subject, "TrustedPuller", Puller)
    for keys in ({"payload_hosts": ["s3.example"]}, {"payload_urls": "none"}):
        config = SamplerConfig.model_validate({"tls": {"insecure": True}, **keys})
        subject.pull_version("127.0.0.1:1", 0, config, layout=None, spool=tmp_path)

    assert allowed == [True, False, False, False]


def test_a_reward_next_to_the_file_is_found_from_anywhere(tmp_path, monkeypatch):
    path = tmp_path / "sampler.toml"
    path.write_text('[task]\nreward = "mine:score"\n')
    monkeypatch.chdir(path.parent.parent)

    (found,) = configured(load(SamplerConfig, path), names=(), num_prompts=3)

    assert found.task.reward_path == str(tmp_path)


def test_sources_of_a_set_inherit_as_in_a_run():
    task = {
        "name": "mixture", "match": "math_verify", "system_prompt": "Answer briefly.", "evaluation_size": 7,
        "sources": [{"name": "jsonl:a.jsonl", "label": "a"}],
    }  # fmt: skip
    own = SamplerConfig.model_validate({"task": task})
    listed = SamplerConfig.model_validate({"evaluation": [{"name": "a", "task": task}]})

    for config in (own, listed):
        (found,) = configured(config, names=(), num_prompts=3)
        assert found.task.inherited() == own.task.inherited()
        assert "reward_workers" not in found.task.model_fields_set


@pytest.mark.process
def test_a_closed_output_costs_no_result(model_dir, sets, tmp_path, monkeypatch):
    def closed(*_, **__):
        raise BrokenPipeError

    monkeypatch.setattr("heterorl.cli.models.typer.echo", lambda text, err=False: None if err else closed())
    out = tmp_path / "all.json"

    CliRunner().invoke(app, ["evaluate", str(model_dir), "-c", sets, "--only", "greedy", "--json", "--out", str(out)])

    assert len(json.loads(out.read_text())["evaluations"]) == 1
