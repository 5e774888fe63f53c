"""The units are well-formed, confined, and say what the services do with signals, exit codes and directories."""

import itertools
import re
import shlex
import shutil
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from heterorl.cli.main import app
from heterorl.coordinator.coordinator_config import CoordinatorConfig
from heterorl.relay.relay_config import RelayConfig
from tests.support.tools import check, tool

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "services" / "launch" / "units"
# That of a learner on several machines has no notify socket: test_launchers has its rules.
UNITS = sorted(path for path in FOLDER.glob("*.service") if "learner-node" not in path.name)
ROLES = {
    "heterorl-coordinator": "coordinator",
    "heterorl-learner@": "learner",
    "heterorl-sampler@": "sampler",
    "heterorl-relay@": "relay",
}
MAX_EXPOSURE = 2.0
PROGRAM = "/opt/heterorl/current/bin/heterorl"


def directives(path):
    """Section.key to its values in order; an empty value of a list is kept, since it means none."""
    found, section = {}, ""
    for line in path.read_text().splitlines():
        if line.startswith("["):
            section = line.strip("[]")
        elif line and not line.startswith(("#", ";")):
            key, separator, value = line.partition("=")
            assert separator, f"{path.name}: {line}"
            found.setdefault(f"{section}.{key}", []).append(value)
    return found


def test_all_services_of_a_machine_have_the_user_that_the_page_names():
    users = {user for path in FOLDER.glob("*.service") for user in directives(path)["Service.User"]}

    assert users == {"heterorl"}
    assert "share user `heterorl`" in " ".join((ROOT / "docs" / "security.md").read_text().split())


def seconds(text):
    number, unit = re.fullmatch(r"(\d+)(s|min)", text).groups()
    return int(number) * {"s": 1, "min": 60}[unit]


def exposure(path):
    said = check(tool("systemd-analyze"), "security", "--offline=true", "--no-pager", str(path))
    return float(re.search(r"Overall exposure level for \S+: ([0-9.]+)", said)[1])


def complaints(path, directory):
    """What systemd says of a unit whose program exists; settings that it does not know, too."""
    copy = directory / path.name
    copy.write_text(path.read_text().replace(PROGRAM, "/bin/true"))
    return check(tool("systemd-analyze"), "verify", "--man=no", str(copy))


def test_there_is_a_unit_for_each_role():
    assert {path.stem for path in UNITS} == set(ROLES)


@pytest.mark.process
@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_systemd_accepts_the_unit_without_a_word(path, tmp_path):
    assert complaints(path, tmp_path) == ""


@pytest.mark.process
def test_systemd_would_complain_of_a_wrong_unit(tmp_path):
    wrong = tmp_path / "heterorl-coordinator.service"
    wrong.write_text(UNITS[0].read_text().replace("TimeoutStopSec=60s", "TimeoutStopSek=60s"))
    (tmp_path / "copy").mkdir()

    assert "TimeoutStopSek" in complaints(wrong, tmp_path / "copy")


@pytest.mark.process
@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_exposure_is_small(path):
    assert exposure(path) <= MAX_EXPOSURE


@pytest.mark.process
def test_exposure_of_an_open_unit_is_not_small(tmp_path):
    opened = tmp_path / UNITS[0].name
    opened.write_text("\n".join(line for line in UNITS[0].read_text().splitlines() if "Protect" not in line))

    assert exposure(opened) > MAX_EXPOSURE


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_unit_says_what_the_service_does(path):
    found = directives(path)
    one = {key: values[-1] for key, values in found.items()}

    assert one["Service.Type"] == "notify"
    assert seconds(one["Service.WatchdogSec"]) >= 30
    assert one["Service.Restart"] == "on-failure"
    assert one["Service.RestartPreventExitStatus"] == "2"
    # SIGTERM is for the service alone: a verifier's process that it started is part of the batch under way.
    assert one["Service.KillMode"] == "mixed"
    assert one["Service.User"] == "heterorl"
    assert one["Service.NoNewPrivileges"] == "yes"
    assert one["Service.CapabilityBoundingSet"] == ""
    assert one["Service.ProtectSystem"] == "strict"
    assert one["Service.LoadCredential"].startswith("tls:/etc/heterorl/credentials/")
    assert "PYTHONFAULTHANDLER=1" in " ".join(found["Service.Environment"])


