"""Peak memory of a rank in a step over long rollouts, whole and in slices.

One model, the same four rollouts of `--tokens` tokens and the same two ranks over gloo, each a real process of backend
fsdp2: with `sequence_parallel = 1` each rank passes two of the rollouts whole, with 2 both share the passes of all
four. What is measured is the peak of each rank's resident memory (VmHWM) in a step, beyond what it held before, after
a step over short rollouts; and the seconds of the step.

    python -m benchmarks.slices --out benchmarks/results/slices.json
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.load_memory import MB, ROOT, forget_peak, resident_bytes

RANKS = 2


def write_model(directory: Path, *, max_tokens: int, hidden_size: int = 256, num_layers: int = 2) -> int:
    """Write a random model; returns its parameters."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=1024,
            hidden_size=hidden_size,
            intermediate_size=4 * hidden_size,
            num_hidden_layers=num_layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=hidden_size // 4,
            max_position_embeddings=max_tokens,
            tie_word_embeddings=True,
        )
    )
    model.save_pretrained(directory)
    return sum(parameter.numel() for parameter in model.parameters())


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """Run a job in a process of its own: `model_dir`, `tokens` and `sequence_parallel`."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.slices", "--job", json.dumps(job)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=1800,
    )
    line = next(line for line in done.stdout.splitlines() if line.startswith("ANSWER "))
    answer: dict[str, Any] = json.loads(line.removeprefix("ANSWER "))
    return answer


def _groups(num_tokens: int) -> list[Any]:
    import numpy as np

    from tests.support.training import group, queued, rollout

    rng = np.random.default_rng(0)
    groups = []
    for number in range(2):
        members = [
            rollout(rng.integers(0, 1024, num_tokens).tolist(), [-7.0] * num_tokens, float(member)) for member in (0, 1)
        ]
        groups.append(queued(group(members, prompt=[1, 2, 3], sequence=number + 1)))
    return groups


def _work(job: dict[str, Any]) -> dict[str, Any]:
    """The job, in its process: rank 0."""
    from heterorl.learner.backends.ranks.local_ranks import LocalRanks
    from heterorl.learner.backends.ranks.rank_group import RankGroup
    from heterorl.learner.learner_config import LearnerConfig
    from heterorl.learner.learner_parts import build_divided

    config = LearnerConfig.model_validate(
        {
            "model_dir": job["model_dir"],
            "sampling": {"max_new_tokens": job["tokens"]},
            "loss": {"kind": "gepo"},
            "backend": {
                "kind": "fsdp2", "threads": 1, "micro_batch_tokens": job["tokens"], "lr": 1e-4,
                "forward_weights": "masters", "sequence_parallel": job["sequence_parallel"],
            },
        }
    )  # fmt: skip
    local = LocalRanks(RANKS)
    rank_group = RankGroup(local.rank_env)
    rank_group.rendezvous.say(config.model_dump_json())
    backend = build_divided(config, rank_group.join(config))
    backend.train_step(_groups(16), head_version=2, step=0)
    pids = [os.getpid(), *(child.pid for child in local._children)]
    groups = _groups(job["tokens"])
    base = [resident_bytes(pid, "VmRSS") for pid in pids]
    for pid in pids:
        forget_peak(pid)
    started = time.perf_counter()
    # Its last operation is one of all ranks, so that none is in a pass any more.
    report = backend.train_step(groups, head_version=2, step=1)
    step_s = time.perf_counter() - started
    peaks = [resident_bytes(pid) - start for pid, start in zip(pids, base, strict=True)]
    backend.stop()
    rank_group.rendezvous.end()
    rank_group.leave()
    local.close()
    return {"step_s": step_s, "peaks": peaks, "loss": report.loss, "grad_norm": report.grad_norm}


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--job", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        print("ANSWER " + json.dumps(_work(json.loads(options.job))), flush=True)
        return
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="heterorl-slices-") as directory:
        size = write_model(Path(directory), max_tokens=options.tokens + 8)
        for sharing in (1, 2):
            job = {"model_dir": directory, "tokens": options.tokens, "sequence_parallel": sharing}
            found = measure(job)
            rows.append(
                {
                    "sequence_parallel": sharing,
                    "ranks": RANKS,
                    "tokens": options.tokens,
                    "parameters": size,
                    "step_s": round(found["step_s"], 2),
                    "step_peak_mb": [round(peak / MB, 1) for peak in found["peaks"]],
                    "loss": found["loss"],
                    "grad_norm": found["grad_norm"],
                }
            )
            print(json.dumps(rows[-1]), flush=True)
    whole, sliced = rows
    result = {
        "unit": "MB of each rank at its peak in a step, beyond what it held before",
        "rows": rows,
        "memory_ratio": round(max(sliced["step_peak_mb"]) / max(whole["step_peak_mb"]), 3),
        "time_ratio": round(sliced["step_s"] / whole["step_s"], 3),
    }
    print(json.dumps({key: result[key] for key in ("memory_ratio", "time_ratio")}))
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
