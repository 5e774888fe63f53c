"""Build the images, start deploy/compose.yaml in a real Docker as deploy/README.md says, and time each step.

    python -m campaigns.compose_run --base DIR [--index URL | --wheels DIR] --json benchmarks/results/compose.json

It starts its own Docker daemon in its own directory, with the Compose of `make programs`. It asks no registry: the base
image is a Debian 12 by debootstrap with Python 3.11; Prometheus and Alertmanager are Debian's packages under the
images' names; Grafana is left out. The commands come from the sections "Certificates" and "Containers"; model and
numbers are small. Then it kills the learner, slows the links with --wan, and stops everything. It needs root, docker.io
and debootstrap; --wheels is a directory with torch for the CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import tempfile
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

from rich.console import Console

from campaigns.debian import Steps, block, make_base, until
from campaigns.docker import Docker, index_of, run
from heterorl.common.generation.tiny_model import write_tiny_model

ROOT = Path(__file__).parents[1]
BIN = ROOT / ".venv" / "bin"
PYTHON_IMAGE = "python:3.11-slim"
RUN = ("coordinator", "learner", "sampler-1", "sampler-2")
OBSERVERS = ("prometheus", "alertmanager")
VERSIONS = 2
# The numbers of a small run in place of those that deploy/config has for a large one.
SMALL = {
    "coordinator.toml": {"groups_per_version = 32": "groups_per_version = 4"},
    "learner.toml": {
        "groups_per_step = 32": "groups_per_step = 4", "max_steps = 1000": "max_steps = 100000",
        "max_new_tokens = 2048": "max_new_tokens = 3", "lr = 1e-6": "lr = 1e-4\nthreads = 1",
    },
    "sampler.toml": {"max_new_tokens = 2048": "max_new_tokens = 3", 'kind = "hf"': 'kind = "hf"\nthreads = 1'},
}  # fmt: skip


def make_images(docker: Docker, base: Path, directory: Path) -> None:
    (directory / "usr" / "bin").mkdir(parents=True)
    (directory / "usr" / "bin" / "python").symlink_to("python3")
    (directory / "etc" / "ssl" / "certs").mkdir(parents=True)
    # The images trust the same certificate authorities as this machine, such as a proxy's.
    shutil.copy("/etc/ssl/certs/ca-certificates.crt", directory / "etc" / "ssl" / "certs")
    bundle = "etc/ssl/certs/ca-certificates.crt"
    files = ["--exclude=./var/lib/apt/lists/*", f"--exclude=./{bundle}", "-C", str(base), "."]
    files += ["-C", str(directory), "usr/bin/python", bundle]
    with subprocess.Popen(["tar", "-c", *files], stdout=subprocess.PIPE) as tar:
        subprocess.run(
            ["docker", "import", "-", PYTHON_IMAGE], stdin=tar.stdout, env=docker.environment, check=True,
            stdout=subprocess.DEVNULL,
        )  # fmt: skip
    services = json.loads(compose(docker, "config", "--format", "json", "prometheus", "alertmanager"))["services"]
    for name, package in zip(OBSERVERS, ("prometheus", "prometheus-alertmanager"), strict=True):
        words = (
            f"FROM {PYTHON_IMAGE}\nRUN apt-get update -qq && apt-get install -qq -y --no-install-recommends wget {package}"
            f" && install -d -o nobody -g nogroup /{name}\n"
            f'USER nobody\nVOLUME ["/{name}"]\nENTRYPOINT ["/usr/bin/{package}"]\n'
        )
        docker.tell("build", "--network=host", "-t", services[name]["image"], "-", text=words)


def compose(docker: Docker, *words: str) -> str:
    """Run deploy/compose.sh of the copy."""
    deploy = Path(docker.environment["HETERORL_CONFIG_DIR"]).parent
    return run(["bash", str(deploy / "compose.sh"), *words], environment=docker.environment)


def lay_out(docker: Docker, sources: Path) -> None:
    """Make certificates, secrets, configuration, model and data as the README says."""
    readme = (sources / "deploy" / "README.md").read_text()
    environment = {**docker.environment, "PATH": f"{BIN}:{os.environ['PATH']}"}
    for line in block(readme, "Certificates").splitlines():
        words = line.partition("#")[0].replace("coordinator.example:50051", "127.0.0.1:50051")
        run(["bash", "-c", words.replace("coordinator.example", "coordinator")], environment=environment, where=sources)
    *before, readable = (line.partition("#")[0] for line in block(readme, "Containers").splitlines()[:3])
    for words in before:
        run(["bash", "-euc", words.removeprefix("sudo ")], environment=environment, where=sources)
    write_tiny_model(sources / "deploy" / "models" / "start", seed=0)
    pairs = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(10) for b in range(10)]
    (sources / "deploy" / "data" / "train.jsonl").write_text("".join(f"{json.dumps(pair)}\n" for pair in pairs))
    run(["bash", "-euc", readable], environment=environment, where=sources)
    for name, changes in SMALL.items():
        path = sources / "deploy" / "config" / name
        text = path.read_text()
        for before, after in changes.items():
            assert text.count(before) == 1, (name, before)
            text = text.replace(before, after)
        path.write_text(text)
    (sources / "deploy" / "config" / "revoked").touch()


def status(docker: Docker, sources: Path) -> dict[str, Any] | None:
    """Output of `heterorl status --json` on the published port; None without an answer."""
    done = subprocess.run(
        [str(BIN / "heterorl"), "status", "--json", "--credentials", str(sources / "certs" / "operator-me")],
        env=docker.environment, capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    return json.loads(done.stdout) if done.returncode == 0 else None


def scraped(query: str) -> list[dict[str, Any]]:
    """Prometheus's answer on its published port."""
    url = f"http://127.0.0.1:9090/api/v1/query?query={urllib.parse.quote(query)}"
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            found: list[dict[str, Any]] = json.load(answer)["data"]["result"]
            return found
    except OSError:
        return []


