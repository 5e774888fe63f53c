"""Evidence in the records of a run: states, repetitions and accuracy."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

from heterorl.common.process.files import journal_rows
from heterorl.common.process.threads import own_command
from heterorl.common.wire.policy_messages import manifest_from_bytes
from heterorl.learner.export import read_published
from heterorl.learner.publish.checkpoint_store import CheckpointStore
from heterorl_research.lab.statistics.intervals import interval
from tests.support.cluster import Cluster


def repeated(cluster: Cluster) -> int:
    """Versions and steps that took effect twice, in the learner's journal and the coordinator's store."""
    noted = Counter(row["version"] for row in journal_rows(cluster.directory / "learner" / "versions.jsonl"))
    connection = cluster.database()
    taken = Counter(step for (step,) in connection.execute("SELECT step FROM steps"))
    connection.close()
    return sum(count - 1 for count in (*noted.values(), *taken.values()))


def agreement(cluster: Cluster, samplers: list[str]) -> dict[str, Any]:
    """Whether manifests, learner, newest checkpoint and samplers agree on the state of every version.

    It replays the coordinator's payloads from version 0, and hashes the weights of the checkpoint.
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
    """Rows that differ from the coordinator's, and records that end before its head.

    The learner's may end one version earlier: a stop can come between the commit and its row, which the next start
    writes.
    """
    head = max(roots)
    found = [
        f"{name} {version}" for name, rows in records.items() for version, root in rows if roots.get(version) != root
    ]
    newest = {name: max((version for version, _ in rows), default=-1) for name, rows in records.items()}
    last = {name: (head - 1, head) if name == "learner" else (head,) for name in records}
    return found + [f"{name} ends at {version}" for name, version in newest.items() if version not in last[name]]


def seen(path: Path) -> list[tuple[int, str]]:
    """Version and state of each row of a journal."""
    return [(row["version"], row["state_root"]) for row in journal_rows(path)]


def checkpoint_roots(cluster: Cluster, *, head: int) -> list[tuple[int, str]]:
    """Version and state of the learner's checkpoints up to the head, computed from their bytes.

    A later checkpoint belongs to a version that was never published.
    """
    from transformers import AutoModelForCausalLM

    paths = CheckpointStore(cluster.directory / "learner" / "checkpoints").paths()
    model = AutoModelForCausalLM.from_pretrained(str(cluster.model_dir), dtype="float32")
    versions = [(int(path.name.lstrip("v")), path) for path in paths]
    return [(version, read_published(path, model).state_root()) for version, path in versions if version <= head]


def curve(cluster: Cluster) -> list[list[float]]:
    """Version and accuracy of each evaluation by the learner."""
    found = journal_rows(cluster.directory / "learner" / "evaluations.jsonl")
    return [[row["version"], round(row["accuracy"], 4)] for row in found]


def held_out(cluster: Cluster, *, head: int, samples: int = 4) -> dict[str, Any]:
    """Evaluate versions 0 and `head` with `heterorl evaluate` on all held-out prompts."""
    path = cluster.directory / "held-out.json"
    config = cluster.directory / "config" / "site-a.toml"
    subprocess.run(
        [
            *own_command("heterorl", "evaluate"), cluster.address, "--config", str(config), "--version", "0",
            "--version", str(head), "--prompts", "1000000", "--samples", str(samples), "--temperature", "1",
            "--out", str(path),
        ],
        check=True, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    return rise(json.loads(path.read_text()))


def rise(evaluated: dict[str, Any]) -> dict[str, Any]:
    """First and last evaluation, and their mean paired difference with its 95 % interval over prompts."""
    first, last = (_means(evaluated["evaluations"][at]) for at in (0, -1))
    found = interval([last[prompt] - value for prompt, value in first.items()])
    assert found is not None, "there are prompts"
    return {
        "prompts": found.num,
        "version": evaluated["evaluations"][-1]["version"],
        "before": round(sum(first.values()) / len(first), 4),
        "after": round(sum(last.values()) / len(last), 4),
        "rise": round(found.mean, 4),
        "rise_low": round(found.low, 4),
        "rise_high": round(found.high, 4),
    }


def _means(evaluation: dict[str, Any]) -> dict[int, float]:
    rewards = {one["prompt_index"]: [sample["reward"] for sample in one["samples"]] for one in evaluation["prompts"]}
    return {index: sum(values) / len(values) for index, values in rewards.items()}
