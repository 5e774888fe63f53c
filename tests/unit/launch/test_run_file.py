"""run.toml: what fits together, and what is said where it does not."""

import os
import subprocess
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from heterorl.cli.main import app
from heterorl.common.errors import ConfigError, HeterorlError, OperatorError
from heterorl.common.process.config_file import load
from heterorl.launch.nodes import check_nodes, nodes_of
from heterorl.launch.render import render
from heterorl.launch.run_file import RunFile
from tests.support.launches import NODES, RUN, run_file, run_table


def test_nodes_start_in_order_and_dial_what_the_run_says():
    nodes = {node.name: node for node in nodes_of(run_file())}

    assert list(nodes) == NODES
    assert nodes["coordinator"].config["groups_per_version"] == 16 * 2
    assert nodes["sampler-eu-2"].config["coordinator"] == "eu.example:50061"
    assert nodes["sampler-us"].config["coordinator"] == "coord.example:50051"
    assert (nodes["sampler-eu-1"].devices, nodes["sampler-eu-2"].devices) == ((0, 1), (2, 3))
    assert nodes["sampler-eu-2"].site == "eu.2"
    # Named as what they wait for is named.
    seen = set()
    for node in nodes.values():
        assert seen.issuperset(node.needs)
        seen.add(node.name)


def test_what_all_must_agree_on_is_the_same_for_learner_and_samplers():
    learner, *samplers = (node.config for node in nodes_of(run_file()) if node.kind in ("learner", "sampler"))

    for key in ("task", "sampling", "group_size", "model_dir"):
        assert {str(config[key]) for config in samplers} == {str(learner[key])}


def test_coordinators_that_stand_by_are_dialled_by_all():
    postgres = {"url": "postgresql://heterorl@db.example/run", "standby": ["b.example"]}
    coordinator = {"host": "a.example", "data_dir": "/shared/run", "postgres": postgres}
    samplers = [{"site": "us", "host": "us.example"}]
    nodes = {node.name: node for node in nodes_of(run_file(coordinator=coordinator, relays=[], samplers=samplers))}

    assert nodes["learner"].config["coordinator"] == ["a.example:50051", "b.example:50051"]
    for name in ("coordinator", "coordinator-2"):
        assert nodes[name].arguments == ("--standby",)
        assert nodes[name].config["data_dir"] == "/shared/run"


def test_relay_dials_every_coordinator():
    postgres = {"url": "postgresql://heterorl@db.example/run", "standby": ["b.example"]}
    coordinator = {"host": "a.example", "postgres": postgres, "config": {"payloads": {"bucket": "my-payloads"}}}
    nodes = {node.name: node for node in nodes_of(run_file(coordinator=coordinator))}

    assert nodes["relay-eu"].config["coordinator"] == ["a.example:50051", "b.example:50051"]
    assert "data_dir" not in nodes["coordinator-2"].config


def test_coordinators_that_stand_by_need_a_place_that_both_reach():
    postgres = {"url": "postgresql://heterorl@db.example/run", "standby": ["b.example"]}

    with pytest.raises(ValueError, match=r"coordinator\.data_dir: .* or a bucket in coordinator\.config\.payloads"):
        run_file(coordinator={"host": "a.example", "postgres": postgres})


@pytest.mark.parametrize("standby", [["a.example"], ["b.example", "b.example"]])
def test_coordinators_have_hosts_of_their_own(standby):
    postgres = {"url": "postgresql://heterorl@db.example/run", "standby": standby}

    with pytest.raises(ValueError, match=r"coordinator\.postgres\.standby: \w\.example has a coordinator on that port"):
        run_file(coordinator={"host": "a.example", "data_dir": "/shared", "postgres": postgres})


@pytest.mark.parametrize("others", [["gpu.example", "b.example"], ["b.example", "b.example"]])
def test_a_learner_has_each_of_its_machines_once(others):
    learner = {**run_table()["learner"], "nnodes": 3, "other_hosts": others}

    with pytest.raises(
        ValueError, match=r"learner\.other_hosts: \w+\.example is one of the learner's machines already"
    ):
        run_file(learner=learner)
    with pytest.raises(ValueError, match=r"learner\.other_hosts: coord\.example is"):
        run_file(learner={**learner, "host": "", "other_hosts": ["a.example", "coord.example"]})


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://me:hunter2@db/run",
        "host=db password=hunter2",
        "postgresql://me:hunter2\u2100@db/run",
        "mysql://hunter2",
    ],
)
def test_password_of_a_store_is_refused_by_the_key_that_has_it_and_not_repeated(url, tmp_path):
    path = tmp_path / "run.toml"
    table = f'[coordinator]\ndata_dir = "/shared"\npostgres = {{url = "{url}"}}\n'
    path.write_text(RUN.replace("[coordinator]\n", table))

    with pytest.raises(ConfigError, match=r"coordinator\.postgres\.url") as refused:
        load(RunFile, path)
    assert "hunter2" not in f"{refused.value} {refused.value.action}"


