"""The nodes of a run.toml, each with its checked configuration.

Pure: equal runs give equal nodes in order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from heterorl.common.errors import ConfigError, OperatorError
from heterorl.common.process.address import is_loopback
from heterorl.launch.run_file import RelayTable, RunFile, SamplerTable

Kind = Literal["coordinator", "learner", "sampler", "relay"]
STATE_KEY: dict[Kind, str] = {
    "coordinator": "data_dir", "learner": "state_dir", "sampler": "state_dir", "relay": "cache_dir",
}  # fmt: skip
"""Each service's key for its directory of state."""
CPUS: dict[Kind, int] = {"coordinator": 2, "relay": 2, "learner": 8, "sampler": 4}
"""Cores that a job or a pod requests."""
SHARED_MEMORY_GIB = 8
"""Shared memory of a container with GPUs, for tensors between its processes. It counts against the container's limit.
"""
_OWN_MEMORY = {"coordinator": "4g", "relay": "4g"}
"""Their memory does not grow with the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One process, or the processes of one learner."""

    name: str
    """Unique in the run: letters, digits, dashes."""
    kind: Kind
    site: str
    """Site in its certificate."""
    host: str
    """Empty: any host."""
    image: str
    """Target of the Dockerfile, such as `sampler` or `sampler-vllm`."""
    config: dict[str, Any]
    """Its TOML file without the launcher's part: state directory and certificates."""
    stated: Mapping[str, str] = field(default_factory=dict)
    """Keys of `config` that have another name in run.toml, and that name."""
    arguments: tuple[str, ...] = ()
    """Command-line arguments after the configuration."""
    needs: tuple[str, ...] = ()
    """Names of nodes that start before it. A node waits for them by itself, so the order only saves retries."""
    port: int = 0
    """Port it serves; 0: it has no server."""
    dialled: tuple[str, ...] = ()
    """Names that its certificate must hold."""
    devices: tuple[int, ...] = ()
    """GPUs of its host."""
    num_gpus: int = 0
    """GPUs of each of its machines."""
    machines: tuple[str, ...] = ()
    """Hosts of a learner on several machines, rank 0's first; empty names if the launcher chooses."""
    nproc: int = 1
    """Processes of each machine."""
    memory: str = ""
    """Memory limit of its processes on one machine, such as 200g; empty is none."""
    data_dirs: tuple[str, ...] = field(default=())
    """Directories that it reads."""

    @property
    def directory(self) -> str:
        """Its directory of state that run.toml names; empty: the launcher chooses."""
        return str(self.config.get(STATE_KEY[self.kind]) or "")

    @property
    def written(self) -> dict[str, str]:
        """Directories that it writes and run.toml names, by key."""
        keys = (STATE_KEY[self.kind], "backup_dir")
        return {key: str(self.config[key]) for key in keys if self.config.get(key)}

    @property
    def command(self) -> tuple[str, ...]:
        return (self.kind, *self.arguments)


def complete(node: Node, *, state_dir: str, tls_dir: str, revoked: str = "", insecure: bool = False) -> dict[str, Any]:
    """The whole configuration of a node, with its state and certificate directories."""
    tls: dict[str, Any] = {"insecure": True}
    if not insecure:
        tls = {"ca": f"{tls_dir}/ca.crt", "cert": f"{tls_dir}/node.crt", "key": f"{tls_dir}/node.key"}
        if node.port:
            tls["revoked"] = revoked or f"{tls_dir}/revoked"
    key = STATE_KEY[node.kind]
    # The place of the state comes first.
    return {key: None} | node.config | {key: node.directory or state_dir, "tls": tls}


def memory_limit(node: Node, *, is_container: bool = False) -> str:
    """Memory limit of a node's processes on one machine, such as 208g.
    It includes shared memory; empty is none."""
    memory = node.memory or (_OWN_MEMORY.get(node.kind, "") if is_container else "")
    if not memory or not node.num_gpus:
        return memory
    number, unit = int(memory[:-1]), memory[-1]
    return f"{number + SHARED_MEMORY_GIB * (1 if unit == 'g' else 1024)}{unit}"


def renumbered(node: Node, **changes: Any) -> Node:
    """The node, its GPUs numbered from 0; `changes` update its configuration."""
    if node.kind == "sampler" and node.devices:
        changes["engine"] = {**node.config["engine"], "devices": list(range(len(node.devices)))}
    return replace(node, config=node.config | changes)


Dial = Literal["host", "name"]
"""Nodes dial hosts, or node names if the launcher has a name service."""
Address = Callable[[Node], str]
"""The address at which a node is dialled."""


