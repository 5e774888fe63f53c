"""Machines of a learner: torchrun's agents as real processes, on loopback or in another network namespace."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Where an agent runs: words before its command, and the address that others reach it at."""

    prefix: tuple[str, ...] = ()
    address: str = "127.0.0.1"
    interface: str = "lo"


def can_make_namespaces() -> bool:
    if shutil.which("ip") is None or os.geteuid() != 0:
        return False
    name = f"hrl-try-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode == 0
    if made:
        subprocess.run(["ip", "netns", "delete", name], check=True)
    return made


@contextlib.contextmanager
def joined_namespace() -> Iterator[tuple[Machine, Machine]]:
    """This machine, and a second one behind a bridge, which cannot reach what listens on the first one's loopback."""
    mark = f"{os.getpid() % 100000}"
    bridge, name, outer = f"hrlb{mark}", f"hrl{mark}", f"hrlv{mark}"
    made: list[list[str]] = []

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)

    try:
        ip("link", "add", bridge, "type", "bridge")
        made.append(["link", "delete", bridge])
        ip("address", "add", "10.219.7.1/24", "dev", bridge)
        ip("link", "set", bridge, "up")
        ip("netns", "add", name)
        made.append(["netns", "delete", name])
        ip("link", "add", outer, "type", "veth", "peer", "name", "eth0", "netns", name)
        ip("link", "set", outer, "master", bridge, "up")
        ip("-n", name, "address", "add", "10.219.7.2/24", "dev", "eth0")
        ip("-n", name, "link", "set", "eth0", "up")
        ip("-n", name, "link", "set", "lo", "up")
        second = Machine(prefix=("ip", "netns", "exec", name), address="10.219.7.2", interface="eth0")
        yield Machine(address="10.219.7.1", interface=bridge), second
    finally:
        for words in reversed(made):
            subprocess.run(["ip", *words], check=False, capture_output=True)


class Agents:
    """`torchrun --nnodes N`, an agent for each machine; rank 0 is on the first."""

    def __init__(
        self, machines: list[Machine], config: Path, *, log: Path, max_restarts: int, num_processes: int = 1
    ) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        self.log = log
        self.agents: list[subprocess.Popen[bytes]] = []
        for rank, machine in enumerate(machines):
            command = [
                *machine.prefix, sys.executable, "-m", "torch.distributed.run",
                "--nnodes", str(len(machines)), "--node-rank", str(rank), "--nproc-per-node", str(num_processes),
                "--master-addr", machines[0].address, "--master-port", str(port),
                "--max-restarts", str(max_restarts), "--monitor-interval", "0.2",
                # Of the others nobody needs the file.
                "-m", "heterorl", "learner", "--config", str(config if rank == 0 else config.with_name("no-such.toml")),
            ]  # fmt: skip
            environment = os.environ | {"GLOO_SOCKET_IFNAME": machine.interface, "OMP_NUM_THREADS": "1"}
            with log.open("ab") as file:
                self.agents.append(subprocess.Popen(command, stdout=file, stderr=file, env=environment))

    def ranks(self, number: int) -> list[int]:
        """Process ids of the learner's processes of one machine."""
        children = psutil.Process(self.agents[number].pid).children(recursive=True)
        return [child.pid for child in children if "heterorl" in child.cmdline() and "learner" in child.cmdline()]

    def close(self) -> None:
        for agent in self.agents:
            with contextlib.suppress(psutil.NoSuchProcess):
                for child in psutil.Process(agent.pid).children(recursive=True):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        child.send_signal(signal.SIGKILL)
            agent.kill()
            agent.wait()
