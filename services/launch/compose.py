"""Docker Compose: for each host a compose.yaml in the shape of deploy/compose.yaml, and a TOML file for each node."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from heterorl.common.errors import ConfigError
from heterorl.launch.nodes import SHARED_MEMORY_GIB, Node, complete, memory_limit, nodes_of, renumbered
from heterorl.launch.run import RunFile
from heterorl.launch.texts import (
    Tree,
    certs_script,
    certs_words,
    metrics_port,
    readme,
    refuse_plaintext,
    store_words,
    table,
    targets,
    toml_text,
    with_hosts,
    yaml_text,
)  # fmt: skip

STATE = "/var/lib/heterorl"
_PIDS = {"coordinator": 512, "relay": 512, "learner": 4096, "sampler": 4096}
_GRACE = {"coordinator": "60s", "relay": "60s", "learner": "15m", "sampler": "15m"}


def render(run: RunFile, parts: Sequence[str] = ()) -> Tree:
    """The files of every host; of some parts alone where they are named.

    Raises:
        ConfigError: the run asks for what containers cannot do.
    """
    refuse_plaintext(run, "Compose")
    if run.learner.nnodes > 1:
        raise ConfigError("learner.nnodes", "Compose starts a learner on one machine", action="use systemd or slurm")
    # On one host names are enough, and what is dialled never leaves it.
    is_alone = len(run.hosts) == 1
    nodes = nodes_of(run, dial="name" if is_alone else "host", parts=parts)
    tree: Tree = {}
    for host, own in with_hosts(run, nodes).items():
        tree[f"{host}/compose.yaml"] = _compose(run, own, is_alone=is_alone)
        for node in own:
            tree[f"{host}/config/{node.name}.toml"] = toml_text(node, run.run.id, _config(node))
    places = {node.name: node.host or run.coordinator.host for node in nodes}
    tree |= certs_script(run, nodes, lambda node: f"{places[node.name]}/secrets/{node.name}")
    tree |= targets(run, nodes, name="127.0.0.1")
    return tree | readme(
        run,
        nodes,
        "Docker Compose",
        table(nodes, lambda node: places[node.name]),
        _words(run, nodes, list(dict.fromkeys(places.values()))),
    )


def project(run_id: str) -> str:
    """The project's name, of the characters that Compose allows."""
    return re.sub(r"[^a-z0-9_-]", "-", run_id.lower()).lstrip("-_") or "heterorl"


def _config(node: Node) -> dict[str, Any]:
    config = renumbered(node) | {"metrics_host": "0.0.0.0"}
    if node.port:
        config |= {"listen": f"0.0.0.0:{node.port}"}
    state = node.config.get("data_dir") or f"{STATE}/{node.name}"
    return complete(replace(node, config=config), state_dir=state, tls_dir="/tls")


def _compose(run: RunFile, nodes: Sequence[Node], *, is_alone: bool) -> str:
    names = {node.name for node in nodes}
    services = {node.name: _service(run, node, names, is_alone=is_alone) for node in nodes}
    comment = f"Nodes of run {run.run.id} on this host; README.md above says what must be there first."
    document = {"services": services, "networks": {"run": {}}, "volumes": {node.name: {} for node in nodes}}
    return yaml_text(comment, document)


def _bind(source: str, target: str, *, read_only: bool = True) -> dict[str, Any]:
    return {"type": "bind", "source": source, "target": target, "read_only": read_only}


def _service(run: RunFile, node: Node, names: set[str], *, is_alone: bool) -> dict[str, Any]:
    service: dict[str, Any] = {
        "image": f"{run.run.image}-{node.image}:{run.run.version}",
        "command": [*node.command, f"--config=/etc/heterorl/{node.name}.toml", "--log=json"],
        "init": True,
        "read_only": True,
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true"],
        "logging": {"driver": "json-file", "options": {"max-size": "50m", "max-file": "5"}},
        # Compose cannot except exit code 2 (an operator must act) from restarts: a few attempts, then it stays down.
        "restart": "on-failure:5",
        "networks": ["run"],
        "tmpfs": ["/tmp:size=512m,mode=1777,noexec,nosuid,nodev"],
        "volumes": [
            _bind("./config", "/etc/heterorl"),
            _bind(f"./secrets/{node.name}", "/tls"),
            *(_bind(path, path) for path in node.data_dirs),
            {"type": "volume", "source": node.name, "target": STATE},
        ],
        "stop_grace_period": _GRACE[node.kind],
        "pids_limit": _PIDS[node.kind],
    }
    if limit := memory_limit(node, is_container=True):
        service["mem_limit"] = limit
    if directory := node.config.get("data_dir"):
        service["volumes"].append(_bind(directory, directory, read_only=False))
    if "store" in node.config:
        service["environment"] = {"PGPASSFILE": "/tls/pgpass"}
    if node.port:
        service["ports"] = [f"{'127.0.0.1:' if is_alone else ''}{node.port}:{node.port}"]
    if node.kind == "coordinator":
        # For a Prometheus of this host.
        service["ports"].append("127.0.0.1:{0}:{0}".format(metrics_port(node)))
    if node.kind == "coordinator" and not node.arguments:
        tls = ["--ca", "/tls/ca.crt", "--cert", "/tls/node.crt", "--key", "/tls/node.key"]
        service["healthcheck"] = {
            "test": ["CMD", "heterorl", "health", f"127.0.0.1:{node.port}", *tls],
            "interval": "15s",
            "timeout": "10s",
            "retries": 3,
            "start_period": "5m",
        }
    if needs := [name for name in node.needs if name in names]:
        service["depends_on"] = {name: {"condition": "service_started"} for name in needs}
    if node.num_gpus:
        service["shm_size"] = f"{SHARED_MEMORY_GIB}g"
        ids = [str(device) for device in node.devices]
        gpus = {"driver": "nvidia", "device_ids": ids, "capabilities": ["gpu"]}
        service["deploy"] = {"resources": {"reservations": {"devices": [gpus]}}}
    return service


def _words(run: RunFile, nodes: Sequence[Node], hosts: list[str]) -> str:
    secrets = certs_words(
        run,
        "It writes HOST/secrets/NODE for each host. Copy the directory of each host to it, and there give the"
        " secrets to the"
        " user of the containers:\n\n```\nsudo chown -R 10001 secrets\n```",
    )
    stores = store_words(
        run,
        nodes,
        "PostgreSQL's password is each coordinator's `secrets/COORDINATOR/pgpass`, mode 0600, as PGPASSFILE has it.",
        "a path in each coordinator's container, where `/tls/NAME` is `secrets/COORDINATOR/NAME` of its host.",
    )
    starts = "\n".join(f"cd {host} && docker compose -p {project(run.run.id)} up -d    # on {host}" for host in hosts)
    dirs = "\n".join(
        f"- `{path}`" for path in dict.fromkeys((run.run.model_dir, *run.run.data_dirs)) if path.startswith("/")
    )
    data = f"## Data\n\nOn the hosts of learner and samplers, readable by user 10001:\n\n{dirs}" if dirs else ""
    images = f"## Images\n\n`{run.run.image}-ROLE:{run.run.version}`, built from deploy/Dockerfile, on each host."
    return "\n\n".join(
        part
        for part in (images, data, secrets, stores, f"## Start, the coordinator's host first\n\n```\n{starts}\n```")
        if part
    )
