"""Images and compose files: well-formed, confined, and their commands are ones that the services accept."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from heterorl.cli.main import app
from heterorl.common.process.config_file import load
from heterorl.coordinator.coordinator_config import CoordinatorConfig
from heterorl.learner.learner_config import LearnerConfig
from heterorl.sampler.sampler_config import SamplerConfig
from tests.support.certificates import Certificates
from tests.support.tools import check, tool

DEPLOY = Path(__file__).parents[2] / "deploy"
FILES = {path.name: yaml.safe_load(path.read_text()) for path in DEPLOY.glob("compose*.yaml")}
BASE, GPU, WAN = (FILES[name] for name in ("compose.yaml", "compose.gpu.yaml", "compose.wan.yaml"))
ENGINES = FILES["compose.engines.yaml"]
OVERLAYS = {None: {"services": {}}, "gpu": GPU, "engines": ENGINES}
OTHER_ENGINES = {"learner-deepspeed": "learner", "sampler-vllm": "sampler"}
OURS = {"coordinator": "coordinator", "learner": "learner", "sampler-1": "sampler", "sampler-2": "sampler"}
SCHEMAS = {"coordinator": CoordinatorConfig, "learner": LearnerConfig, "sampler": SamplerConfig}
STATE = "/var/lib/heterorl"
CONFINED = [(BASE, name) for name in BASE["services"]] + [(WAN, name) for name in WAN["services"]]


def settings(command):
    return [word.removeprefix("--set=") for word in command if word.startswith("--set=")]


def words_of(name, overlay=None):
    """What a container runs after `heterorl`."""
    service = BASE["services"][name] | OVERLAYS[overlay]["services"].get(name, {})
    program, *words = service.get("entrypoint", ["heterorl"]) + service["command"]
    assert program == "heterorl"
    return words


def stages():
    """Name of each stage of the Dockerfile to the stage or image that it is made from."""
    lines = [line.split() for line in (DEPLOY / "Dockerfile").read_text().splitlines() if line.startswith("FROM ")]
    return {words[3]: words[1] for words in lines}


@pytest.mark.process
@pytest.mark.parametrize("name", sorted(FILES))
def test_compose_file_satisfies_the_specification(name):
    check(tool("check-jsonschema"), "--builtin-schema", "vendor.compose-spec", str(DEPLOY / name))


@pytest.mark.process
def test_the_specification_refuses_a_wrong_key(tmp_path):
    wrong = tmp_path / "compose.yaml"
    wrong.write_text("services: {a: {image: x, memory_limit: 1g}}\n")
    program = tool("check-jsonschema")

    with pytest.raises(AssertionError, match="memory_limit"):
        check(program, "--builtin-schema", "vendor.compose-spec", str(wrong))


@pytest.mark.process
@pytest.mark.parametrize(
    "overlays",
    [[], ["gpu"], ["engines"], ["wan"], ["gpu", "wan"], ["engines", "wan"]],
    ids=lambda names: "+".join(["base", *names]),
)
def test_compose_itself_accepts_base_and_overlays(overlays, tmp_path):
    program = _compose()
    files = [DEPLOY / "compose.yaml", *(DEPLOY / f"compose.{name}.yaml" for name in overlays)]
    arguments = [word for path in files for word in ("-f", str(path))]

    whole = json.loads(check(program, *arguments, "config", "--format", "json"))

    assert set(OURS) <= set(whole["services"])
    # Overlays take nothing of the confinement away.
    assert all(service["cap_drop"] == ["ALL"] for service in whole["services"].values())
    has_gpu = bool({"gpu", "engines"} & set(overlays))
    assert all(("deploy" in whole["services"][name]) == has_gpu for name in ("learner", "sampler-1"))


def _compose():
    """A Compose that is new enough; the distribution's is not."""
    program = tool("docker-compose")
    version = subprocess.run([program, "version", "--short"], capture_output=True, text=True, check=False).stdout
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:3])
    if numbers < (2, 20, 2):
        pytest.skip(f"{program} is Compose {version.strip()}; the files need 2.20.2 (deploy/compose.sh says so)")
    return program


