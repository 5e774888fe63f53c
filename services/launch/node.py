"""One node of a run, as every launcher needs it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Kind = Literal["coordinator", "learner", "sampler", "relay"]
STATE_KEY: dict[Kind, str] = {
    "coordinator": "data_dir", "learner": "state_dir", "sampler": "state_dir", "relay": "cache_dir",
}  # fmt: skip
"""The key of each service that names its directory of state."""
CPUS: dict[Kind, int] = {"coordinator": 2, "relay": 2, "learner": 8, "sampler": 4}
"""Cores that a job or a pod asks for."""
SHARED_MEMORY_GIB = 8
"""Of a container with GPUs, whose processes exchange tensors there. Its pages count against the container's limit."""
_OWN_MEMORY = {"coordinator": "4g", "relay": "4g"}
"""Their memory does not grow with the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One process, or the processes of one learner.

    Example:
        Node(name="sampler-eu-1", kind="sampler", site="eu.1", host="eu.example", config={...}, needs=("relay-eu",))
    """

    name: str
    """Unique in the run; letters, digits and dashes."""
    kind: Kind
    site: str
    """Of its certificate."""
    host: str
    """Empty: wherever there is room."""
    image: str
    """Target of the Dockerfile: `sampler-vllm` beside `sampler`."""
    config: dict[str, Any]
    """Its TOML file but for what the launcher decides: state directory and certificates."""
    stated: Mapping[str, str] = field(default_factory=dict)
    """Where run.toml says keys of `config` that have another name there."""
    arguments: tuple[str, ...] = ()
    """Of the command line, after the configuration."""
    needs: tuple[str, ...] = ()
    """Names of nodes that start before it. A node waits for them by itself: the order saves attempts, no more."""
    port: int = 0
    """That it serves on; 0 serves nothing."""
    dialled: tuple[str, ...] = ()
    """Names that its certificate has to hold."""
    devices: tuple[int, ...] = ()
    """GPUs of its host."""
    num_gpus: int = 0
    """GPUs of each of its machines."""
    machines: tuple[str, ...] = ()
    """Hosts of a learner on several machines, rank 0's first; empty names where the launcher chooses."""
    nproc: int = 1
    """Processes of each machine."""
    memory: str = ""
    """Limit of what its processes on a machine hold, such as 200g; empty is none."""
    data_dirs: tuple[str, ...] = field(default=())
    """Directories that it reads."""

    @property
    def command(self) -> tuple[str, ...]:
        """The program's arguments but for the configuration file."""
        return (self.kind, *self.arguments)


def complete(node: Node, *, state_dir: str, tls_dir: str, revoked: str = "", insecure: bool = False) -> dict[str, Any]:
    """The whole configuration of a node whose state and certificates lie in these directories."""
    tls: dict[str, Any] = {"insecure": True}
    if not insecure:
        tls = {"ca": f"{tls_dir}/ca.crt", "cert": f"{tls_dir}/node.crt", "key": f"{tls_dir}/node.key"}
        if node.port:
            tls["revoked"] = revoked or f"{tls_dir}/revoked"
    key = STATE_KEY[node.kind]
    return {key: node.config.get(key) or state_dir, **without(node.config, key), "tls": tls}


def memory_limit(node: Node, *, is_container: bool = False) -> str:
    """The limit of a node's memory on one machine, shared memory included, such as 208g; empty for none."""
    memory = node.memory or (_OWN_MEMORY.get(node.kind, "") if is_container else "")
    if not memory or not node.num_gpus:
        return memory
    number, unit = int(memory[:-1]), memory[-1]
    return f"{number + SHARED_MEMORY_GIB * (1 if unit == 'g' else 1024)}{unit}"


def without(table: dict[str, Any], key: str) -> dict[str, Any]:
    """A table but for one key."""
    return {name: value for name, value in table.items() if name != key}


def renumbered(node: Node) -> dict[str, Any]:
    """The configuration where a node sees its own GPUs alone, as 0, 1 and so on."""
    if node.kind != "sampler" or not node.devices:
        return node.config
    return node.config | {"engine": {**node.config["engine"], "devices": list(range(len(node.devices)))}}
