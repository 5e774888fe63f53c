"""Peak memory of a learner's ranks while they load a model, a published version and a checkpoint.

For the torch backend and ZeRO's stages, with 1 and 2 ranks over gloo, each rank a real process: the peak of its
resident memory (VmHWM) beyond what it held before, with everything imported and a tiny model trained. The model is of
bf16 safetensors, as models are published, in two files. Pages of files that are mapped count as long as they are.

`--before CHECKOUT` measures another checkout's learner beside this one's, and says whether losses and published states
agree bit for bit.

    python -m benchmarks.load_memory --out benchmarks/results/load.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.costs import forget_peak, resident_bytes

ROOT = Path(__file__).resolve().parents[1]
KINDS = ("zero 3", "zero 2", "zero 1", "torch")
DTYPES = ("bf16", "fp32")
MB = 1e6


def write_model(directory: Path, *, hidden_size: int, num_layers: int, vocab_size: int = 8192) -> int:
    """Write a random model of bf16 weights in two files; returns its parameters."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            intermediate_size=2 * hidden_size,
            num_hidden_layers=num_layers,
            num_attention_heads=4,
            num_key_value_heads=4,
            head_dim=hidden_size // 4,
            max_position_embeddings=256,
            tie_word_embeddings=True,
        )
    ).to(torch.bfloat16)
    size = sum(parameter.numel() for parameter in model.parameters())
    model.save_pretrained(directory, max_shard_size=int(1.2 * size))
    return size


def backend_table(kind: str, dtype: str) -> dict[str, Any]:
    """The learner's table `backend` of a row."""
    common = {"compute_dtype": dtype, "threads": 1, "micro_batch_tokens": 64, "lr": 1e-4}
    return common if kind == "torch" else {"kind": "deepspeed", "stage": int(kind[-1]), **common}


def measure(job: dict[str, Any], *, checkout: Path = ROOT) -> dict[str, Any]:
    """Run one job in a process of its own.

    Args:
        job: `tiny` and `model_dir`, `kind`, `dtype`, `ranks`, and `operations`: of `load`, `step`, `store`, `save DIR`,
            `published` and `restore DIR`, in this order at most once each.
        checkout: whose learner.

    Returns:
        For each operation the peak of every rank in bytes beyond what it held before the model, `kept`: what it held
        when it was loaded, and `loss` and `root` of a step and a store.
    """
    environment = {**os.environ, "PYTHONPATH": f"{checkout / 'src'}:{checkout}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-P", str(Path(__file__).resolve()), "--job", json.dumps(job)],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=600,
    )
    line = next(line for line in done.stdout.splitlines() if line.startswith("ANSWER "))
    answer: dict[str, Any] = json.loads(line.removeprefix("ANSWER "))
    return answer


def _work(job: dict[str, Any]) -> dict[str, Any]:
    """The job, in its process: rank 0."""
    from heterorl.learner.backends.ranks.local_ranks import LocalRanks
    from heterorl.learner.backends.ranks.rank_group import RankGroup
    from heterorl.learner.learner_config import LearnerConfig
    from heterorl.learner.learner_parts import build_backend, build_divided

    def config(model_dir: str) -> LearnerConfig:
        table = {"model_dir": model_dir, "sampling": {"max_new_tokens": 16}, "loss": {"kind": "grpo"}}
        return LearnerConfig.model_validate({**table, "backend": backend_table(job["kind"], job["dtype"])})

    tiny, big = config(job["tiny"]), config(job["model_dir"])
    if job["kind"] == "torch":
        _operate(build_backend(tiny, 1)[0], "step", "")
        return _measured(lambda: build_backend(big, 1)[0], job["operations"], [os.getpid()])
    from heterorl.learner.backends.zero import import_deepspeed

    import_deepspeed("cpu")
    local = LocalRanks(job["ranks"])
    rank_group = RankGroup(local.rank_env)

    def divided(config: LearnerConfig) -> Any:
        rank_group.rendezvous.say(config.model_dump_json())
        return build_divided(config, rank_group.join(config))

    backend = divided(tiny)
    _operate(backend, "step", "")
    _operate(backend, "store", "")
    backend.stop()
    built: list[Any] = []

    def build() -> Any:
        built.append(divided(big))
        return built[0]

    answer = _measured(build, job["operations"], [os.getpid(), *(child.pid for child in local._children)])
    built[0].stop()
    rank_group.rendezvous.end()
    rank_group.leave()
    local.close()
    return answer