@pytest.mark.process
@pytest.mark.parametrize(
    ("versions", "runs"),
    [
        ({"docker": "2.20.2"}, "docker compose"),
        ({"docker": "v5.1.0", "docker-compose": "1.29.2"}, "docker compose"),
        ({"docker": "", "docker-compose": "2.39.1"}, "docker-compose"),
        ({"docker": "2.17.3", "docker-compose": "1.29.2"}, ""),
        ({"docker-compose": "1.29.2"}, ""),
        ({}, ""),
    ],
)
def test_too_old_compose_is_refused_with_a_sentence(versions, runs, tmp_path):
    for name, version in versions.items():
        own = "docker compose" if name == "docker" else name
        path = tmp_path / name
        path.write_text(
            f'#!/bin/bash\nif [[ "$*" == *"version --short" ]]; then echo "{version}"; else echo "{own}: $*; $PWD"; fi\n'
        )
        path.chmod(0o755)
    command = ["bash", str(DEPLOY / "compose.sh"), "up", "-d"]
    # Nothing of this machine but what bash scripts live on.
    for name in ("bash", "sort", "head", "dirname"):
        (tmp_path / name).symlink_to(shutil.which(name))

    result = subprocess.run(command, capture_output=True, text=True, check=False, env={"PATH": str(tmp_path)}, cwd="/")

    if runs:
        assert result.returncode == 0, result.stderr
        assert result.stdout.strip() == f"{runs}: {'compose ' if runs == 'docker compose' else ''}up -d; {DEPLOY}"
    else:
        assert result.returncode == 2
        assert "need Docker Compose 2.20.2 or newer" in result.stderr
        assert "docker-compose-plugin" in result.stderr
        assert all(version in result.stderr for version in versions.values())


@pytest.mark.process
def test_secrets_are_what_the_compose_file_mounts(tmp_path):
    certificates = Certificates(tmp_path / "certs")
    nodes = [("coordinator", "main"), ("learner", "learner"), ("sampler", "site-1"), ("sampler", "site-2")]
    environment = {**os.environ, "HETERORL_SECRETS_DIR": str(tmp_path / "secrets"), "HETERORL_SECRETS_OWNERS": "no"}

    def write():
        command = ["bash", str(DEPLOY / "secrets.sh"), str(tmp_path / "certs")]
        return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)

    for role, site in nodes[:-1]:
        certificates.node(role, site)
    result = write()
    assert result.returncode == 2
    assert "sampler-site-2/ca.crt" in result.stderr
    assert not (tmp_path / "secrets").exists()
    certificates.node(*nodes[-1])
    assert write().returncode == 0
    for name, (role, site) in zip(OURS, nodes, strict=True):
        own = tmp_path / "secrets" / name
        assert (own / "node.key").read_bytes() == certificates.pair(role, site).key
        assert {path.name: path.stat().st_mode & 0o777 for path in own.iterdir()} == dict.fromkeys(
            ("ca.crt", "node.crt", "node.key"), 0o400
        )
    password = (tmp_path / "secrets" / "grafana_admin_password").read_text()
    assert len(password.strip()) == 32
    # Renewed certificates come the same way; the password stays.
    certificates.renew("sampler", "site-2")
    assert write().returncode == 0
    assert (tmp_path / "secrets/sampler-2/node.key").read_bytes() == certificates.pair("sampler", "site-2").key
    assert (tmp_path / "secrets" / "grafana_admin_password").read_text() == password


@pytest.mark.process
@pytest.mark.parametrize("written", ["mine", "{}/else", '"{}/else"', "'mine'"])
def test_secrets_go_where_the_environment_file_of_compose_has_them(written, tmp_path):
    certificates = Certificates(tmp_path / "certs")
    for node in (("coordinator", "main"), ("learner", "learner"), ("sampler", "site-1"), ("sampler", "site-2")):
        certificates.node(*node)
    deploy = tmp_path / "deploy"
    deploy.mkdir()
    shutil.copy(DEPLOY / "secrets.sh", deploy)
    place = deploy / written.format(tmp_path).strip("'\"")
    (deploy / ".env").write_text(f"HETERORL_VERSION=2\nHETERORL_SECRETS_DIR={written.format(tmp_path)}\n")
    # As sudo leaves it.
    environment = {"PATH": os.environ["PATH"], "HETERORL_SECRETS_OWNERS": "no"}

    check("env", "-i", *(f"{key}={value}" for key, value in environment.items()),
          "bash", str(deploy / "secrets.sh"), str(tmp_path / "certs"))  # fmt: skip

    assert (place / "coordinator" / "node.key").exists()
    assert not (deploy / "secrets").exists()


