"""From a run to its nodes. Pure: the same run gives the same nodes in the same order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal

from heterorl.common.errors import ConfigError
from heterorl.common.process.address import is_loopback
from heterorl.launch.node import Node
from heterorl.launch.run import RelayTable, RunFile, SamplerTable

Dial = Literal["host", "name"]
"""What nodes dial: hosts, or names of nodes where the launcher has a name service."""
Address = Callable[[Node], str]
"""Where a node is dialled."""


def nodes_of(run: RunFile, *, dial: Dial = "host", parts: Sequence[str] = ()) -> tuple[Node, ...]:
    """Every node, in the order in which they start: coordinator, relays, learner, samplers.

    Args:
        run: the whole run.
        dial: how a node is dialled that the same launcher starts.
        parts: what is started: `coordinator`, `learner`, or sites, each with what is under its name; none is all.

    Raises:
        ConfigError: the run has no such part.
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
            raise ConfigError("--part", f"{part!r} is no part of the run", action=f"use {', '.join(known)}")
    found = tuple(node for node in nodes if _is_part(node, parts))
    names = {node.name for node in found}
    return tuple(replace(node, needs=tuple(name for name in node.needs if name in names)) for node in found)


def _is_part(node: Node, parts: Sequence[str]) -> bool:
    if node.kind in ("coordinator", "learner"):
        return not parts or node.kind in parts
    return not parts or any(node.site == part or node.site.startswith(f"{part}.") for part in parts)


def merged(own: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """A table with what `more` says; tables within are merged too."""
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
    """Where keys are said, but for those that a table of the node's own says anew."""
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
    """What learner and samplers must agree on."""
    table = run.run
    shared: dict[str, Any] = {"model_dir": table.model_dir, "group_size": table.group_size}
    if table.use_chat_template:
        shared["use_chat_template"] = True
    tables = {
        "chat_template_arguments": table.chat_template_arguments, "task": table.task, "sampling": table.sampling,
        "lora": table.lora,
    }  # fmt: skip
    return shared | {key: value for key, value in tables.items() if value}


def _data_dirs(run: RunFile) -> tuple[str, ...]:
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
        data_dirs=_data_dirs(run),
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
            engine |= {"devices": list(devices)}
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
            data_dirs=_data_dirs(run),
        )