WRONG = {
    'id = "my-run"': ('id = "my run"', "run.id"),
    'model_dir = "/models/start"': ("", "run.model_dir"),
    "group_size = 4": ("group_sizes = 4", "run.group_sizes"),
    RUN[RUN.index("count = 2") :]: ("count = 0", "samplers[0].count: must be at least 1, is 0"),
    "nproc = 2": ("nproc = 0", "learner.nproc"),
    'kind = "fsdp2", device': ('kind = "torch", device', "nproc or nnodes above 1 needs backend.kind"),
    'relay = "eu"': ('relay = "asia"', "samplers[0].relay: no relay has site 'asia'"),
    'site = "us"': ('site = "eu.1"', "samplers[1].site: eu.1 and eu.1 become the same name"),
    "devices = [0, 1, 2, 3]": ("devices = [0, 1, 2]", "devices: 3 GPUs cannot be divided among count = 2 samplers"),
    'site = "eu"\nhost = "eu.example"\n\n': ('site = "asia"\nhost = "eu.example"\n\n', "samplers[0].relay: no relay has site 'eu'"),
    'host = "us.example"': ('host = "us example"', "samplers[1].host"),
    'data_dirs = ["/data"]': ('data_dirs = ["/a/../etc"]', "cannot be mounted into a container"),
    "[coordinator]\n": ("[tls]\ninsecure = true\n[coordinator]\n", "tls.insecure: plaintext needs loopback hosts"),
}  # fmt: skip


@pytest.mark.parametrize("right", WRONG)
def test_wrong_value_is_refused_by_the_name_of_its_key(right, tmp_path):
    wrong, said = WRONG[right]
    assert right in RUN
    path = tmp_path / "run.toml"
    path.write_text(RUN.replace(right, wrong))

    with pytest.raises(ConfigError) as caught:
        load(RunFile, path)

    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.action == ("docs/launch.md lists every key" if "group_sizes" in said else "")


SERVICES_REFUSE = {
    'loss = {kind = "gepo"}': ('loss = {kind = "gepoo"}', "run.loss"),
    "max_new_tokens = 512": ("max_new_tokens = 0", "run.sampling.max_new_tokens"),
    "threads = 2": ("treads = 2", "samplers.engine"),
    "max_staleness_versions = 32": ("max_staleness = 32", "coordinator.config.max_staleness"),
    "lr = 1e-6": ("lr = -1.0", "learner.backend"),
    "config = {max_staleness_versions = 32}": (
        'config = {store = {url = "postgresql://me:x@db/run"}}', "coordinator.config.store.url: has a password"
    ),
}  # fmt: skip


@pytest.mark.parametrize("right", SERVICES_REFUSE)
def test_command_refuses_what_a_service_would_and_writes_nothing(right, tmp_path):
    wrong, said = SERVICES_REFUSE[right]
    path = tmp_path / "run.toml"
    path.write_text(RUN.replace(right, wrong))

    result = CliRunner().invoke(app, ["launch", "slurm", str(path), "--out", str(tmp_path / "out")])

    assert isinstance(result.exception, HeterorlError)
    assert said in str(result.exception)
    assert not (tmp_path / "out").exists()


CONTRADICT = {
    'host = "eu.example"\n\n': ('host = "eu.example"\nconfig = {listen = "0.0.0.0:7"}\n\n', "relays.config.listen: the port"),
    "config = {max_staleness_versions = 32}": ('config = {listen = "0.0.0.0:7"}', "coordinator.config.listen: the port"),
    "engine = {threads = 2}": ("engine = {devices = [1]}", "change `samplers.devices`"),
    'engine = {kind = "vllm"}': ("config = {engine = {devices = [5]}}", "change `samplers.devices`"),
    'relay = "eu"\nengine = {kind = "vllm"}': ('engine = {kind = "vllm", devices = [0]}', "change `samplers.devices`"),
    'host = "us.example"': ('host = "us.example"\nconfig = {site = "asia"}', "change `samplers.site`"),
}  # fmt: skip


@pytest.mark.parametrize("right", CONTRADICT)
def test_key_that_contradicts_what_other_nodes_are_made_from_is_refused(right):
    wrong, said = CONTRADICT[right]
    assert right in RUN
    nodes = nodes_of(RunFile.model_validate(tomllib.loads(RUN.replace(right, wrong))))

    with pytest.raises(OperatorError) as refused:
        check_nodes(nodes, lambda *_: ())
    assert said in str(refused.value)