@pytest.mark.process
def test_compose_reads_files_and_variables_of_the_environment_file(tmp_path):
    page = (DEPLOY / "README.md").read_text()
    (example,) = re.findall(r"^```\n(COMPOSE_FILE=.*?)^```", page, re.DOTALL | re.MULTILINE)
    for path in DEPLOY.glob("compose*.yaml"):
        shutil.copy(path, tmp_path)
    (tmp_path / ".env").write_text(f"{example}HETERORL_VERSION=2.0\n")
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}

    result = subprocess.run(
        [_compose(), "config", "--format", "json"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip

    learner = json.loads(result.stdout)["services"]["learner"]
    assert learner["image"] == "heterorl-learner-deepspeed:2.0"
    assert learner["environment"]["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert learner["command"][-1] == "--nproc=2"


@pytest.mark.parametrize(("file", "name"), CONFINED, ids=[name for _, name in CONFINED])
def test_container_is_confined(file, name):
    service = file["services"][name]

    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service.get("cap_add", []) == (["NET_ADMIN"] if name.startswith("wan-") else [])
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert not service.get("privileged")
    assert service["mem_limit"]
    assert service["pids_limit"]
    assert "latest" not in service["image"]
    # What is published is plaintext or has no users: it stays on this machine.
    assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))
    environment = service.get("environment", {})
    assert not [key for key in environment if "PASSWORD" in key and not key.endswith("__FILE")]


@pytest.mark.parametrize("name", BASE["services"])
def test_container_says_how_it_is(name):
    service = BASE["services"][name]
    stage = (DEPLOY / "Dockerfile").read_text().partition(f" AS {OURS.get(name)}\n")[2].partition("\nFROM ")[0]

    assert "healthcheck" in service or "HEALTHCHECK" in stage


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_command_is_one_that_the_service_accepts(name, overlay):
    role = OURS[name]
    service = BASE["services"][name] | OVERLAYS[overlay]["services"].get(name, {})
    command = words_of(name, overlay)
    file = service["build"]["target"]
    assert command[0] == role
    assert {f"--config=/etc/heterorl/{file}.toml", "--log=json"} <= set(command)

    config = load(SCHEMAS[role], DEPLOY / "config" / f"{file}.toml", settings(command))

    own = config.data_dir if role == "coordinator" else config.state_dir
    assert own.is_relative_to(STATE)
    assert any(volume == f"{name}:{STATE}" for volume in service["volumes"])
    assert name in BASE["volumes"]
    assert config.metrics_host == "0.0.0.0"
    if role == "coordinator":
        assert config.listen == "0.0.0.0:50051"
    else:
        assert config.coordinator == "coordinator:50051"
        part = config.backend if role == "learner" else config.engine
        if overlay == "engines":
            assert part.kind == {"learner": "deepspeed", "sampler": "vllm"}[role]
        else:
            assert part.device == ("cuda:0" if overlay else "cpu")


@pytest.mark.parametrize("name", OURS)
def test_node_has_certificates_of_its_own_where_its_configuration_names_them(name):
    (mount,) = [
        volume
        for volume in BASE["services"][name]["volumes"]
        if isinstance(volume, dict) and volume["target"] == "/tls"
    ]
    config = load(SCHEMAS[OURS[name]], DEPLOY / "config" / f"{OURS[name]}.toml")

    assert mount["source"] == f"${{HETERORL_SECRETS_DIR:-./secrets}}/{name}"
    assert mount["read_only"] is True
    assert (config.tls.ca, config.tls.cert, config.tls.key) == ("/tls/ca.crt", "/tls/node.crt", "/tls/node.key")
    if name == "coordinator":
        words = ["heterorl", "health", "127.0.0.1:50051", "--credentials", "/tls"]
        assert BASE["services"][name]["healthcheck"]["test"] == ["CMD", *words]
        assert f"CMD {json.dumps(words)}" in (DEPLOY / "Dockerfile").read_text()
        # In a directory that is mounted whole: a list that is replaced is seen.
        assert config.tls.revoked == "/etc/heterorl/revoked"
        assert (DEPLOY / "config" / "revoked").exists()


def test_gpu_overlay_changes_where_numbers_are_computed_and_nothing_else(tmp_path):
    for name in GPU["services"]:
        changed = set(words_of(name, "gpu")) ^ set(words_of(name))
        keys = {word.removeprefix("--set=").split("=")[0].split(".")[1] for word in changed}
        assert keys == {"device", "compute_dtype"}
    # A site's own file may name several GPUs.
    text = (DEPLOY / "config" / "sampler.toml").read_text()
    (tmp_path / "sampler.toml").write_text(text.replace('device = "cuda:0"', "devices = [0, 1]"))
    config = load(SamplerConfig, tmp_path / "sampler.toml", settings(words_of("sampler-1", "gpu")))
    assert config.engine.devices == (0, 1)


def test_overlay_of_engines_changes_image_file_and_devices_and_nothing_else():
    for name, service in ENGINES["services"].items():
        role, engine = OURS[name], service["build"]["target"]
        assert OTHER_ENGINES[engine] == role
        assert service["image"] == f"heterorl-{engine}:${{HETERORL_VERSION:-local}}"
        changed = {
            word.removeprefix("--set=").split("=")[0] for word in set(words_of(name, "engines")) ^ set(words_of(name))
        }
        computes = "backend" if role == "learner" else "engine"
        own = {"--nproc"} if role == "learner" else set()
        assert changed == {"--config", f"{computes}.device", f"{computes}.compute_dtype", *own}
        (device,) = service["deploy"]["resources"]["reservations"]["devices"]
        assert device["driver"] == "nvidia"
        assert list(service["environment"]) == ["CUDA_VISIBLE_DEVICES"]
    assert "--nproc=${LEARNER_NPROC:-1}" in words_of("learner", "engines")


@pytest.mark.parametrize("overlay", [None, "engines"])
def test_samplers_have_sites_of_their_own(overlay):
    configs = [load(SamplerConfig, None, settings(words_of(name, overlay))) for name in ("sampler-1", "sampler-2")]

    assert {config.site for config in configs} == {"site-1", "site-2"}


def test_stop_waits_for_the_step_or_the_batch_under_way():
    assert BASE["services"]["coordinator"]["stop_grace_period"] == "60s"
    assert {BASE["services"][name]["stop_grace_period"] for name in OURS if name != "coordinator"} == {"15m"}


def test_wan_stands_in_the_network_of_both_ends():
    modes = {service["network_mode"] for service in WAN["services"].values()}

    assert modes == {"service:coordinator", "service:sampler-1", "service:sampler-2"}


def test_every_image_of_ours_is_a_target_and_copies_its_own_packages():
    targets = {
        service["build"]["target"]
        for file in (BASE, ENGINES, WAN)
        for service in file["services"].values()
        if "build" in service
    }
    text = (DEPLOY / "Dockerfile").read_text()

    assert targets == {"coordinator", "learner", "sampler", "wan", *OTHER_ENGINES}
    assert targets <= set(stages())
    # What an engine compiles while it runs needs a compiler; the plain services do without.
    assert stages()["runtime-engine"] == "runtime-rewards"
    # Where rewards are computed, code is run in a sandbox.
    assert stages()["runtime-rewards"] == "runtime"
    for role in (*SCHEMAS, *OTHER_ENGINES):
        plain = "runtime" if role == "coordinator" else "runtime-rewards"
        assert stages()[role] == ("runtime-engine" if role in OTHER_ENGINES else plain)
        assert stages()[f"build-{role}"] == "sources"
        assert f"COPY --from=build-{role} " in text
        assert f"COPY requirements/{role}.txt " in text
    assert "USER 10001:10001" in text
    assert text.startswith("#")
    assert "ARG PYTHON_IMAGE=python:3.11-slim\n" in text


@pytest.mark.process
def test_dockerfile_is_clean():
    check(tool("hadolint"), str(DEPLOY / "Dockerfile"))


def test_build_context_holds_what_the_dockerfile_copies_and_no_more():
    text = (DEPLOY / "Dockerfile").read_text()
    copied = {
        word
        for line in text.splitlines()
        if line.startswith("COPY ") and "--from" not in line
        for word in line.split()[1:-1]
        if not word.startswith("--")
    }
    allowed = {
        line[1:] for line in (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines() if line.startswith("!")
    }

    assert {re.sub(r"^requirements/[a-z-]+\.txt$", "requirements/*.txt", word) for word in copied} == allowed
    assert all(list(DEPLOY.parent.glob(pattern)) for pattern in allowed)


def test_commands_of_the_images_are_in_the_command_line():
    for line in (DEPLOY / "Dockerfile").read_text().splitlines():
        words = json.loads(line.split(" ", 1)[1]) if line.startswith("CMD [") else []
        if words:
            assert CliRunner().invoke(app, [words[0], "--help"]).exit_code == 0
            files = {words[0], *(engine for engine, role in OTHER_ENGINES.items() if role == words[0])}
            assert words[1:] in [["--config", f"/etc/heterorl/{file}.toml", "--log", "json"] for file in files]


@pytest.mark.process
def test_wan_script_asks_tc_for_what_tc_understands(tmp_path):
    """tc reads all arguments before the kernel is asked: where the kernel has no netem, that is what it says."""
    if shutil.which("tc") is None or shutil.which("unshare") is None:
        pytest.skip("tc or unshare is not installed")
    script = (DEPLOY / "wan.sh").read_text().replace("!= lo", "= lo").partition("\n# A rule lives")[0]
    (tmp_path / "wan.sh").write_text(script)
    command = ["unshare", "--map-root-user", "--net", "sh", str(tmp_path / "wan.sh")]

    result = subprocess.run(command, capture_output=True, text=True, check=False)

    assert result.returncode == 0 or "qdisc kind is unknown" in result.stderr, result.stderr
