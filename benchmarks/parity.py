"""Differences of a divided learner from the torch backend after equal steps: backends, ZeRO stages, ranks, nodes.

Each row trains a random Qwen3 of 394 thousand parameters on the same groups from the same weights as the torch backend
does, in fp32 on CPUs over gloo; ranks are real processes, nodes agents of torchrun on loopback. `loss` is the largest
difference in a step, and `weights` that of any published element after the last one (fp32). `bf16_differing` is the
share of elements that differ where versions are published in bf16 and passes see them so: a master near the middle of
two bf16 values is rounded up by one and down by the other. `comes_back`: a checkpoint read by the same ranks gives the
next step bit for bit.

    python -m benchmarks.parity --out benchmarks/results/parity.json
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.load_memory import write_model
from heterorl.learner.backends.torch_backend import TorchBackend
from heterorl.learner.learner_config import LearnerConfig
from tests.support.rank_jobs import run_job
from tests.support.rank_processes import Ranks

PLACES = ((1, 1), (2, 1), (4, 1), (2, 2), (4, 2))
"""Ranks, and on how many nodes."""
BACKENDS: tuple[dict[str, Any], ...] = (
    {"kind": "fsdp2"},
    *({"kind": "deepspeed", "stage": stage} for stage in (0, 1, 2, 3)),
)
NUM_STEPS = 4


def _config(model_dir: Path, **backend: Any) -> LearnerConfig:
    return LearnerConfig.model_validate(
        {
            "model_dir": str(model_dir),
            "sampling": {"max_new_tokens": 16},
            "backend": {
                "lr": 1e-3, "warmup_steps": 2, "micro_batch_tokens": 64, "weight_decay": 0.01, "threads": 1, **backend,
            },
        }
    )  # fmt: skip


def _operations(directory: Path) -> list[list[Any]]:
    directory.mkdir()
    saved, last = str(directory / "saved"), ["train", NUM_STEPS]
    return [
        *(["train", step] for step in range(NUM_STEPS)), ["store", str(directory / "weights.npy")],
        ["save", saved], last, ["store"], ["restore", saved], last, ["store"],
    ]  # fmt: skip


def _alone(config: LearnerConfig, operations: list[list[Any]]) -> list[Any]:
    sampling = config.sampling.semantics()
    backend = TorchBackend(model_dir=config.model_dir, config=config.backend, loss=config.loss, sampling=sampling)
    return run_job(backend, operations)


def _losses(found: list[Any]) -> list[float]:
    return [answer["loss"] for answer in found if isinstance(answer, dict)][:NUM_STEPS]


def _weights(directory: Path) -> Any:
    return np.load(directory / "weights.npy")


def measure(directory: Path, places: tuple[tuple[int, int], ...] = PLACES) -> list[dict[str, Any]]:
    """All rows."""
    model_dir = directory / "model"
    write_model(model_dir, hidden_size=128, num_layers=2, vocab_size=512)
    torch_losses, torch_weights = [], {}
    for dtype in ("fp32", "bf16"):
        found = _alone(_config(model_dir, kind="torch", published_dtype=dtype), _operations(directory / dtype))
        torch_weights[dtype] = _weights(directory / dtype)
        if dtype == "fp32":
            torch_losses = _losses(found)
    backends = [options for options in BACKENDS if options["kind"] == "fsdp2" or find_spec("deepspeed") is not None]
    rows = []
    for num_ranks, num_nodes in places:
        ranks = Ranks(num_ranks, num_nodes=num_nodes)
        try:
            for options in backends:
                row = {"backend": options["kind"], "stage": options.get("stage"), "ranks": num_ranks}
                for dtype in ("fp32", "bf16"):
                    place = directory / "-".join(map(str, (*row.values(), num_nodes, dtype)))
                    found = ranks.ask(_config(model_dir, published_dtype=dtype, **options), _operations(place))
                    weights = _weights(place)
                    if dtype == "fp32":
                        pairs = zip(_losses(found), torch_losses, strict=True)
                        differences = weights.view(np.float32) - torch_weights[dtype].view(np.float32)
                        row |= {
                            "nodes": num_nodes,
                            "loss": max(abs(one - other) for one, other in pairs),
                            "weights": float(np.abs(differences).max()),
                            "comes_back": found[-1] == found[-4],
                        }
                    else:
                        is_other = weights.view(np.uint16) != torch_weights[dtype].view(np.uint16)
                        row |= {"elements": int(is_other.size), "bf16_differing": float(is_other.mean())}
                rows.append(row)
                print(json.dumps(row), flush=True)
        finally:
            code = ranks.close()
        assert code == 0, f"the ranks ended with code {code}"
    return rows


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="heterorl-parity-") as directory:
        rows = measure(Path(directory))
    if options.out is not None:
        result = {"unit": "largest difference to backend torch", "steps": NUM_STEPS, "rows": rows}
        result["processor"] = platform.processor()
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