def nodes_of(run: RunFile, *, dial: Dial = "host", parts: Sequence[str] = ()) -> tuple[Node, ...]:
    """All nodes in start order: coordinator, relays, learner, samplers.

    `parts` restricts them to `coordinator`, `learner`, or sites with their subsites. `dial` applies to nodes that the
    same launcher starts. Raises ConfigError for an unknown part.
    """

    def address(node: Node) -> str:
        return f"{node.name if dial == 'name' and _is_part(node, parts) else node.host}:{node.port}"

    coordinators = tuple(_coordinators(run))
    relays = tuple(_relay(relay, coordinators, address) for relay in run.relays)
    samplers = tuple(node for table in run.samplers for node in _samplers(run, table, coordinators, relays, address))
    nodes = (*coordinators, *relays, _learner(run, coordinators, address), *samplers)
    for part in parts:
        if not any(_is_part(node, (part,)) for node in nodes):
            known = dict.fromkeys(["coordinator", "learner", *(node.site for node in (*relays, *samplers))])
            raise ConfigError("--part", f"the run has no part {part!r}", action=f"use {', '.join(known)}")
    found = tuple(node for node in nodes if _is_part(node, parts))
    names = {node.name for node in found}
    return tuple(replace(node, needs=tuple(name for name in node.needs if name in names)) for node in found)


def _is_part(node: Node, parts: Sequence[str]) -> bool:
    if node.kind in ("coordinator", "learner"):
        return not parts or node.kind in parts
    return not parts or any(node.site == part or node.site.startswith(f"{part}.") for part in parts)


