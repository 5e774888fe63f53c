"""Kubernetes: for each node one file with its ConfigMap, its StatefulSet and, where others dial it, its Service."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from heterorl.common.errors import ConfigError
from heterorl.launch.compose import project
from heterorl.launch.nodes import CPUS, SHARED_MEMORY_GIB, Node, complete, memory_limit, nodes_of, renumbered
from heterorl.launch.run import RunFile
from heterorl.launch.texts import (
    Octal,
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
    yaml_text,
)

STATE = "/var/lib/heterorl"
_DISK = {"coordinator": "100Gi", "relay": "100Gi", "learner": "200Gi", "sampler": "100Gi"}
_GRACE_S = {"coordinator": 60, "relay": 60, "learner": 900, "sampler": 900}


def render(run: RunFile, parts: Sequence[str] = ()) -> Tree:
    """The files of one namespace; of some parts alone where they are named.

    Raises:
        ConfigError: the run asks for what these files do not do.
    """
    refuse_plaintext(run, "Kubernetes")
    if run.learner.nnodes > 1:
        raise ConfigError("learner.nnodes", "one pod is one machine here", action="use slurm or systemd")
    if run.coordinator.data_dir:
        raise ConfigError("coordinator.data_dir", "a volume claim holds it on Kubernetes", action="remove it")
    nodes = nodes_of(run, dial="name", parts=parts)
    tree: Tree = {}
    for number, node in enumerate(nodes, start=1):
        tree[f"{number:02}-{node.name}.yaml"] = _file(run, node)
    tree |= certs_script(run, nodes, lambda node: f"credentials/{node.name}")
    tree["secrets.sh"] = _secrets(run, nodes)
    tree |= targets(run, nodes, name="coordinator")
    return tree | readme(run, nodes, "Kubernetes", table(nodes, lambda _: "where there is room"), _words(run, nodes))


def _labels(run: RunFile, node: Node) -> dict[str, str]:
    return {"app.kubernetes.io/part-of": project(run.run.id), "app.kubernetes.io/name": node.name}


def _file(run: RunFile, node: Node) -> str:
    labels = _labels(run, node)
    config = renumbered(node) | {"metrics_host": "0.0.0.0"}
    if node.port:
        config |= {"listen": f"0.0.0.0:{node.port}"}
    whole = complete(replace(node, config=config), state_dir=f"{STATE}/{node.name}", tls_dir="/tls")
    documents: list[dict[str, Any]] = [
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": node.name, "labels": labels},
            "data": {"node.toml": toml_text(node, run.run.id, whole)},
        }
    ]
    if node.port:
        ports = [{"name": "grpc", "port": node.port, "targetPort": node.port}]
        if node.kind == "coordinator":
            ports.append({"name": "metrics", "port": metrics_port(node), "targetPort": metrics_port(node)})
        spec = {"selector": labels, "ports": ports}
        documents.append(
            {"apiVersion": "v1", "kind": "Service", "metadata": {"name": node.name, "labels": labels}, "spec": spec}
        )
    documents.append(_stateful_set(run, node, labels))
    return yaml_text(f"{node.name} of run {run.run.id}.", *documents)


def _stateful_set(run: RunFile, node: Node, labels: dict[str, str]) -> dict[str, Any]:
    claim = {
        "metadata": {"name": "state"},
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": _DISK[node.kind]}}},
    }
    pod = {
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": _GRACE_S[node.kind],
        # fsGroup lets user 10001 read the secret and write the volume.
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": 10001,
            "runAsGroup": 10001,
            "fsGroup": 10001,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [_container(run, node)],
        "volumes": _volumes(node),
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": {"name": node.name, "labels": labels},
        "spec": {
            "replicas": 1,
            "serviceName": node.name,
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": pod},
            "volumeClaimTemplates": [claim],
        },
    }


def _container(run: RunFile, node: Node) -> dict[str, Any]:
    limits: dict[str, Any] = {}
    if memory := memory_limit(node, is_container=True):
        limits["memory"] = f"{memory.upper()}i"
    if node.num_gpus:
        limits["nvidia.com/gpu"] = node.num_gpus
    container: dict[str, Any] = {
        "name": node.kind,
        "image": f"{run.run.image}-{node.image}:{run.run.version}",
        "args": [*node.command, "--config=/etc/heterorl/node.toml", "--log=json"],
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "resources": {"requests": {"cpu": str(CPUS[node.kind])}, **({"limits": limits} if limits else {})},
        "volumeMounts": [
            {"name": "config", "mountPath": "/etc/heterorl", "readOnly": True},
            {"name": "tls", "mountPath": "/tls", "readOnly": True},
            {"name": "state", "mountPath": STATE},
            {"name": "tmp", "mountPath": "/tmp"},
            *(
                {"name": f"data-{number}", "mountPath": path, "readOnly": True}
                for number, path in enumerate(node.data_dirs)
            ),
        ],
    }
    if node.num_gpus:
        container["volumeMounts"].append({"name": "shm", "mountPath": "/dev/shm"})
    if "store" in node.config:
        password = {"name": "coordinator-postgres", "key": "password"}
        container["env"] = [{"name": "PGPASSWORD", "valueFrom": {"secretKeyRef": password}}]
    if node.port:
        container["ports"] = [{"name": "grpc", "containerPort": node.port}]
    if node.kind == "coordinator":
        tls = ["--ca", "/tls/ca.crt", "--cert", "/tls/node.crt", "--key", "/tls/node.key"]
        command = ["heterorl", "health", f"127.0.0.1:{node.port}", *tls]
        container["readinessProbe"] = {"exec": {"command": command}, "periodSeconds": 15, "timeoutSeconds": 10}
        # Nobody listens while a start waits for its store, or stands by: that is alive, too.
        script = f"(: <>/dev/tcp/127.0.0.1/{node.port}) 2>/dev/null || exit 0; exec {shlex.join(command)}"
        lives = {"exec": {"command": ["bash", "-c", script]}, "timeoutSeconds": 30}
        container["livenessProbe"] = {**lives, "periodSeconds": 60, "failureThreshold": 3}
    return container


def _volumes(node: Node) -> list[dict[str, Any]]:
    volumes: list[dict[str, Any]] = [
        {"name": "config", "configMap": {"name": node.name}},
        {"name": "tls", "secret": {"secretName": f"{node.name}-tls", "defaultMode": Octal(0o440)}},
        {"name": "tmp", "emptyDir": {"sizeLimit": "512Mi"}},
        *(
            {"name": f"data-{number}", "hostPath": {"path": path, "type": "Directory"}}
            for number, path in enumerate(node.data_dirs)
        ),
    ]
    if node.num_gpus:
        volumes.append({"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": f"{SHARED_MEMORY_GIB}Gi"}})
    return volumes


def _secrets(run: RunFile, nodes: tuple[Node, ...]) -> str:
    lines = [
        "#!/bin/bash",
        f"# Hands the certificates of run {run.run.id} to the cluster, in the namespace of the current context."
        f" Repeat it",
        "# after `heterorl certs renew`: running nodes take new files up.",
        "set -euo pipefail",
        'cd "$(dirname "${BASH_SOURCE[0]}")/credentials"',
        "secret() {",
        '  kubectl create secret generic "$1-tls" --from-file="$1" --dry-run=client -o yaml | kubectl apply -f -',
        "}",
        *(f"secret {node.name}" for node in nodes),
    ]
    return "\n".join([*lines, ""])


def _words(run: RunFile, nodes: Sequence[Node]) -> str:
    secrets = certs_words(
        run,
        "It writes credentials/NODE here. Then, where kubectl knows cluster and namespace:\n\n```\n./secrets.sh\n```",
    )
    stores = store_words(
        run,
        nodes,
        "PostgreSQL's password: `kubectl create secret generic coordinator-postgres --from-file=password`.",
        "add a volume that has it, of user 10001 and mode 0600, to each coordinator's StatefulSet; a role of its"
        " service account, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in its environment, need no file.",
    )
    paths = [path for path in dict.fromkeys((run.run.model_dir, *run.run.data_dirs)) if path.startswith("/")]
    data = ""
    if paths:
        data = (
            "Directories of the machines, readable by user 10001, wherever a learner or sampler may come to:"
            f" {', '.join(paths)}. Edit `volumes` where a claim or an image holds them."
        )
    images = (
        f"## Images\n\n`{run.run.image}-ROLE:{run.run.version}`, built from deploy/Dockerfile, where the cluster"
        f" finds them."
    )
    start = (
        "## Start\n\n```\nkubectl apply -f .\nkubectl get pods -w\n```\n\nNodes wait for what they need. They"
        " dial one another by"
        " the names of their Services; a site outside the cluster dials `coordinator.host` of run.toml, which"
        " your load"
        " balancer has to lead to Service `coordinator`. StatefulSets restart what ends, so delete them when the"
        " run is over."
    )
    return "\n\n".join(part for part in (images, data, secrets, stores, start) if part)
