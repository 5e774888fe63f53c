"""Fills the templates of one launcher with the nodes of a run.

Templates quote values by format: `quoted` in YAML, `literal` in a Compose file, `shell` in scripts. An unknown name in
a template is an error.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal
from urllib.parse import parse_qsl

import tomli_w
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from heterorl.common.errors import ConfigError
from heterorl.common.process.address import addresses, is_loopback, split_url
from heterorl.common.process.config_file import PATTERNS
from heterorl.launch.nodes import (
    CPUS,
    SHARED_MEMORY_GIB,
    STATE_KEY,
    Node,
    complete,
    data_dirs,
    key_in_run,
    memory_limit,
    nodes_of,
    renumbered,
)
from heterorl.launch.run_file import PLACE, RunFile

Launcher = Literal["compose", "systemd", "slurm", "k8s"]
Tree = dict[str, str]
"""Texts by path within the output directory."""
Hosts = dict[str, list[Node]]
STATE = "/var/lib/heterorl"
METRICS_PORT = 9101
"""Metrics port of a coordinator that configures none."""
_HERE = Path(__file__).parent
_TITLES = {"compose": "Docker Compose", "systemd": "systemd", "slurm": "Slurm", "k8s": "Kubernetes"}
_CERTIFICATES = {
    "compose": "{host}/secrets/{name}", "systemd": "{host}/etc/heterorl/credentials/{name}",
    "slurm": "credentials/{name}", "k8s": "credentials/{name}",
}  # fmt: skip
"""Directory into which certs.sh puts a node's files; the launcher takes them from there."""
# systemd copies credentials at a start only, and the list changes during a run.
_LISTS = {name: f"{place}/revoked" for name, place in _CERTIFICATES.items()} | {
    "systemd": "{host}/etc/heterorl/{name}.revoked"
}
"""List of revoked certificates of a coordinator or relay."""
_NO_TLS = "--set tls.ca=%d/tls_ca.crt --set tls.cert=%d/tls_node.crt --set tls.key=%d/tls_node.key "
_UNITS = {
    "coordinator": "heterorl-coordinator.service", "learner": "heterorl-learner@.service",
    "learner-deepspeed": "heterorl-learner@.service", "sampler": "heterorl-sampler@.service",
    "sampler-vllm": "heterorl-sampler@.service", "relay": "heterorl-relay@.service",
    "machines": "heterorl-learner-node@.service",
}  # fmt: skip


def render(launcher: Launcher, run: RunFile, parts: Sequence[str] = ()) -> Tree:
    """The files of a run; raises ConfigError for what the launcher lacks."""
    # Containers of one host dial each other by name, and their traffic never leaves it.
    is_alone = launcher == "compose" and len(run.hosts) == 1
    nodes = nodes_of(run, dial="name" if is_alone or launcher == "k8s" else "host", parts=parts)
    _check(launcher, run, nodes)
    hosts = _hosts(run, nodes)
    homes = {node.name: node.host or run.coordinator.host for node in nodes}
    values: dict[str, Any] = {"run": run, "nodes": nodes, "cpus": CPUS, "shared_memory_gib": SHARED_MEMORY_GIB}
    values["project"] = project(run.run.id)
    for what, places in {"certificates": _CERTIFICATES, "lists": _LISTS}.items():
        values[what] = {name: places[launcher].format(host=host, name=name) for name, host in homes.items()}
    values["coordinators"] = [node.name for node in nodes if node.kind == "coordinator"]
    serving = [f"{node.host}:{node.port}" for node in nodes if node.kind == "coordinator"]
    values["coordinator_addresses"] = ",".join(serving)
    tree = _FILES[launcher](run, hosts, values)
    if not run.tls.insecure:
        tree["certs.sh"] = _fill("certs.sh", values)
    if targets := _targets(launcher, nodes):
        tree[f"targets/{run.run.id}.yml"] = _fill("targets.yml", values | {"targets": targets})
    places = {
        node.name: {"k8s": "where there is room", "slurm": node.host or "any"}.get(launcher, homes[node.name])
        for node in nodes
    }
    values |= {"title": _TITLES[launcher], "places": places, "hosts": hosts, "data_dirs": data_dirs(run)}
    values["bucket_file"] = _bucket_file(run)
    values["code"] = list(_stated_code(run))
    # Parts that the run lacks leave blank lines.
    words = re.sub(r"\n{3,}", "\n\n", _fill(f"{launcher}/README.md", values))
    return tree | {"README.md": words.strip() + "\n"}