def slow_lines(docker: Docker, steps: Steps) -> tuple[str, ...]:
    """Start the run with compose.wan.yaml; returns the arguments that name both files."""
    docker.environment["WAN_DELAY"] = "200ms"
    lines = ("-f", "compose.yaml", "-f", "compose.wan.yaml")
    services = ("wan-coordinator", "wan-sampler-1", "wan-sampler-2")
    with steps.step("compose.wan.yaml: build, and lines of 200 and 250 ms"):
        compose(docker, *lines, "build", *services)
        compose(docker, *lines, "up", "--detach", "--no-build", *RUN, *services)
        slow = docker.tell("ps", "--quiet", "--filter", "label=com.docker.compose.service=wan-coordinator").strip()
        until(lambda: "delay 200" in docker.ask("exec", slow, "tc", "qdisc").stdout)
    return lines


def live(docker: Docker, sources: Path, steps: Steps, *, wan: bool) -> dict[str, Any]:
    """Start, wait for versions, kill the learner, wait again; with `wan` also over slow links; stop in order."""

    def head() -> int:
        found = status(docker, sources)
        return -1 if found is None or found["head_version"] is None else int(found["head_version"])

    def more() -> None:
        wanted = max(head(), 0) + VERSIONS
        until(lambda: head() >= wanted)

    with steps.step("compose.sh up -d, until all are started"):
        compose(docker, "up", "--detach", "--no-build", *RUN, *OBSERVERS)
    with steps.step(f"until version {VERSIONS}"):
        until(lambda: head() >= VERSIONS)
    with steps.step("until Prometheus has numbers of coordinator, learner and both samplers"):
        until(lambda: len(scraped('count by (service, site) ({service=~"coordinator|learner|sampler"})')) >= len(RUN))
    learner = docker.tell("ps", "--quiet", "--filter", "label=com.docker.compose.service=learner").strip()
    os.kill(int(docker.tell("inspect", "--format", "{{.State.Pid}}", learner)), signal.SIGKILL)
    with steps.step(f"SIGKILL of the learner, until {VERSIONS} versions more"):
        more()
    restarts = int(docker.tell("inspect", "--format", "{{.RestartCount}}", learner))
    assert restarts == 1, restarts
    lines = slow_lines(docker, steps) if wan else ()
    if lines:
        with steps.step(f"until {VERSIONS} versions more over them"):
            more()
    found = status(docker, sources)
    assert found is not None
    with steps.step("compose.sh stop: all in order"):
        compose(docker, *lines, "stop", "learner", "sampler-1", "sampler-2")
        compose(docker, *lines, "stop")
    codes = {
        service: docker.tell("inspect", "--format", "{{.State.ExitCode}}", container).strip()
        for service in RUN
        for container in docker.tell(
            "ps", "--all", "--quiet", "--filter", f"label=com.docker.compose.service={service}"
        ).split()
    }
    assert set(codes.values()) == {"0"}, codes
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, required=True, help="a Debian by debootstrap; made when it is not there")
    parser.add_argument("--mirror", default="http://deb.debian.org/debian")
    parser.add_argument("--wheels", type=Path, help="a directory with torch for the CPU")
    parser.add_argument("--index", default="https://download.pytorch.org/whl/cpu", help="else an index with it")
    parser.add_argument("--wan", action="store_true", help="slow lines too; the kernel needs sch_netem")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    console = Console(markup=False)
    make_base(options.base, options.mirror)
    steps = Steps(console)
    with tempfile.TemporaryDirectory(prefix="heterorl-compose-") as name:
        directory = Path(name)
        sources = directory / "heterorl"
        docker = Docker(directory)
        docker.environment["HETERORL_CONFIG_DIR"] = str(sources / "deploy" / "config")
        try:
            run(["git", "clone", "-q", f"file://{ROOT}", str(sources)], environment=docker.environment)
            lay_out(docker, sources)
            make_images(docker, options.base, directory / "python")
            with index_of(options.wheels, directory / "index", options.index) as index:
                (sources / "deploy" / "compose.index.yaml").write_text(
                    json.dumps({"services": {role: {"build": {"network": "host"}} for role in RUN}})
                )
                words = ("-f", "compose.yaml", "-f", "compose.index.yaml", "build")
                for role in RUN[:3]:
                    with steps.step(f"compose.sh build {role}"):
                        compose(docker, *words, "--build-arg", f"PIP_EXTRA_INDEX_URL={index}", role)
            sizes = docker.tell("images", "--format", "{{.Repository}} {{.Size}}")
            found = live(docker, sources, steps, wan=options.wan)
            steps.show()
            images = dict(line.split(" ", 1) for line in sizes.splitlines() if line.startswith("heterorl-"))
            results = {
                "rows": steps.rows, "images": images, "versions": found["head_version"], "ledger": found["ledger"],
            }  # fmt: skip
            if options.json:
                options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="ascii")
        except (RuntimeError, TimeoutError, AssertionError):
            for role in RUN:
                console.print(role, docker.ask("compose", "-p", "heterorl", "logs", "--tail", "20", role).stdout)
            raise
        finally:
            docker.stop()


if __name__ == "__main__":
    main()