def test_services_are_started_again_as_often_as_the_pages_say():
    page, machines = (" ".join((ROOT / "docs" / name).read_text().split()) for name in ("operate.md", "machines.md"))
    assert "start it again without limit" in page
    assert "starts wrong configurations again too, without limit" in machines
    assert "systemd leaves it stopped; Docker starts it again" in page
    services = {path.stem: directives(path)["Unit.StartLimitIntervalSec"] for path in FOLDER.glob("*.service")}
    assert services.keys() == {*ROLES, "heterorl-learner-node@"}
    # An outage of a server that a service needs at its start lasts longer than any number of starts.
    assert set(map(tuple, services.values())) == {("0",)}
    # torchrun's agent does not say what its processes ended with.
    node = directives(FOLDER / "heterorl-learner-node@.service")
    assert "Service.RestartPreventExitStatus" not in node
    containers = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text())["services"]
    ours = {name: each["restart"] for name, each in containers.items() if each["restart"] != "unless-stopped"}
    assert ours.keys() == {"coordinator", "learner", "sampler-1", "sampler-2"}
    assert set(ours.values()) == {"on-failure"}
    rendered = ROOT / "services" / "launch" / "templates" / "compose"
    said = [line for path in rendered.iterdir() for line in re.findall(r"restart: (.*)", path.read_text())]
    assert set(said) == {"on-failure"}


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.service")), ids=lambda path: path.name)
def test_a_worker_that_the_kernel_ends_for_its_memory_does_not_end_the_service(path):
    """Workers have a higher score, so the kernel chooses them; systemd must not stop the service for it."""
    found = directives(path)

    assert found["Service.OOMPolicy"] == ["continue"]
    # A service that is chosen itself starts again.
    assert found["Service.Restart"] == ["on-failure"]


def test_stop_takes_longer_than_what_it_waits_for():
    timeouts = {path.stem: seconds(directives(path)["Service.TimeoutStopSec"][0]) for path in UNITS}

    assert timeouts.pop("heterorl-coordinator") > CoordinatorConfig().stop_grace_s
    assert timeouts.pop("heterorl-relay@") > RelayConfig().stop_grace_s
    # A batch or a step of long completions takes minutes.
    assert min(timeouts.values()) >= 600


@pytest.mark.parametrize(
    "path", [path for path in UNITS if ROLES[path.stem] not in ("coordinator", "relay")], ids=lambda path: path.name
)
def test_whatever_is_compiled_at_run_time_goes_where_the_service_may_write(path):
    found = directives(path)
    variables = dict(pair.split("=", 1) for line in found["Service.Environment"] for pair in line.split())
    caches = {"HF_HOME", "TRITON_CACHE_DIR", "CUDA_CACHE_PATH", "TORCHINDUCTOR_CACHE_DIR", "XDG_CACHE_HOME"}
    if "sampler" in path.name:
        caches |= {"VLLM_CACHE_ROOT", "FLASHINFER_WORKSPACE_BASE", "XDG_CONFIG_HOME"}

    assert {variables[name].partition("/%i")[0] for name in caches} == {"/var/cache/heterorl"}
    assert found["Service.CacheDirectory"] == ["heterorl/%i"]
    # GPUs and nothing else of the machine's devices.
    assert found["Service.DevicePolicy"] == ["closed"]
    assert found["Service.DeviceAllow"] == ["char-nvidia* rw"]


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_command_of_the_unit_is_one_that_the_service_accepts(path, tmp_path):
    role = ROLES[path.stem]
    name = "coordinator" if role == "coordinator" else "some-name"
    found = directives(path)
    start = found["Service.ExecStart"][0].replace("%i", name).replace("%d", "/run/credentials/unit")
    program, command, *arguments = shlex.split(start)
    config = tmp_path / f"{name}.toml"
    shutil.copy(ROOT / "deploy" / "config" / f"{role}.toml", config)
    arguments = [argument.replace("/etc/heterorl", str(tmp_path)) for argument in arguments]
    assert (program, command) == (PROGRAM, role)
    options = dict(itertools.pairwise(arguments))
    assert options["--log"] == "json"
    # One process unless the instance's file of variables says more.
    assert options.get("--nproc") == ("${HETERORL_NPROC}" if role == "learner" else None)
    if role == "learner":
        assert "HETERORL_NPROC=1" in found["Service.Environment"]
    name_of_unit = "coordinator" if role == "coordinator" else "%i"
    assert found["Service.EnvironmentFile"] == [f"-/etc/heterorl/{name_of_unit}.env"]
    first = arguments.index("--set")

    result = CliRunner().invoke(app, ["check-config", role, "--keys-only", *arguments[:2], *arguments[first:]])

    assert result.exit_code == 0, result.exception
    state = "/var/lib/" + found["Service.StateDirectory"][0].replace("%i", name)
    assert arguments[-1].split("=")[1] == state
    assert found["Service.WorkingDirectory"][0].replace("%i", name) == state
    # What `heterorl certs issue` writes, under the names that LoadCredential gives to files of a directory.
    files = {f"tls.{key}=/run/credentials/unit/tls_{file}" for key, file in
             {"ca": "ca.crt", "cert": "node.crt", "key": "node.key"}.items()}  # fmt: skip
    assert files <= set(arguments)