def write_tree(tree: Tree, directory: Path) -> None:
    """Write all texts to a new or empty directory; raises ConfigError otherwise."""
    try:
        if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
            raise ConfigError("--out", f"{directory} exists and is not empty", action="give a new directory")
        for path, text in sorted(tree.items()):
            target = directory / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")
            target.chmod(0o755 if path.endswith(".sh") else 0o644)
            # Containers and services read them as other users, also under umask 077.
            for made in [*Path(path).parents]:
                (directory / made).chmod(0o755)
    except OSError as error:
        raise ConfigError(
            "--out", f"cannot write {directory}: {error.strerror}", action="name a directory that this user can write"
        ) from error


def project(run_id: str) -> str:
    """The run's name in characters that Compose and Kubernetes labels allow."""
    return re.sub(r"[^a-z0-9_-]", "-", run_id.lower()).lstrip("-_") or "heterorl"


POD_NAME = 52
"""Kubernetes puts a StatefulSet's name, a dash and ten characters into one label of 63."""

_HIDDEN = ("/home", "/root", "/run/user", "/tmp", "/var/tmp")
"""Places that services of systemd do not see: ProtectHome and PrivateTmp of their units."""
_NOT_OF_FILES = ("http://", "https://", "textarena:", "openenv:", "verifiers:")
"""Beginnings of rewards and environments that are no modules."""
_OF_LIBPQ = ("passfile", "sslcert", "sslkey", "sslrootcert", "sslcrl", "sslcrldir")


def _bucket_file(run: RunFile) -> str:
    return str(run.coordinator.config["payloads"].get("credentials_file", "")) if run.coordinator.has_bucket else ""


def _paths_of_coordinator(run: RunFile) -> Iterator[tuple[str, str]]:
    query = split_url(run.coordinator.postgres.url).query if run.coordinator.postgres else ""
    yield from ((f"coordinator.postgres.url ({key})", path) for key, path in parse_qsl(query) if key in _OF_LIBPQ)
    yield "coordinator.config.payloads.credentials_file", _bucket_file(run)


def _tasks(run: RunFile) -> Iterator[tuple[str, dict[str, Any]]]:
    yield "run.task", run.run.task
    for place, each in enumerate(run.run.task.get("sources", ())):
        yield f"run.task.sources[{place}]", each


def _stated_code(run: RunFile) -> Iterator[str]:
    """Modules and programs that services look for in the configuration's directory."""
    if "function" in run.run.loss:
        yield str(run.run.loss["function"])
    for _, task in _tasks(run):
        rewards = (each.get("function") for each in task.get("rewards", ()))
        for name in (task.get("reward"), task.get("environment"), *rewards):
            if name and not name.startswith(_NOT_OF_FILES):
                yield name


def _stated_paths(run: RunFile) -> Iterator[tuple[str, str]]:
    yield "run.model_dir", run.run.model_dir
    for path in run.run.data_dirs:
        yield "run.data_dirs", path
    for where, task in _tasks(run):
        for key in ("name", "evaluation_path", "reward_path", "environment_path"):
            value = str(task.get(key, ""))
            yield f"{where}.{key}", value.partition(":")[2].partition("[")[0] if key == "name" else value


def _check_visible(key: str, path: str) -> None:
    if any(Path(path).is_relative_to(place) for place in _HIDDEN):
        problem = f"units of systemd cannot read {path}: they see no {', '.join(_HIDDEN)}"
        raise ConfigError(key, problem, action="put it elsewhere, such as under /srv or /etc/heterorl")


