"""systemd: for each host what goes to /etc: units, each with the name of its node, and TOML files."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib.resources import files

from heterorl.common.errors import ConfigError
from heterorl.launch.nodes import Node, complete, memory_limit, nodes_of
from heterorl.launch.run import RunFile
from heterorl.launch.texts import (
    Tree,
    certs_script,
    certs_words,
    readme,
    store_words,
    table,
    targets,
    toml_text,
    with_hosts,
)

STATE = "/var/lib/heterorl"
CREDENTIALS = "/etc/heterorl/credentials"
MASTER_PORT = 29500
_REVOKED = "# Serial numbers of revoked certificates; `heterorl certs revoke` writes this list.\n"
_NO_TLS = "--set tls.ca=%d/tls_ca.crt --set tls.cert=%d/tls_node.crt --set tls.key=%d/tls_node.key "
_UNITS = {
    "coordinator": "heterorl-coordinator.service", "learner": "heterorl-learner@.service",
    "learner-deepspeed": "heterorl-learner@.service", "sampler": "heterorl-sampler@.service",
    "sampler-vllm": "heterorl-sampler-vllm@.service", "relay": "heterorl-relay@.service",
    "machines": "heterorl-learner-node@.service",
}  # fmt: skip


def render(run: RunFile, parts: Sequence[str] = ()) -> Tree:
    """The files of every host; of some parts alone where they are named.

    Raises:
        ConfigError: a learner on several machines does not say which.
    """
    if run.learner.nnodes > 1 and not run.learner.other_hosts:
        raise ConfigError("learner.other_hosts", f"nnodes = {run.learner.nnodes} and no hosts of the other machines")
    nodes = nodes_of(run, parts=parts)
    tree: Tree = {}
    placed = with_hosts(run, nodes)
    for host, own in placed.items():
        for node in own:
            tree |= _files(run, host, node, rank=0)
        if any(node.port for node in own) and not run.tls.insecure:
            tree[f"{host}/etc/heterorl/revoked"] = _REVOKED
    for learner in nodes:
        for rank, host in enumerate(learner.machines[1:], start=1):
            tree |= _files(run, host, learner, rank=rank)
    places = {node.name: host for host, own in placed.items() for node in own}
    tree |= certs_script(run, nodes, lambda node: f"{places[node.name]}/credentials/{node.name}")
    tree |= targets(run, nodes)
    return tree | readme(
        run, nodes, "systemd", table(nodes, lambda node: places[node.name]), _words(run, nodes, places)
    )


def unit_name(node: Node) -> str:
    """The unit of a node."""
    return f"heterorl-{node.name}.service"


def _files(run: RunFile, host: str, node: Node, *, rank: int) -> Tree:
    state = node.config.get("data_dir") or f"{STATE}/{node.name}"
    config = complete(
        node,
        state_dir=state,
        tls_dir=f"{CREDENTIALS}/{node.name}",
        revoked="/etc/heterorl/revoked",
        insecure=run.tls.insecure,
    )
    etc = f"{host}/etc"
    tree = {
        f"{etc}/heterorl/{node.name}.toml": toml_text(node, run.run.id, config),
        f"{etc}/systemd/system/{unit_name(node)}": _unit(run, node),
    }
    if env := _environment(run, node, rank):
        tree[f"{etc}/heterorl/{node.name}.env"] = env
    return tree


def _unit(run: RunFile, node: Node) -> str:
    kind = "relay" if node.kind == "relay" else "machines" if node.machines else node.image
    text = (files("heterorl.launch") / "units" / _UNITS[kind]).read_text(encoding="utf-8")
    if node.kind == "coordinator":
        for place in ("heterorl", "credentials"):
            text = re.sub(rf"(?<=\b{place}/)coordinator\b(?!-)", node.name, text)
        text = text.replace("Description=heterorl coordinator", f"Description=heterorl {node.name}")
        text = text.replace("--log json", " ".join(["--log json", *node.arguments]))
    text = text.replace("%i", node.name)
    if directory := node.config.get("data_dir"):
        text = text.replace(f"--set data_dir={STATE}/{node.name}", f"--set data_dir={directory}")
        text = text.replace("ProtectSystem=strict\n", f"ProtectSystem=strict\nReadWritePaths={directory}\n")
    if limit := memory_limit(node):
        text = re.sub(r"^MemoryMax=.*\n", "", text, flags=re.MULTILINE)
        text = text.replace("[Service]\n", f"[Service]\nMemoryMax={limit.upper()}\n")
    if "store" in node.config:
        text = text.replace("[Service]\n", "[Service]\nEnvironment=PGPASSFILE=%d/tls_pgpass\n")
    if run.tls.insecure:
        text = text.replace(_NO_TLS, "")
        text = "".join(line for line in text.splitlines(keepends=True) if not line.startswith("LoadCredential="))
    return text


def _environment(run: RunFile, node: Node, rank: int) -> str:
    if node.kind == "coordinator" or node.kind == "relay":
        return ""
    values: dict[str, object] = {}
    if node.kind == "learner":
        values["HETERORL_NPROC"] = node.nproc
        if run.learner.devices:
            values["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, node.devices))
    if node.machines:
        values |= {
            "HETERORL_NNODES": len(node.machines),
            "HETERORL_NODE_RANK": rank,
            "HETERORL_MASTER_ADDR": node.machines[0] or run.coordinator.host,
            "HETERORL_MASTER_PORT": MASTER_PORT,
        }
    return "".join(f"{key}={value}\n" for key, value in values.items())


def _role(node: Node) -> str:
    """What deploy/install.sh calls the node."""
    if node.kind == "coordinator":
        return "coordinator"
    return f"{'relay' if node.kind == 'relay' else node.image}:{node.name}"


def _words(run: RunFile, nodes: tuple[Node, ...], places: dict[str, str]) -> str:
    everywhere: dict[str, list[Node]] = {}
    for node in nodes:
        for host in dict.fromkeys((places[node.name], *(host for host in node.machines[1:] if host))):
            everywhere.setdefault(host, []).append(node)
    put = "\n".join(
        f"sudo deploy/install.sh {' '.join(map(_role, own))} && sudo cp -rT {host}/etc /etc    # on {host}"
        for host, own in everywhere.items()
    )
    starts = "\n".join(
        f"sudo systemctl enable --now {unit_name(node)}    # on {host}"
        for node in nodes
        for host in dict.fromkeys((places[node.name], *(host for host in node.machines[1:] if host)))
    )
    secrets = certs_words(
        run,
        f"It writes HOST/credentials/NODE for each host. Copy each to {CREDENTIALS}/NODE of its host (root only,"
        f" mode 0700),"
        " and `revoked` of coordinator and relays to /etc/heterorl/revoked.",
    )
    coordinators = [node.name for node in nodes if node.kind == "coordinator"]
    stores = store_words(
        run,
        nodes,
        "PostgreSQL's password, in the form of PGPASSFILE, is "
        + " and ".join(f"`{CREDENTIALS}/{name}/pgpass`" for name in coordinators)
        + ".",
        f"on the host of {' and of '.join(coordinators)}, once install.sh has made the user:\n\n```\n"
        "sudo install -o heterorl -g heterorl -m 0600 KEYS {file}\n```",
    )
    install = (
        "## Install\n\nCopy each host's directory to it. deploy/install.sh of the sources makes the user, the"
        " environments and units of its own; the files of this run take their place, so they are copied after it,"
        f" after an upgrade too:\n\n```\n{put}\n```"
    )
    paths = [path for path in dict.fromkeys((run.run.model_dir, *run.run.data_dirs)) if path.startswith("/")]
    data = "## Data\n\nOn the hosts of learner and samplers, readable by user heterorl:\n\n" + "\n".join(
        f"- `{path}`: `sudo chmod -R a+rX {path}` where it is somebody else's" for path in paths
    )
    start = f"## Start, in this order\n\n```\nsudo systemctl daemon-reload    # on every host\n{starts}\n```"
    return "\n\n".join(part for part in (install, data if paths else "", secrets, stores, start) if part)