def _measured(build: Callable[[], Any], operations: Sequence[Sequence[str]], pids: Sequence[int]) -> dict[str, Any]:
    base = [resident_bytes(pid, "VmRSS") for pid in pids]
    answer: dict[str, Any] = {"base": base}
    backend: Any = None
    for name, *arguments in operations:
        for pid in pids:
            forget_peak(pid)
        found: Any = None
        if name == "load":
            backend = build()
        else:
            found = _operate(backend, name, *arguments)
        own, held = resident_bytes(pids[0]), resident_bytes(pids[0], "VmRSS")
        if len(pids) > 1:
            # The other ranks may not be through: a state is gathered from all of them. They send, and hold no more.
            _operate(backend, "store", "")
        peaks = [own, *(resident_bytes(pid) for pid in pids[1:])]
        kept = [held, *(resident_bytes(pid, "VmRSS") for pid in pids[1:])]
        answer[name] = [peak - start for peak, start in zip(peaks, base, strict=True)]
        if name == "load":
            answer["kept"] = [resident - start for resident, start in zip(kept, base, strict=True)]
        if found is not None:
            answer[{"step": "loss", "store": "root"}[name]] = found
    return answer


def _operate(backend: Any, name: str, directory: str = "") -> Any:
    from heterorl.common.weights.arena import Arena
    from tests.support.training import random_groups

    if name == "step":
        report = backend.train_step(random_groups(4, seed=0), head_version=2, step=0)
        return [report.loss, report.grad_norm, report.kl]
    if name in ("store", "published"):
        arena = Arena(backend.layout)
        backend.store(arena)
        if name == "store":
            return str(arena.state_root())
        backend.load_published(arena)
    elif name == "save":
        Path(directory).mkdir()
        backend.freeze(Path(directory))()
    else:
        backend.restore(Path(directory))
    return None


def _cells(kinds: Sequence[str]) -> list[tuple[str, str, int]]:
    every = [(kind, dtype, ranks) for ranks in (2, 1) for dtype in DTYPES for kind in kinds]
    return [cell for cell in every if cell[0] != "torch" or cell[2] == 1]


def _rows(checkouts: dict[str, Path], directory: Path, kinds: Sequence[str], width: int, layers: int) -> Iterator[Any]:
    tiny, model_dir = directory / "tiny", directory / "model"
    write_model(tiny, hidden_size=32, num_layers=1, vocab_size=64)
    size = write_model(model_dir, hidden_size=width, num_layers=layers)
    for kind, dtype, ranks in _cells(kinds):
        row: dict[str, Any] = {"backend": kind, "compute_dtype": dtype, "ranks": ranks, "parameters": size}
        exact = []
        for name, checkout in checkouts.items():
            saved = str(directory / f"{name}-{kind[-1]}-{dtype}-{ranks}")
            job = {"tiny": str(tiny), "model_dir": str(model_dir), "kind": kind, "dtype": dtype, "ranks": ranks}
            first = [["load"], ["published"], ["step"], ["store"], ["save", saved]]
            one = measure({**job, "operations": first}, checkout=checkout)
            other = measure({**job, "operations": [["load"], ["restore", saved]]}, checkout=checkout)
            shutil.rmtree(saved)
            peaks = {**{key: one[key] for key in ("load", "kept", "published")}, "restore": other["restore"]}
            row[name] = {key: [round(peak / MB, 1) for peak in value] for key, value in peaks.items()}
            exact.append(json.dumps([one["loss"], one["root"]]))
        if len(exact) > 1:
            row["is_bit_equal"] = len(set(exact)) == 1
        yield row


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--before", type=Path, help="a checkout whose learner is measured too")
    parser.add_argument("--kinds", nargs="+", default=KINDS, choices=KINDS)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--layers", type=int, default=14)
    parser.add_argument("--job", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        print("ANSWER " + json.dumps(_work(json.loads(options.job))), flush=True)
        return
    kinds = [kind for kind in options.kinds if kind == "torch" or find_spec("deepspeed") is not None]
    checkouts = {"after": ROOT} if options.before is None else {"before": options.before.resolve(), "after": ROOT}
    with tempfile.TemporaryDirectory(prefix="heterorl-load-") as directory:
        rows = []
        for row in _rows(checkouts, Path(directory), kinds, options.width, options.layers):
            rows.append(row)
            print(json.dumps(row), flush=True)
            if options.out is not None:
                result = {"unit": "MB of each rank beyond an idle one", "rows": rows, "processor": platform.processor()}
                options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