def _check_paths(launcher: Launcher, run: RunFile, nodes: Sequence[Node]) -> None:
    if launcher == "systemd" and any(node.kind == "coordinator" for node in nodes):
        for key, path in _paths_of_coordinator(run):
            _check_visible(key, os.path.normpath(path))
    if not any(node.kind in ("learner", "sampler") for node in nodes):
        return
    mounted = data_dirs(run)
    for key, stated in _stated_paths(run):
        path = os.path.normpath(stated) if stated.startswith("/") else stated
        if key == "run.model_dir" and path.startswith("~"):
            raise ConfigError(key, f"{path} is relative", action="give an absolute directory or a hub id")
        if not path.startswith("/"):
            continue
        if launcher == "systemd":
            _check_visible(key, path)
        # An image, or the directory of configurations, may hold code.
        is_code = key.endswith(("reward_path", "environment_path"))
        if (
            launcher in ("compose", "k8s")
            and not is_code
            and not any(Path(path).is_relative_to(place) for place in mounted)
        ):
            problem = f"containers do not have {path}: it is in none of {', '.join(mounted) or 'them'}"
            raise ConfigError("run.data_dirs", problem, action=f"add the directory that {key} names")


def _check(launcher: Launcher, run: RunFile, nodes: Sequence[Node]) -> None:
    _check_paths(launcher, run, nodes)
    for node in nodes:
        if "tls" in node.config:
            raise ConfigError(key_in_run(node.kind, "tls"), "the launcher sets this table", action="remove it")
        _check_directory(launcher, node)
        if launcher == "k8s" and len(node.name) > POD_NAME:
            problem = f"the name {node.name} has {len(node.name)} characters, and Kubernetes allows {POD_NAME}"
            raise ConfigError(f"{node.kind}s.site", problem, action="shorten the site")
    # Another launcher may start the learner.
    has_machines = any(node.machines for node in nodes)
    if launcher == "systemd" and has_machines and not run.learner.other_hosts:
        problem = f"must name the {run.learner.nnodes - 1} other machines of nnodes = {run.learner.nnodes}"
        raise ConfigError("learner.other_hosts", problem, action="list one host for each further machine")
    if launcher not in ("compose", "k8s"):
        return
    if run.tls.insecure:
        name = "Compose" if launcher == "compose" else "Kubernetes"
        raise ConfigError("tls.insecure", f"nodes of {name} connect over a network", action="set tls.directory instead")
    if has_machines:
        problem = "Compose starts a learner on one machine" if launcher == "compose" else "a pod runs on one machine"
        raise ConfigError("learner.nnodes", problem, action="use systemd or slurm")
    relays = {f"{relay.host}:{relay.port}" for relay in run.relays}
    for node in nodes:
        dialled = node.config.get("coordinator", "")
        for address in addresses(dialled if isinstance(dialled, str) else ",".join(dialled)):
            if is_loopback(address):
                problem = f"{node.name} is a container and cannot dial {address} of its host"
                key = "relays.host" if address in relays else "coordinator.host"
                raise ConfigError(key, problem, action="name the machine")


def _check_directory(launcher: Launcher, node: Node) -> None:
    for key, path in node.written.items():
        where = node.stated.get(key) or key_in_run(node.kind, key)
        if launcher == "k8s":
            raise ConfigError(where, "Kubernetes stores it in a volume claim", action="remove it")
        if launcher in ("compose", "systemd") and re.fullmatch(PLACE, path) is None:
            raise ConfigError(where, f"{path!r} is not {PATTERNS[PLACE]}", action="give an absolute directory")
        if launcher == "systemd":
            _check_visible(where, os.path.normpath(path))


def _hosts(run: RunFile, nodes: Sequence[Node]) -> Hosts:
    """Nodes by host, by default the coordinator's; learners on all their machines."""
    placed: Hosts = {}
    for node in nodes:
        others = (host for host in node.machines[1:] if host)
        for host in dict.fromkeys((node.host or run.coordinator.host, *others)):
            placed.setdefault(host, []).append(node)
    return placed


