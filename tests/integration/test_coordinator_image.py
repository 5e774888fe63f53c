"""The coordinator's image without a container engine: its own commands build an environment, and that one serves."""

import contextlib
import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.support.certificates import Certificates, paths
from tests.support.limits import WAIT_S

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "deploy" / "Dockerfile").read_text()
STAGES = ["sources", "build-coordinator"]


def instructions(stage):
    """(keyword, rest) of each instruction of a stage; continued lines are joined."""
    text = re.split(rf"^FROM \S+ AS {stage}\n", DOCKERFILE, flags=re.MULTILINE)[1].split("\nFROM ")[0]
    joined = re.sub(r"\\\n\s*", "", text)
    return [tuple(line.split(" ", 1)) for line in joined.splitlines() if line and not line.startswith("#")]


def build(directory):
    """Carry out COPY and RUN with every absolute path moved under `directory`; returns the environment."""
    source = directory / "src"
    source.mkdir()

    def moved(text):
        return re.sub(r"(?<![\w.*])/(opt|wheels|requirements\.txt)", rf"{directory}/\1", text)

    for stage in STAGES:
        for keyword, rest in instructions(stage):
            if keyword == "COPY":
                *names, target = rest.split()
                for name in names:
                    where = Path(moved(target)) if target.startswith("/") else source / target
                    if (ROOT / name).is_dir():
                        shutil.copytree(ROOT / name, where, ignore=shutil.ignore_patterns("__pycache__"))
                    else:
                        shutil.copy(ROOT / name, where)
            elif keyword == "RUN":
                subprocess.run(["sh", "-euc", moved(rest)], cwd=source, check=True, capture_output=True)
            else:
                assert keyword in {"ENV", "WORKDIR", "ARG"}, keyword
    return directory / "opt" / "heterorl"


@pytest.mark.slow
@pytest.mark.image
@pytest.mark.timeout(900)
def test_environment_of_the_image_serves_answers_health_and_stops(tmp_path, monkeypatch):
    monkeypatch.delenv("PYTHONPATH", raising=False)
    environment = build(tmp_path)
    program = str(environment / "bin" / "heterorl")
    service = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text())["services"]["coordinator"]
    # What the compose file mounts, where it can be written.
    config = shutil.copytree(ROOT / "deploy" / "config", tmp_path / "config")
    node = Certificates(tmp_path / "certs", run="my-run").node("coordinator", "main")
    data = tmp_path / "data"

    def moved(words):
        return [re.sub("^/tls(?=/|$)", str(node), word.replace("/etc/heterorl", str(config))) for word in words]

    tls = [f"--set=tls.{key}={path}" for key, path in paths(node).items()]
    own = [f"--set=data_dir={data}", "--set=listen=127.0.0.1:0", "--set=metrics_port=0", *tls]
    own.append(f"--set=tls.revoked={config / 'revoked'}")
    keyword, _, asked, _, *files = service["healthcheck"]["test"]
    assert (keyword, asked) == ("CMD", "health")

    with (tmp_path / "log").open("wb") as log:
        served = subprocess.Popen([program, *moved(service["command"]), *own], stdout=log, stderr=log, cwd=tmp_path)
        try:
            while not (data / "address").exists():
                assert served.poll() is None, (tmp_path / "log").read_text()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    served.wait(0.1)
            address = (data / "address").read_text().strip()
            health = [program, "health", address, *moved(files)]
            up = subprocess.run(health, capture_output=True, text=True, check=False, cwd=tmp_path)
            served.send_signal(signal.SIGTERM)
            code = served.wait(WAIT_S)
        finally:
            served.kill()
            served.wait()
    down = subprocess.run(health, capture_output=True, text=True, check=False, cwd=tmp_path)

    assert (up.returncode, "SERVING" in up.stdout) == (0, True), up.stderr
    assert code == 0, (tmp_path / "log").read_text()
    assert (down.returncode, "start the coordinator" in down.stderr) == (1, True), down.stderr
    assert not list(environment.glob("lib/python*/site-packages/torch*"))
