"""Machines of a learner: torchrun's agents as real processes, on loopback or in another network namespace."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.support.ports import free_port


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


class Network:
    """Machines in network namespaces of their own, and this one, `host`, all at one switch.

    None but `host` reaches what listens on the host's loopback.
    """

    def __init__(self, *, host: Machine, machines: list[Machine], ports: list[str]) -> None:
        self.host = host
        self.machines = machines
        self._ports = ports

    def cut(self, number: int) -> None:
        """Pull the cable of a machine."""
        _ip("link", "set", self._ports[number], "down")

    def part(self) -> None:
        """Keep the machines from each other; all reach the host."""
        for port in self._ports:
            _ip("link", "set", "dev", port, "type", "bridge_slave", "isolated", "on")

    def heal(self) -> None:
        """Undo `cut` and `part`."""
        for port in self._ports:
            _ip("link", "set", "dev", port, "type", "bridge_slave", "isolated", "off")
            _ip("link", "set", port, "up")


@contextlib.contextmanager
def joined_namespaces(count: int) -> Iterator[Network]:
    """So many machines, gone in the end."""
    mark = os.getpid() % 100000
    # Of the process: two may be under way at once.
    prefix, bridge = f"10.219.{mark % 250}", f"hrlb{mark}"
    made: list[list[str]] = []
    machines, ports = [], []
    try:
        _ip("link", "add", bridge, "type", "bridge")
        made.append(["link", "delete", bridge])
        _ip("address", "add", f"{prefix}.254/24", "dev", bridge)
        _ip("link", "set", bridge, "up")
        for number in range(count):
            name, port, address = f"hrl{mark}-{number}", f"hrl{mark}v{number}", f"{prefix}.{number + 1}"
            _ip("netns", "add", name)
            made.append(["netns", "delete", name])
            _ip("link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("link", "set", port, "master", bridge, "up")
            _ip("-n", name, "address", "add", f"{address}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")
            _ip("-n", name, "link", "set", "lo", "up")
            machines.append(Machine(prefix=("ip", "netns", "exec", name), address=address, interface="eth0"))
            ports.append(port)
        yield Network(host=Machine(address=f"{prefix}.254", interface=bridge), machines=machines, ports=ports)
    finally:
        for words in reversed(made):
            subprocess.run(["ip", *words], check=False, capture_output=True)


@contextlib.contextmanager
def joined_namespace() -> Iterator[tuple[Machine, Machine]]:
    """This machine, and a second one, which cannot reach what listens on the first one's loopback."""
    with joined_namespaces(1) as network:
        yield network.host, network.machines[0]


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


class Agents:
    """`torchrun --nnodes N`, an agent for each machine; rank 0 is on the first."""

    def __init__(
        self, machines: list[Machine], config: Path, *, log: Path, max_restarts: int, num_processes: int = 1
    ) -> None:
        port = free_port()
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


class Job:
    """One start of a learner on some machines, a rank each, which nothing starts again; it knows all its processes."""

    def __init__(self, machines: list[Machine], config: Path, *, log: Path) -> None:
        self.log = log
        self._agents = Agents(machines, config, log=log, max_restarts=0)
        self._ranks: dict[int, list[psutil.Process]] = {}
        self._all: dict[int, list[psutil.Process]] = {}

    def is_whole(self) -> bool:
        """Whether every agent runs."""
        return all(agent.poll() is None for agent in self._agents.agents)

    def note_ranks(self) -> None:
        """Remember the ranks and what they have started, as a killed agent leaves them behind."""
        for number, agent in enumerate(self._agents.agents):
            # Of one that has ended there are none any more.
            if agent.poll() is None:
                process = psutil.Process(agent.pid)
                self._ranks[number] = process.children()
                self._all[number] = process.children(recursive=True)

    def hit(self, machine: int, kind: str) -> None:
        """SIGKILL to the `rank`, the `agent` or all processes (`machine`); SIGSTOP to the rank (`stopped`)."""
        if kind in ("agent", "machine"):
            self._agents.agents[machine].kill()
        if kind == "machine":
            _signal(self._all[machine], signal.SIGKILL)
        if kind in ("rank", "stopped"):
            _signal(self._ranks[machine], signal.SIGSTOP if kind == "stopped" else signal.SIGKILL)

    def end_in_order(self) -> None:
        """SIGTERM to the agent of rank 0, as an operator would."""
        self.note_ranks()
        self._agents.agents[0].terminate()

    async def ended(self, *, timeout_s: float, but_agents: bool = False) -> bool:
        """Wait until no process runs; `but_agents`: none of the learner's own."""
        deadline = time.monotonic() + timeout_s
        while not self._is_over(but_agents=but_agents):
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(0.05)
        return True

    def close(self) -> None:
        """End what is left, as a scheduler does with the processes of a job."""
        self.note_ranks()
        for processes in self._all.values():
            _signal(processes, signal.SIGKILL)
        self._agents.close()

    def _is_over(self, *, but_agents: bool) -> bool:
        if not but_agents and any(agent.poll() is None for agent in self._agents.agents):
            return False
        return all(_state(process) == "" for processes in self._all.values() for process in processes)


def _signal(processes: list[psutil.Process], number: int) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def _state(process: psutil.Process) -> str:
    """Empty for one that has ended."""
    try:
        state = str(process.status()) if process.is_running() else ""
    except psutil.NoSuchProcess:
        return ""
    return "" if state == psutil.STATUS_ZOMBIE else state