def _escaped(text: str, *, keeps: str = "") -> str:
    """The text, with TOML and YAML's escapes for unprintable characters."""
    return "".join(each if each.isprintable() or each in keeps else f"\\U{ord(each):08x}" for each in text)


def _quoted(text: str) -> str:
    # YAML has no pairs of surrogates.
    return _escaped(json.dumps(text, ensure_ascii=False))


def _fill(template: str, values: dict[str, Any]) -> str:
    return _TEMPLATES.get_template(f"{template}.j2").render(values)


def _compose(run: RunFile, hosts: Hosts, values: dict[str, Any]) -> Tree:
    tree = {}
    for host, own in hosts.items():
        names = [node.name for node in own]
        tree[f"{host}/compose.yaml"] = _fill("compose/compose.yaml", values | {"nodes": own, "names": names})
        tree |= {f"{host}/config/{node.name}.toml": _toml(run, node, _in_container(node)) for node in own}
    return tree


def _k8s(run: RunFile, hosts: Hosts, values: dict[str, Any]) -> Tree:  # noqa: ARG001 - pods have no hosts
    tree = {"secrets.sh": _fill("k8s/secrets.sh", values)}
    for number, node in enumerate(values["nodes"], start=1):
        toml = _toml(run, node, _in_container(node))
        tree[f"{number:02}-{node.name}.yaml"] = _fill("k8s/node.yaml", values | {"node": node, "toml": toml})
    return tree


def _slurm(run: RunFile, hosts: Hosts, values: dict[str, Any]) -> Tree:  # noqa: ARG001 - one directory for all hosts
    # Only jobs that others wait for need a variable.
    waited_for = {name for node in values["nodes"] for name in node.needs}
    tree = {"submit.sh": _fill("slurm/submit.sh", values | {"waited_for": waited_for})}
    for node in values["nodes"]:
        tree[f"{node.name}.sbatch"] = _fill("slurm/node.sbatch", values | {"node": node})
        own = renumbered(node)
        config = complete(
            own, state_dir=f"state/{node.name}", tls_dir=f"credentials/{node.name}", insecure=run.tls.insecure
        )
        tree[f"config/{node.name}.toml"] = _toml(run, node, config)
    return tree


def _toml(run: RunFile, node: Node, config: dict[str, Any]) -> str:
    head = f"# {node.name} of run {run.run.id}. `heterorl print-config {node.kind}` shows every key.\n"
    # YAML readers break a ConfigMap's lines at U+0085 and U+2028, which TOML allows in a text.
    return head + _escaped(tomli_w.dumps(config), keeps="\n")


def _in_container(node: Node) -> dict[str, Any]:
    listen = {"listen": f"0.0.0.0:{node.port}"} if node.port else {}
    own = renumbered(node, metrics_host="0.0.0.0", **listen)
    return complete(own, state_dir=f"{STATE}/{node.name}", tls_dir="/tls")


def metrics_port(node: Node) -> int:
    """Metrics port of a coordinator."""
    return int(node.config.get("metrics_port") or METRICS_PORT)


def _targets(launcher: Launcher, nodes: Sequence[Node]) -> list[str]:
    """Prometheus targets: the coordinators, to which all other nodes push their metrics."""
    found = []
    for node in nodes:
        if node.kind == "coordinator":
            name = {"compose": "127.0.0.1", "k8s": node.name}.get(launcher)
            is_shown = not is_loopback(f"{node.config.get('metrics_host', '127.0.0.1')}:{METRICS_PORT}")
            found.append(f"{name or (node.host if is_shown else '127.0.0.1')}:{metrics_port(node)}")
    return list(dict.fromkeys(found))


def _systemd(run: RunFile, hosts: Hosts, values: dict[str, Any]) -> Tree:  # noqa: ARG001 - it has no templates
    tree: Tree = {}
    for host, node in ((host, node) for host, own in hosts.items() for node in own):
        config = complete(
            node,
            state_dir=f"{STATE}/{node.name}",
            tls_dir=f"/etc/heterorl/credentials/{node.name}",
            revoked=f"/etc/heterorl/{node.name}.revoked",
            insecure=run.tls.insecure,
        )
        tree[f"{host}/etc/heterorl/{node.name}.toml"] = _toml(run, node, config)
        tree[f"{host}/etc/systemd/system/heterorl-{node.name}.service"] = _unit(run, node, host)
    return tree


