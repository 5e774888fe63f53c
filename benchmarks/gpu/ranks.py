"""FSDP2 and ZeRO with one rank against backend torch: published bits after the same steps."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from benchmarks.gpu.rows import Place, Rows

STEPS = 4
KINDS = ("torch", "fsdp2", "zero-1", "zero-2", "zero-3")


def run(rows: Rows, place: Place) -> None:
    """All kinds at once, each in a process; fp32 products, published in bf16."""
    from benchmarks.learner import write_model

    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        write_model(directory / "model", hidden_size=place.pick(512, 64), layers=place.pick(4, 1))
        begun = {}
        for kind in KINDS:
            if kind.startswith("zero") and find_spec("deepspeed") is None:
                rows.note(kind, "skipped: deepspeed is not installed")
                continue
            words = [kind, str(directory / "model"), place.device, str(directory / f"{kind}.npy")]
            command = [sys.executable, "-m", "benchmarks.gpu.ranks", *words]
            with (directory / f"{kind}.log").open("w") as log:
                begun[kind] = subprocess.Popen(command, stdout=log, stderr=log)
        first: np.ndarray | None = None
        for kind, process in begun.items():
            if process.wait():
                words = (directory / f"{kind}.log").read_text(encoding="utf-8").strip().splitlines()[-3:]
                rows.note(kind, f"failed: {' | '.join(words)[-400:]}")
                continue
            found = np.load(directory / f"{kind}.npy")
            if first is None:
                first = found
            else:
                same = float(np.mean(found == first))
                rows.add(f"{kind}: published weights with torch's bits", same, "", forecast=1.0)


def train(kind: str, model_dir: Path, device: str, out: Path) -> None:
    """Take the steps and write the bits of the published weights."""
    import torch

    from benchmarks.learner import queued_groups
    from heterorl.common.weights.arena import Arena
    from heterorl.learner.backends.ranks.rank_env import local_rank_env
    from heterorl.learner.backends.ranks.rank_group import RankGroup
    from heterorl.learner.backends.torch_backend import TorchBackend
    from heterorl.learner.backends.train_backend import TrainBackend
    from heterorl.learner.learner_config import LearnerConfig
    from heterorl.learner.learner_parts import build_divided
    from heterorl.learner.train.backend_config import TorchBackendConfig

    torch.backends.cuda.matmul.allow_tf32 = False
    is_zero = kind.startswith("zero")
    config = LearnerConfig.model_validate(
        {
            "model_dir": str(model_dir),
            "sampling": {"max_new_tokens": 64},
            "loss": {"kind": "gepo"},
            "backend": {
                "kind": "deepspeed" if is_zero else kind,
                "lr": 1e-5,
                "device": device,
                **({"stage": int(kind[-1])} if is_zero else {}),
            },
        }
    )
    with tempfile.TemporaryDirectory() as name:
        backend: TrainBackend
        if isinstance(config.backend, TorchBackendConfig):
            sampling = config.sampling.semantics()
            backend = TorchBackend(model_dir=model_dir, config=config.backend, loss=config.loss, sampling=sampling)
        else:
            rank_group = RankGroup(local_rank_env(0, num_ranks=1, file=Path(name) / "rendezvous"))
            backend = build_divided(config, rank_group.join(config))
        groups = queued_groups({"groups": 4, "group_size": 4, "max_tokens": 64})
        for step in range(1, STEPS + 1):
            backend.train_step(groups, head_version=0, step=step)
        arena = Arena(backend.layout)
        backend.store(arena)
        np.save(out, np.concatenate([arena.chunk(number) for number in range(arena.num_chunks)]))


if __name__ == "__main__":
    train(sys.argv[1], Path(sys.argv[2]), sys.argv[3], Path(sys.argv[4]))
