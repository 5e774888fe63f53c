"""A learner's rank 0 in a process of its own, with its other ranks: does what it reads, a line of JSON a job.

A job is a configuration and a list of operations; the answer is a list of what each gave. `python -m
tests.support.rank_jobs NUM_RANKS TIMEOUT_S [COMPILER]` trains by DeepSpeed or FSDP2, on one machine or, where torchrun
starts it, on several; `run_job` does the same with any backend. COMPILER is what rank 0 compiles by, if not by torch's
own; `rank_processes` starts all of them.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import sys
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from heterorl.common.errors import HeterorlError
from heterorl.common.types.rollout import FinishReason
from heterorl.common.weights.arena import Arena
from heterorl.common.weights.payload import apply_payload
from heterorl.learner.learner_config import LearnerConfig
from heterorl.learner.publish.checkpoint_store import CheckpointStore, Cursor
from heterorl.learner.publish.version_payloads import PublishedHead, encode_version
from tests.support.training import random_groups, random_trajectories


def run_job(backend: Any, operations: list[list[Any]]) -> list[Any]:
    return [_operate(backend, *operation) for operation in operations]


def _operate(backend: Any, name: str, *arguments: Any) -> Any:
    try:
        return _OPERATIONS[name](backend, *arguments)
    except HeterorlError as error:
        return {"error": type(error).__name__, "message": str(error)}


def _train(backend: Any, seed: int, num_groups: int = 5) -> dict[str, Any]:
    groups = random_groups(num_groups, seed=seed)
    report = backend.train_step(groups, head_version=2, step=seed)
    numbers = {f"metric_{key}": value for key, value in backend.last_metrics.items()}
    return {**dataclasses.asdict(report), **_sums(backend), **numbers}


def _sums(backend: Any) -> dict[str, float]:
    """Over the newest step's rollouts, whatever their order."""
    found = backend.last_sequences
    return {f"sum_{part.name}": float(getattr(found, part.name).sum()) for part in dataclasses.fields(found)}


def _train_turns(backend: Any, seed: int) -> dict[str, Any]:
    """A step of rollouts of several turns, some of several sequences, one of them lost."""
    groups = random_trajectories(5, group_size=4, seed=seed)
    first = groups[0].group
    lost = dataclasses.replace(first.rollouts[1], finish_reason=FinishReason.TOOL_LOST, reward=7.0)
    rollouts = (first.rollouts[0], lost, *first.rollouts[2:])
    groups[0] = dataclasses.replace(groups[0], group=dataclasses.replace(first, rollouts=rollouts))
    report = backend.train_step(groups, head_version=2, step=seed)
    return {**dataclasses.asdict(report), **_sums(backend)}


def _train_rewarded(backend: Any, seed: int, reward: float) -> dict[str, Any]:
    """A step of which every rollout has this reward."""
    groups = []
    for queued in random_groups(5, seed=seed):
        rollouts = tuple(dataclasses.replace(rollout, reward=reward) for rollout in queued.group.rollouts)
        groups.append(dataclasses.replace(queued, group=dataclasses.replace(queued.group, rollouts=rollouts)))
    return dataclasses.asdict(backend.train_step(groups, head_version=2, step=seed))


def _train_routed(backend: Any, seed: int, num_experts: int, top_k: int, num_layers: int) -> dict[str, Any]:
    """A step on rollouts of which most have a record of experts that the routers would hardly choose."""
    rng = np.random.default_rng(seed)
    groups = []
    for queued in random_groups(5, seed=seed):
        rollouts = []
        for number, rollout in enumerate(queued.group.rollouts):
            num_read = queued.group.prompt_token_ids.size + rollout.token_ids.size - 1
            ids = rng.permuted(np.tile(np.arange(num_experts, dtype=np.uint8), (num_read, num_layers, 1)), axis=-1)
            record = ids[..., :top_k].tobytes() if number else b""
            rollouts.append(dataclasses.replace(rollout, routed_experts=record))
        group = dataclasses.replace(queued.group, rollouts=tuple(rollouts))
        groups.append(dataclasses.replace(queued, group=group))
    return dataclasses.asdict(backend.train_step(groups, head_version=2, step=seed))


def _train_bad(backend: Any, seed: int) -> dict[str, Any]:
    groups = random_groups(5, seed=seed)
    groups[3].group.rollouts[0].sampler_logprobs[0] = float("nan")
    report = backend.train_step(groups, head_version=2, step=seed)
    return {"is_applied": report.is_applied}


def _train_failing(backend: Any) -> None:
    """A step whose last pass has tokens of age 7; see `custom_losses.raising_on_age`."""
    groups = [*random_groups(3), *random_groups(1, max_tokens=1, version=-6)]
    backend.train_step(groups, head_version=1, step=1)


def _explode(backend: Any, seed: int) -> dict[str, Any]:
    """A loss that is finite, with a gradient that is not."""
    import torch

    hooks = [
        parameter.register_hook(lambda gradient: gradient * torch.inf) for parameter in backend.torch_model.parameters()
    ]
    report = backend.train_step(random_groups(5, seed=seed), head_version=2, step=seed)
    for hook in hooks:
        hook.remove()
    return {"is_applied": report.is_applied, "loss": report.loss}


def _store(backend: Any, path: str = "") -> str:
    arena = Arena(backend.layout)
    backend.store(arena)
    if path:
        np.save(path, np.concatenate([arena.view(name).reshape(-1) for name in arena.layout.offsets]))
    return str(arena.state_root())


