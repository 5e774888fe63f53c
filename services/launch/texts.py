"""Texts that every launcher writes: TOML and YAML with a comment, certs.sh, the README's common parts."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import tomli_w
import yaml

from heterorl.common.errors import ConfigError
from heterorl.common.process.address import is_loopback
from heterorl.launch.nodes import Node
from heterorl.launch.run import RunFile

METRICS_PORT = 9101
"""Of a coordinator's metrics where its configuration says none."""
Tree = dict[str, str]
"""Texts by their path within the directory that is written."""


class _Plain(yaml.SafeDumper):
    """YAML without anchors: what is read beside an anchor's other end is read twice."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002 - the signature is PyYAML's
        return True


class Octal(int):
    """A mode of a file, which YAML of Kubernetes writes as people do."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Plain.add_representer(str, _text)
_Plain.add_representer(Octal, lambda dumper, mode: dumper.represent_scalar("tag:yaml.org,2002:int", f"0{mode:o}"))


def toml_text(node: Node, run_id: str, table: dict[str, Any]) -> str:
    """The configuration file of a node."""
    head = f"# {node.name} of run {run_id}. `heterorl print-config {node.kind}` shows every key.\n"
    return head + tomli_w.dumps(table)


def yaml_text(comment: str, *documents: dict[str, Any]) -> str:
    """Documents of YAML after a comment, in the order of their keys."""
    body = yaml.dump_all(documents, Dumper=_Plain, sort_keys=False, width=120, default_flow_style=False)
    return f"# {comment}\n{body}"


def with_hosts(run: RunFile, nodes: Iterable[Node]) -> dict[str, list[Node]]:
    """The nodes of each host; those without one stand beside the coordinator."""
    placed: dict[str, list[Node]] = {}
    for node in nodes:
        placed.setdefault(node.host or run.coordinator.host, []).append(node)
    return placed


def refuse_plaintext(run: RunFile, launcher: str) -> None:
    """Refuse plaintext where nodes reach one another over a network.

    Raises:
        ConfigError: it is asked for.
    """
    if run.tls.insecure:
        raise ConfigError(
            "tls.insecure", f"nodes of {launcher} meet over a network", action="set tls.directory instead"
        )


def certs_script(run: RunFile, nodes: Sequence[Node], place: Callable[[Node], str]) -> Tree:
    """certs.sh, which makes each node's certificate at the place that the launcher looks at; none for plaintext."""
    if run.tls.insecure:
        return {}
    lines = [
        "#!/bin/bash",
        f"# Makes every certificate of run {run.run.id} by `heterorl certs`, on the machine that keeps the authority.",
        "# What is there stays: run it again after a node was added. HETERORL names another program than heterorl.",
        "set -euo pipefail",
        "heterorl=${HETERORL:-heterorl}",
        f"authority={shlex.quote(run.tls.directory)}",
        'here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)',
        "umask 077",
        "issue() {",
        "  if [[ -e $here/$1/node.crt ]]; then return; fi",
        '  "$heterorl" certs issue "${@:2}" --dir "$authority" --out "$here/$1"',
        "}",
        f'if [[ ! -e $authority/ca.crt ]]; then "$heterorl" certs init {run.run.id} --dir "$authority"; fi',
    ]
    for node in nodes:
        hosts = " ".join(f"--host {host}" for host in node.dialled)
        path = place(node)
        parents = path.rpartition("/")[0]
        if parents and f'mkdir -p "$here/{parents}"' not in lines:
            lines.append(f'mkdir -p "$here/{parents}"')
        lines.append(f"issue {path} {node.kind} {node.site} {hosts}".rstrip())
    if any(node.kind == "coordinator" for node in nodes):
        lines.append(f"issue operator operator me --coordinator {run.coordinator.host}:{run.coordinator.port}")
    return {"certs.sh": "\n".join([*lines, ""])}


def metrics_port(node: Node) -> int:
    """The port of a coordinator's metrics."""
    return int(node.config.get("metrics_port") or METRICS_PORT)


def targets(run: RunFile, nodes: Sequence[Node], *, name: str = "") -> Tree:
    """What Prometheus scrapes of the run: its coordinators, to which all other nodes push. None without one.

    Args:
        run: the run.
        nodes: those that are rendered.
        name: under which the coordinator is reached; empty is its host, or loopback where its metrics are there alone.
    """
    found = [
        f"{name or (node.host if _is_shown(node) else '127.0.0.1')}:{metrics_port(node)}"
        for node in nodes
        if node.kind == "coordinator"
    ]
    if not found:
        return {}
    comment = f"Of run {run.run.id}: copy it to targets/ beside deploy/prometheus/prometheus.yml."
    entry = {"targets": list(dict.fromkeys(found)), "labels": {"run": run.run.id, "service": "coordinator"}}
    body = yaml.dump([entry], Dumper=_Plain, sort_keys=False, default_flow_style=False)
    return {f"targets/{run.run.id}.yml": f"# {comment}\n{body}"}