def _unit(run: RunFile, node: Node, host: str) -> str:
    kind = "relay" if node.kind == "relay" else "machines" if node.machines else node.image
    text = (_HERE / "units" / _UNITS[kind]).read_text(encoding="utf-8")
    if kind == "sampler-vllm":
        text = text.replace("/current/", "/current-vllm/")
    if node.kind == "coordinator":
        for place in ("heterorl", "credentials"):
            text = re.sub(rf"(?<=\b{place}/)coordinator\b(?!-)", node.name, text)
        text = text.replace("Description=heterorl coordinator", f"Description=heterorl {node.name}")
        text = text.replace("--log json", " ".join(["--log json", *node.arguments]))
    text = text.replace("%i", node.name)
    if node.kind == "learner":
        text = _with_place(text, run, node, host)
        if run.learner.devices:
            visible = ",".join(map(str, node.devices))
            text = text.replace("[Service]\n", f"[Service]\nEnvironment=CUDA_VISIBLE_DEVICES={visible}\n")
    if node.directory:
        key = STATE_KEY[node.kind]
        text = text.replace(f"--set {key}={STATE}/{node.name}", f"--set {key}={node.directory}")
    for path in node.written.values():
        text = text.replace("ProtectSystem=strict\n", f"ProtectSystem=strict\nReadWritePaths={path}\n")
    if limit := memory_limit(node):
        text = re.sub(r"^MemoryMax=.*\n", "", text, flags=re.MULTILINE)
        text = text.replace("[Service]\n", f"[Service]\nMemoryMax={limit.upper()}\n")
    if "store" in node.config:
        # Not a credential: systemd may show those to a group too, and libpq passes over such a file.
        text = text.replace("[Service]\n", f"[Service]\nEnvironment=PGPASSFILE=/etc/heterorl/{node.name}.pgpass\n")
    if run.tls.insecure:
        text = text.replace(_NO_TLS, "")
        text = re.sub(r"^LoadCredential=.*\n", "", text, flags=re.MULTILINE)
    return text


def _with_place(text: str, run: RunFile, node: Node, host: str) -> str:
    """A learner's unit with its variables filled in.
    NAME.env is the operator's, and install.sh writes one too."""
    place: dict[str, object] = {"NPROC": node.nproc}
    if node.machines:
        place |= {
            "NNODES": len(node.machines),
            "NODE_RANK": node.machines.index(host) if host in node.machines else 0,
            "MASTER_ADDR": node.machines[0] or run.coordinator.host,
            "MASTER_PORT": 29500,
        }
    text = re.sub(r"\$\{HETERORL_(\w+)\}", lambda found: str(place[found[1]]), text)
    text = re.sub(r"^(#   |Environment=)HETERORL_.*\n", "", text, flags=re.MULTILINE)
    return text.replace("EnvironmentFile=/", "EnvironmentFile=-/")


def _role(node: Node) -> str:
    if node.kind == "coordinator":
        return "coordinator"
    return f"{'relay' if node.kind == 'relay' else node.image}:{node.name}"


_FILES = {"compose": _compose, "systemd": _systemd, "slurm": _slurm, "k8s": _k8s}
# HTML escapes would break shell, YAML and Markdown.
_TEMPLATES = Environment(
    loader=FileSystemLoader(_HERE / "templates"),
    autoescape=False,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
_TEMPLATES.filters |= {
    "quoted": _quoted,
    # Compose puts a variable of the environment in place of $NAME.
    "literal": lambda text: _quoted(text).replace("$", "$$"),
    "shell": shlex.quote,
    "job": lambda name: f"${{{name.replace('-', '_')}%%;*}}",
    "memory": memory_limit,
    "container_memory": partial(memory_limit, is_container=True),
    "metrics_port": metrics_port,
    "is_local": lambda host: is_loopback(f"{host}:1"),
    "role": _role,
}