def _load(backend: Any, path: str) -> str:
    arena, start = Arena(backend.layout), 0
    values = np.load(path)
    for name in arena.layout.offsets:
        view = arena.view(name)
        view[...] = values[start : start + view.size].reshape(view.shape)
        start += view.size
    backend.load_published(arena)
    return ""


def _save(backend: Any, directory: str) -> str:
    Path(directory).mkdir()
    backend.freeze(Path(directory))()
    return ""


def _freeze(backend: Any, directory: str, seed: int) -> dict[str, Any]:
    """Save beside a step."""
    Path(directory).mkdir()
    finish = backend.freeze(Path(directory))
    report = _train(backend, seed)
    finish()
    return report


def _checkpoint(backend: Any, root: str, version: int, seed: int, trained: str) -> str:
    """A checkpoint as a publication writes it, a step beside it, and a file when the step is taken."""
    store = CheckpointStore(Path(root))
    arena = Arena(backend.layout)
    backend.store(arena)
    position = PublishedHead(head_version=version - 1, lineage_version=-1, lineage_digest="", shadow=None)
    encoded = encode_version(
        position, arena, directory=Path(root).parent, run_id="r", epoch=1, step=version, with_snapshot=True
    )
    begun = store.begin(version, backend)
    _train(backend, seed)
    Path(trained).touch()
    cursor = Cursor(
        run_id="r", step=version, step_id="s", version=version, parent_version=-1, lineage_version=-1,
        state_root=encoded.manifest.state_root, manifest=encoded.manifest_bytes, consumed=(), reports=(),
    )  # fmt: skip
    store.write(cursor, begun=begun, arena=arena, snapshot=encoded.snapshot)
    return str(arena.state_root())


def _touch(_: Any, path: str) -> str:
    Path(path).touch()
    return ""


def _num_graphs(_: Any) -> int:
    import torch

    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def _publish(backend: Any, directory: str, snapshot: bool) -> dict[str, Any]:
    """Encode the weights with all ranks and in this process alone, each against the version before."""
    shadows = _SHADOWS.setdefault(backend, {})
    arena = Arena(backend.layout)
    backend.store(arena)
    found = {}
    for name, weights in (("alone", arena), ("together", backend.versions.stage())):
        folder = Path(directory) / name
        folder.mkdir(parents=True, exist_ok=True)
        position = PublishedHead(head_version=4, lineage_version=4, lineage_digest="", shadow=shadows.get(name))
        found[name] = encode_version(
            position, weights, directory=folder, run_id="r", epoch=1, step=5, with_snapshot=snapshot, threads=2
        )
        shadows[name] = weights
    alone, together = found["alone"], found["together"]
    return {
        "is_equal": alone.manifest_bytes == together.manifest_bytes
        and [path.read_bytes() for _, path in alone.files] == [path.read_bytes() for _, path in together.files],
        "files": [path.name for _, path in together.files],
        "num_chunks": arena.num_chunks,
        "num_changed": together.manifest.num_changed,
        "root": together.manifest.state_root,
    }


def _divide(backend: Any, path: str) -> str:
    """The root of weights from a snapshot file."""
    arena = Arena(backend.layout)
    apply_payload(Path(path), arena, expected_from_root=None)
    return str(backend.versions.divide(arena).state_root())


_SHADOWS: WeakKeyDictionary[Any, dict[str, Any]] = WeakKeyDictionary()
_OPERATIONS = {
    "publish": _publish,
    "divide": _divide,
    "train": _train,
    "train_turns": _train_turns,
    "train_bad": _train_bad,
    "train_failing": _train_failing,
    "train_rewarded": _train_rewarded,
    "train_routed": _train_routed,
    "explode": _explode,
    "store": _store,
    "load": _load,
    "save": _save,
    "freeze": _freeze,
    "checkpoint": _checkpoint,
    "touch": _touch,
    "num_graphs": _num_graphs,
    "restore": lambda backend, directory: backend.restore(Path(directory)),
}


def main() -> None:
    from heterorl.common.process import logs
    from heterorl.learner.backends.ranks.local_ranks import LocalRanks
    from heterorl.learner.backends.ranks.rank_env import rank_env_of
    from heterorl.learner.backends.ranks.rank_group import RankGroup
    from heterorl.learner.learner_parts import build_divided

    logs.configure(level="WARNING")
    place = rank_env_of(os.environ)
    if place is not None and place.rank:
        from heterorl.learner.rank_process import follow

        sys.exit(follow(place))
    if compilers := sys.argv[3:]:
        import torch

        torch.compile = functools.partial(torch.compile, backend=compilers[0])
    local = LocalRanks(int(sys.argv[1])) if place is None else None
    rank_group = RankGroup(place or local.rank_env, timeout_s=float(sys.argv[2]))
    for line in sys.stdin:
        number, table, operations = json.loads(line)
        config = LearnerConfig.model_validate(table)
        rank_group.rendezvous.say(config.to_text())
        try:
            backend = build_divided(config, rank_group.join(config))
        except HeterorlError as error:
            answer: list[Any] = [{"error": type(error).__name__, "message": str(error)}]
        else:
            answer = run_job(backend, operations)
            backend.stop()
        sys.stdout.write(f"ANSWER {number} {json.dumps(answer)}\n")
        sys.stdout.flush()
    rank_group.rendezvous.end()
    rank_group.leave()
    if local is not None:
        local.close()


if __name__ == "__main__":
    main()