def _is_shown(node: Node) -> bool:
    host = str(node.config.get("metrics_host", "127.0.0.1"))
    return not is_loopback(f"{host}:{METRICS_PORT}")


def readme(run: RunFile, nodes: Sequence[Node], title: str, *parts: str) -> Tree:
    """README.md of a tree: what to run where, in order."""
    is_whole = any(node.kind == "coordinator" for node in nodes)
    watch = "heterorl status" if run.tls.insecure else "HETERORL_CREDENTIALS=operator heterorl status"
    if run.tls.insecure:
        watch += f" {run.coordinator.host}:{run.coordinator.port} --insecure"
    head = (
        f"# Run {run.run.id} by {title}\n\nMade by `heterorl launch` from run.toml: change that file and make"
        " them again."
    )
    if not is_whole:
        # Whoever looks at the run does so where its coordinator was rendered.
        return {"README.md": "\n\n".join([head, *(part.strip() for part in parts if part.strip())]) + "\n"}
    scraped = (
        f"## Prometheus\n\n`targets/{run.run.id}.yml` names what to scrape: copy it to targets/ beside"
        " deploy/prometheus/prometheus.yml. Where it says 127.0.0.1, Prometheus runs on the coordinator's host. All"
        " other nodes push their metrics to the coordinator."
    )
    last = (
        f"## Look\n\n```\n{watch}\n```\n\n`heterorl top`, `heterorl sites` and `heterorl doctor` take the same."
        "\n\nA process that hangs ends itself after about a minute, by a watchdog of its own, and is started again."
    )
    return {"README.md": "\n\n".join([head, *(part.strip() for part in parts if part.strip()), scraped, last]) + "\n"}


def certs_words(run: RunFile, what_next: str) -> str:
    """The README's part on certificates."""
    if run.tls.insecure:
        return "## Certificates\n\nNone: links are plaintext over loopback."
    return (
        "## Certificates\n\nOn the machine that keeps the authority, which is none of the"
        " nodes:\n\n```\n./certs.sh\n```\n\n"
        f"{what_next}\n\nEach node's directory holds ca.crt, node.crt and its secret node.key; `revoked` of"
        f" coordinator and"
        " relays is the list that `heterorl certs revoke` writes. The authority's ca.key stays where it is."
    )


def store_words(run: RunFile, nodes: Sequence[Node], password: str, keys: str) -> str:
    """The README's part on secrets of PostgreSQL and of the bucket; empty without either, and without a coordinator.

    Args:
        run: the run.
        nodes: those that are rendered.
        password: where PostgreSQL's password stands.
        keys: where each coordinator finds the bucket's `{file}`.
    """
    if not any(node.kind == "coordinator" for node in nodes):
        return ""
    parts = [password] if run.coordinator.postgres else []
    if run.coordinator.has_bucket:
        file = run.coordinator.config["payloads"].get("credentials_file")
        parts.append(
            f"The bucket's keys are `{file}`, in the form of ~/.aws/credentials, readable by its user alone: "
            + keys.format(file=file)
            if file
            else "The bucket's keys come from the environment of each coordinator or from its machine's role;"
            " `credentials_file` in `coordinator.config.payloads` names a file instead."
        )
    return "## Secrets of the stores\n\n" + "\n\n".join(parts) if parts else ""


def table(nodes: Sequence[Node], host: Callable[[Node], str]) -> str:
    """The nodes as a table of Markdown, in the order in which they start."""
    rows = [f"| {number} | {node.name} | {host(node)} |" for number, node in enumerate(nodes, start=1)]
    return "\n".join(["| order | node | host |", "|---|---|---|", *rows])


def write_tree(tree: Tree, directory: Path) -> None:
    """Write every text; scripts may be run.

    Raises:
        ConfigError: the directory holds something already, or cannot be written.
    """
    try:
        if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
            raise ConfigError("--out", f"{directory} exists and is not empty", action="name a new directory")
        for path, text in sorted(tree.items()):
            target = directory / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")
            target.chmod(0o755 if path.endswith(".sh") else 0o644)
    except OSError as error:
        raise ConfigError("--out", f"cannot write {directory}: {error.strerror}") from error