def test_problem_of_a_key_is_said_where_the_run_has_it():
    def nodes(**coordinator):
        postgres = {"url": "postgresql://heterorl@db.example/run"}
        return nodes_of(run_file(coordinator={"host": "a.example", "postgres": postgres, **coordinator}))

    def refuse_all(kind, table):
        return [(key, "is wrong") for key in ("store.url", "run_id", "keep_versions") if kind == "coordinator"]

    with pytest.raises(OperatorError) as refused:
        check_nodes(nodes(), refuse_all)
    assert [line.partition(":")[0] for line in refused.value.args[0].splitlines()[1:]] == [
        "coordinator.postgres.url", "run.id", "coordinator.config.keep_versions",
    ]  # fmt: skip
    with pytest.raises(OperatorError, match=r"coordinator\.config\.store\.url: is wrong"):
        check_nodes(nodes(config={"store": {"url": "postgresql://other@db.example/run"}}), refuse_all)


def test_command_writes_once_and_never_over_what_is_there(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(RUN)
    arguments = ["launch", "systemd", str(path), "--out", str(tmp_path / "out")]

    first, second = CliRunner().invoke(app, arguments), CliRunner().invoke(app, arguments)

    assert first.exit_code == 0, first.output
    assert (tmp_path / "out" / "certs.sh").stat().st_mode & 0o100
    assert "exists and is not empty" in str(second.exception)


def test_example_of_the_documentation_is_a_run(tmp_path):
    text = (Path(__file__).parents[3] / "docs" / "launch.md").read_text()
    path = tmp_path / "run.toml"
    path.write_text(text.partition("```toml\n")[2].partition("```")[0])

    result = CliRunner().invoke(app, ["launch", "compose", str(path), "--out", str(tmp_path / "out")])

    assert result.exit_code == 0, result.exception
    path.write_text(path.read_text().replace("max_new_tokens = 2048", "max_new_tokens = 0"))
    refused = CliRunner().invoke(app, ["launch", "compose", str(path), "--out", str(tmp_path / "other")])
    assert f"`{refused.exception}`" in text.replace("\n", " ")


HETERORL = """#!/bin/bash
set -eu
if [[ $2 == init ]]; then
  mkdir -p "$5" && touch "$5/ca.crt" "$5/ca.key" "$5/revoked"
  exit
fi
mkdir -p "${@: -1}" && touch "${@: -1}/node.crt"
if [[ $3 == relay ]]; then cp "${@: -3:1}/revoked" "${@: -1}"; fi
"""
"""Stands in for `heterorl certs init RUN --dir DIR` and `certs issue ROLE SITE ... --dir DIR --out OUT`."""


def run_certs(tmp_path, out):
    """Render the example and make its certificates, from another directory."""
    program = tmp_path / "heterorl"
    program.write_text(HETERORL)
    program.chmod(0o755)
    (tmp_path / "run.toml").write_text(RUN)
    if not out.exists():
        result = CliRunner().invoke(app, ["launch", "slurm", str(tmp_path / "run.toml"), "--out", str(out)])
        assert result.exit_code == 0, result.exception
    (tmp_path / "elsewhere").mkdir(exist_ok=True)
    subprocess.run(
        [out / "certs.sh"],
        cwd=tmp_path / "elsewhere",
        env={"PATH": os.environ["PATH"], "HETERORL": program},
        check=True,
    )
    return out / "credentials"


@pytest.mark.process
def test_certificates_made_again_come_with_the_list_of_revoked_ones(tmp_path):
    nodes = run_certs(tmp_path, tmp_path / "out")
    (authority,) = (path.parent for path in tmp_path.rglob("ca.key"))
    (authority / "revoked").write_text("12ab\n")

    run_certs(tmp_path, tmp_path / "out")

    assert (nodes / "relay-eu" / "revoked").read_text() == "12ab\n"
    assert not (nodes / "sampler-us" / "revoked").exists()


@pytest.mark.process
def test_an_authority_that_was_cut_short_is_made_again(tmp_path):
    nodes = run_certs(tmp_path, tmp_path / "out")
    (key,) = tmp_path.rglob("ca.key")
    key.unlink()

    run_certs(tmp_path, tmp_path / "out")

    assert key.exists()
    assert (nodes / "learner" / "node.crt").exists()


@pytest.mark.process
def test_a_run_that_is_rendered_again_keeps_its_authority(tmp_path):
    for name in ("first", "second"):
        run_certs(tmp_path, tmp_path / name)

    assert [path.relative_to(tmp_path) for path in tmp_path.rglob("ca.key")] == [Path("certs/ca.key")]


@pytest.mark.parametrize(("directory", "code"), [("certs", 1), ("/root/certs", 0), ("~/certs", 0)])
def test_parts_share_one_authority(tmp_path, directory, code):
    (tmp_path / "run.toml").write_text(f'{RUN}\n[tls]\ndirectory = "{directory}"\n')

    words = ["launch", "slurm", str(tmp_path / "run.toml"), "--part", "learner", "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(app, words)

    assert result.exit_code == code
    assert (tmp_path / "out").exists() == (code == 0)
    if code:
        assert "tls.directory: certs is relative" in str(result.exception)
    else:
        assert f"authority={Path(directory).expanduser()}" in (tmp_path / "out" / "certs.sh").read_text()


@pytest.mark.parametrize(
    "path", ["/srv/run data", "/srv/x --set tls.insecure=true", "/srv/%i", '/srv/"', "/srv/a;b", "/a\nb"]
)
def test_directory_that_a_unit_would_read_otherwise_is_refused(path):
    with pytest.raises(ValueError, match="data_dir"):
        run_file(coordinator={"host": "a.example", "data_dir": path})
    with pytest.raises(ValueError, match="data_dirs"):
        run_file(run={"id": "r", "model_dir": "/srv/model", "data_dirs": [path]})


@pytest.mark.parametrize(
    ("launcher", "changes", "said"),
    [
        ("systemd", {"/models/start": "/home/anna/start"}, "run.model_dir: units of systemd cannot read /home/anna/start"),
        ("systemd", {"/data": "/tmp/data"}, "run.data_dirs: units of systemd cannot read /tmp/data"),
        ("compose", {"/models/start": "~/start"}, "run.model_dir: ~/start is relative"),
        ("compose", {"jsonl:/data/": "jsonl:"}, "run.data_dirs: containers do not have {here}/train.jsonl"),
        ("k8s", {"jsonl:/data/": "jsonl:/srv/"}, "run.data_dirs: containers do not have /srv/train.jsonl"),
    ],
)  # fmt: skip
def test_a_path_that_a_node_cannot_read_is_refused(launcher, changes, said, tmp_path):
    text = RUN
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new, 1)
    path = tmp_path / "run.toml"
    path.write_text(text)

    with pytest.raises(ConfigError) as caught:
        render(launcher, load(RunFile, path))

    assert str(caught.value).startswith(said.format(here=tmp_path))


def test_relative_data_is_of_the_directory_of_run_toml_and_readme_names_the_code(tmp_path):
    """Jobs start elsewhere: files that they could not find would end them all."""
    task = 'evaluation_path = "../test.jsonl", reward = "myreward:score"'
    evaluation = 'evaluation = [{name = "other", task = {name = "jsonl:other.jsonl"}}]'
    text = RUN.replace("jsonl:/data/train.jsonl", "jsonl:train.jsonl").replace('match = "math_verify"', task)
    text = text.replace('{kind = "gepo"}', '{kind = "custom", function = "myloss:loss"}')
    text = text.replace("engine = {threads = 2}", f"config = {{{evaluation}}}")
    (tmp_path / "model").mkdir()
    found = {}
    for stated in ("model", "./elsewhere", "gpt2"):
        path = tmp_path / "run.toml"
        path.write_text(text.replace("/models/start", stated))
        tree = render("slurm", load(RunFile, path))
        sampler = tomllib.loads(tree["config/sampler-us.toml"])
        found[stated] = sampler["model_dir"]
        assert sampler["task"] == tomllib.loads(tree["config/learner.toml"])["task"]

    assert found == {"model": f"{tmp_path}/model", "./elsewhere": f"{tmp_path}/elsewhere", "gpt2": "gpt2"}
    assert sampler["task"]["name"] == f"jsonl:{tmp_path}/train.jsonl"
    assert sampler["task"]["evaluation_path"] == f"{tmp_path.parent}/test.jsonl"
    assert sampler["evaluation"][0]["task"]["name"] == f"jsonl:{tmp_path}/other.jsonl"
    assert "- `myloss:loss`\n- `myreward:score`\n\nModules that are not installed: copy them" in tree["README.md"]


def test_a_part_without_learner_and_samplers_needs_none_of_their_files(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(RUN.replace("/models/start", "/home/anna/start").replace("jsonl:/data/", "jsonl:/srv/"))
    run = load(RunFile, path)

    for launcher in ("systemd", "compose"):
        assert render(launcher, run, ["coordinator"])
        with pytest.raises(ConfigError):
            render(launcher, run)