def merged(own: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """A table updated with `more`; nested tables are merged."""
    result = dict(own)
    for key, value in more.items():
        known = result.get(key)
        result[key] = merged(known, value) if isinstance(known, dict) and isinstance(value, dict) else value
    return result


def _addresses(nodes: Sequence[Node], address: Address) -> str | list[str]:
    found = [address(node) for node in nodes]
    return found[0] if len(found) == 1 else found


def _listen(host: str, port: int) -> str:
    return f"{host if is_loopback(f'{host}:{port}') else '0.0.0.0'}:{port}"


_OF_COORDINATOR = {
    "run_id": "run.id", "listen": "coordinator.port", "groups_per_version": "run.groups_per_step",
    "data_dir": "coordinator.data_dir", "store.url": "coordinator.postgres.url",
}  # fmt: skip


def _stated(places: dict[str, str], more: dict[str, Any]) -> dict[str, str]:
    return {key: place for key, place in places.items() if not _has(more, key)}


def _has(table: dict[str, Any], key: str) -> bool:
    first, _, rest = key.partition(".")
    inner = table.get(first)
    return first in table and (not rest or (isinstance(inner, dict) and _has(inner, rest)))


def _coordinators(run: RunFile) -> Iterator[Node]:
    table = run.coordinator
    standby = table.postgres.standby if table.postgres else ()
    for number, host in enumerate((table.host, *standby), start=1):
        name = "coordinator" if number == 1 else f"coordinator-{number}"
        config: dict[str, Any] = {
            "run_id": run.run.id,
            "listen": _listen(host, table.port),
            "groups_per_version": run.run.groups_per_step * run.run.steps_per_version,
        }
        if table.data_dir:
            config["data_dir"] = table.data_dir
        if table.postgres:
            config["store"] = {"url": table.postgres.url}
        yield Node(
            name=name,
            kind="coordinator",
            site="main" if number == 1 else f"main-{number}",
            host=host,
            image="coordinator",
            config=merged(config, table.config),
            stated=_stated(_OF_COORDINATOR, table.config),
            arguments=("--standby",) if standby else (),
            port=table.port,
            dialled=tuple(dict.fromkeys((host, name))),
            memory=table.memory,
        )


def _relay(table: RelayTable, coordinators: tuple[Node, ...], address: Address) -> Node:
    name = f"relay-{table.site.replace('.', '-')}"
    config = {"coordinator": _addresses(coordinators, address), "listen": _listen(table.host, table.port)}
    return Node(
        name=name,
        kind="relay",
        site=table.site,
        host=table.host,
        image="coordinator",
        config=merged(config, table.config),
        needs=("coordinator",),
        port=table.port,
        dialled=tuple(dict.fromkeys((table.host, name))),
        memory=table.memory,
    )


def _shared(run: RunFile) -> dict[str, Any]:
    table = run.run
    shared: dict[str, Any] = {"model_dir": table.model_dir, "group_size": table.group_size}
    if table.use_chat_template:
        shared["use_chat_template"] = True
    tables = {
        "chat_template_arguments": table.chat_template_arguments, "task": table.task, "sampling": table.sampling,
        "lora": table.lora,
    }  # fmt: skip
    return shared | {key: value for key, value in tables.items() if value}


def data_dirs(run: RunFile) -> tuple[str, ...]:
    """Directories that learner and samplers read: a local model's, and data_dirs."""
    model = (run.run.model_dir,) if run.run.model_dir.startswith("/") else ()
    return tuple(dict.fromkeys((*model, *run.run.data_dirs)))


def _learner(run: RunFile, coordinators: tuple[Node, ...], address: Address) -> Node:
    table = run.learner
    config = {
        "run_id": run.run.id,
        "coordinator": _addresses(coordinators, address),
        **_shared(run),
        "groups_per_step": run.run.groups_per_step,
        "steps_per_version": run.run.steps_per_version,
        "max_steps": run.run.max_steps,
        "loss": run.run.loss,
        "backend": table.backend,
    }
    hosts = (table.host, *(table.other_hosts or ("",) * (table.nnodes - 1)))
    return Node(
        name="learner",
        kind="learner",
        site="learner",
        host=table.host,
        image="learner-deepspeed" if table.backend.get("kind") == "deepspeed" else "learner",
        config=merged({key: value for key, value in config.items() if value != {}}, table.config),
        stated=_stated({"run_id": "run.id"}, table.config),
        arguments=("--nproc", str(table.nproc)) if table.nproc > 1 and table.nnodes == 1 else (),
        needs=("coordinator",),
        devices=table.devices or tuple(range(table.num_gpus)),
        num_gpus=table.num_gpus,
        machines=hosts if table.nnodes > 1 else (),
        nproc=table.nproc,
        memory=table.memory,
        data_dirs=data_dirs(run),
    )


def _samplers(
    run: RunFile, table: SamplerTable, coordinators: tuple[Node, ...], relays: tuple[Node, ...], address: Address
) -> Iterator[Node]:
    through = next((relay for relay in relays if table.relay and relay.site == table.relay), None)
    share = len(table.devices) // table.count
    for number, site in enumerate(table.sites):
        devices = table.devices[number * share : (number + 1) * share]
        engine: dict[str, Any] = dict(table.engine)
        if devices:
            # Other ones that [engine] names are refused by `check_nodes`.
            engine = {"devices": list(devices), **engine}
        config = {
            "site": site,
            "coordinator": _addresses(coordinators, address) if through is None else address(through),
            **_shared(run),
            "engine": engine,
        }
        yield Node(
            name=f"sampler-{site.replace('.', '-')}",
            kind="sampler",
            site=site,
            host=table.host,
            image="sampler-vllm" if engine.get("kind") == "vllm" else "sampler",
            config=merged({key: value for key, value in config.items() if value != {}}, table.config),
            needs=("coordinator",) if through is None else ("coordinator", through.name),
            devices=devices,
            num_gpus=len(devices),
            memory=table.memory,
            data_dirs=data_dirs(run),
        )


Problems = Callable[[Kind, dict[str, Any]], Sequence[tuple[str, str]]]
"""A schema's objections to a table: dotted key and text; an empty key concerns several."""
_SHARED = (
    "task", "sampling", "lora", "loss", "model_dir", "group_size", "groups_per_step", "steps_per_version", "max_steps",
    "use_chat_template", "chat_template_arguments",
)  # fmt: skip
_OWN = {"backend": "learner", "engine": "samplers"}


def check_nodes(nodes: Sequence[Node], problems: Problems) -> None:
    """Check every node before anything is written; raises OperatorError."""
    lines: dict[str, None] = {}
    for node in nodes:
        for key, text in (*problems(node.kind, node.config), *_conflicts(node)):
            where = node.stated.get(key) or key_in_run(node.kind, key)
            lines[f"{where}: {text}" if where else f"{node.name}: {text}"] = None
    if lines:
        head = [f"run.toml has {len(lines)} problems:"] if len(lines) > 1 else []
        raise OperatorError("\n".join([*head, *lines]))


def _conflicts(node: Node) -> Iterator[tuple[str, str]]:
    if node.port and str(node.config["listen"]).rpartition(":")[2] != str(node.port):
        yield "listen", f"the port is not {node.port}, which the nodes dial; change `port`"
    if node.kind != "sampler":
        return
    if node.config["site"] != node.site:
        yield "site", f"the certificate's site is {node.site}; change `samplers.site`"
    engine = node.config.get("engine")
    if isinstance(engine, dict) and tuple(engine.get("devices") or ()) != node.devices:
        yield "engine.devices", "the launcher gives the node other GPUs; change `samplers.devices`"


def key_in_run(kind: Kind, key: str) -> str:
    """Name in run.toml of a service's key; empty for no key."""
    first = key.partition(".")[0]
    if not key:
        return ""
    section = {"sampler": "samplers", "relay": "relays"}.get(kind, kind)
    if first in _SHARED and kind in ("learner", "sampler"):
        return f"run.{key}"
    if first in _OWN and kind in ("learner", "sampler"):
        return f"{_OWN[first]}.{key}"
    return f"{section}.config.{key}"
