"""What the records of a run say in the end: of states, repetitions and accuracy."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

from heterorl.common.process.children import own_command
from heterorl.common.wire.policy import manifest_from_bytes
from heterorl.learner.export import read_published
from heterorl.learner.publish.checkpoint import CheckpointStore
from tests.support.cluster import Cluster


def rows(path: Path) -> list[dict[str, Any]]:
    """Of a journal whose torn last line is passed over."""
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")] if path.exists() else []


def repeated(cluster: Cluster) -> int:
    """Versions and steps that took effect twice: in the learner's own journal, and in the coordinator's store."""
    noted = Counter(row["version"] for row in rows(cluster.directory / "learner" / "versions.jsonl"))
    connection = cluster.database()
    taken = Counter(step for (step,) in connection.execute("SELECT step FROM steps"))
    connection.close()
    return sum(count - 1 for count in (*noted.values(), *taken.values()))


def agreement(cluster: Cluster, samplers: list[str]) -> dict[str, Any]:
    """Whether manifests, learner, its newest checkpoint and samplers have one state for every version.

    The payloads of the coordinator are replayed from version 0; the checkpoint's weights are read and hashed anew.
    """
    connection = cluster.database()
    found = list(connection.execute("SELECT version, state_root, manifest FROM versions"))
    connection.close()
    roots = {version: root for version, root, _ in found}
    records = {name: seen(cluster.directory / name / "versions.jsonl") for name in ("learner", *samplers)}
    records["manifests"] = [(version, manifest_from_bytes(data).state_root) for version, _, data in found]
    differing = differences(roots, records)
    records["checkpoints"] = checkpoint_roots(cluster, head=max(roots))
    differing += differences(roots, {"checkpoint": records["checkpoints"]})
    replayed = subprocess.run(
        [*own_command("heterorl", "verify-lineage"), str(cluster.directory / "coordinator"), "--replay"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if replayed.returncode:
        differing.append(f"replay: {replayed.stdout[-500:]}{replayed.stderr[-500:]}")
    return {
        "digests_equal": not differing,
        "digests_differing": differing,
        "digests_compared": {name: len(rows) for name, rows in records.items()},
    }


def differences(roots: dict[int, str], records: dict[str, list[tuple[int, str]]]) -> list[str]:
    """Rows of the records that do not say what the coordinator does, and records that end before its head."""
    head = max(roots)
    found = [
        f"{name} {version}" for name, rows in records.items() for version, root in rows if roots.get(version) != root
    ]
    newest = {name: max((version for version, _ in rows), default=-1) for name, rows in records.items()}
    return found + [f"{name} ends at {version}" for name, version in newest.items() if version != head]


def seen(path: Path) -> list[tuple[int, str]]:
    """Version and state of each row of a journal."""
    return [(row["version"], row["state_root"]) for row in rows(path)]


def checkpoint_roots(cluster: Cluster, *, head: int) -> list[tuple[int, str]]:
    """Version and state of the learner's checkpoints up to the head, from their own bytes.

    A later one is of a version that the end of the learner left unpublished.
    """
    from transformers import AutoModelForCausalLM

    paths = CheckpointStore(cluster.directory / "learner" / "checkpoints").paths()
    model = AutoModelForCausalLM.from_pretrained(str(cluster.model_dir), dtype="float32")
    versions = [(int(path.name.lstrip("v")), path) for path in paths]
    return [(version, read_published(path, model).state_root()) for version, path in versions if version <= head]


def accuracies(cluster: Cluster) -> dict[str, Any]:
    """Held-out accuracy of the first evaluation, and the mean of the last two."""
    found = [row["accuracy"] for row in rows(cluster.directory / "learner" / "evaluations.jsonl")]
    if len(found) < 3:
        return {"accuracy_before": 0.0, "accuracy_after": 0.0, "evaluations": found}
    return {"accuracy_before": found[0], "accuracy_after": round(sum(found[-2:]) / 2, 4), "evaluations": found}
