"""Time of a learner step under each loss, relative to the cheapest, on the same rollouts in one process.

A round takes one step with every loss, in random order; a loss's cost is the least of its times, because neighbours on
the machine only ever add to it. On the CPU the time is that of the process's own processor seconds; median wall-clock
seconds are reported too. One micro-batch and several are measured, because losses that couple rollouts read the step
twice if it does not fit one pass. The model is small, so that the losses' share is an upper bound for larger ones.

    python -m benchmarks.loss_step --out benchmarks/results/losses.json
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from pydantic import TypeAdapter
from torch import nn

from heterorl.common.types.common import Digest, SiteId
from heterorl.common.types.rollout import FinishReason, Group, GroupId, Rollout, Span
from heterorl.learner.backends.ranks.passes import alone
from heterorl.learner.loss.loss_config import LossConfig
from heterorl.learner.loss.loss_spec import ALGORITHMS
from heterorl.learner.train.batch import build_batch
from heterorl.learner.train.model import prepare
from heterorl.learner.train.step import apply_gradients

COMBINATIONS: dict[str, dict[str, Any]] = {
    "gspo, clip of gepo": {"kind": "gspo", "clip_on": "gepo"},
    "gepo, clip of gspo": {"kind": "gepo", "clip_on": "gspo"},
    "gepo, opsm": {"kind": "gepo", "opsm_threshold": 0.5},
    "gepo, ess step": {"kind": "gepo", "step_size": "ess"},
    "gepo, m2po mask": {"kind": "gepo", "m2_budget": 0.04},
}
VOCAB_SIZE = 4096
GOAL = 1.05


def build_model(device: str, hidden_size: int, layers: int) -> nn.Module:
    """A random Qwen3 model of the given width."""
    config = transformers.Qwen3Config(  # type: ignore[call-arg]
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=hidden_size // 64,
        num_key_value_heads=max(1, hidden_size // 128),
        head_dim=64,
        tie_word_embeddings=True,
        attn_implementation="sdpa",
    )
    torch.manual_seed(0)
    model: nn.Module = transformers.Qwen3ForCausalLM(config)
    prepare(model, gradient_checkpointing=False)
    return model.to(device)


def build_groups(num_groups: int, group_size: int, max_tokens: int) -> list[Group]:
    """Groups of random lengths and rewards, with log-probs near those of a random model."""
    rng = np.random.default_rng(0)
    groups = []
    for number in range(num_groups):
        rollouts = []
        for _ in range(group_size):
            length = int(rng.integers(max_tokens // 2, max_tokens + 1))
            rollouts.append(
                Rollout(
                    token_ids=rng.integers(0, VOCAB_SIZE, length).astype(np.int32),
                    sampler_logprobs=(-np.log(VOCAB_SIZE) + 0.1 * rng.standard_normal(length)).astype(np.float32),
                    spans=(Span(version=1, start=0, end=length),),
                    reward=float(rng.integers(0, 2)),
                    reward_parts=(),
                    finish_reason=FinishReason.EOS,
                )
            )
        groups.append(
            Group(
                id=GroupId(site=SiteId("bench"), incarnation="b1946ac9", sequence=number + 1),
                assignment=number,
                prompt_index=number,
                prompt_token_ids=rng.integers(0, VOCAB_SIZE, 32).astype(np.int32),
                rollouts=tuple(rollouts),
                oldest_version=1,
                state_root=Digest("0" * 64),
                generation_s=1.0,
            )
        )
    return groups


def step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    groups: list[Group],
    loss: LossConfig,
    *,
    micro_batch_tokens: int,
) -> None:
    """One whole optimizer step; the learning rate is 0, so every step does the same work on the same weights."""
    passes = alone(
        model,
        loss=loss,
        temperature=1.0,
        max_new_tokens=4096,
        micro_batch_tokens=micro_batch_tokens,
        batching="padded",
        # As dear as any other of its size, for losses that compare with a frozen model.
        reference=model,
    )
    samples = passes.accumulate(build_batch(groups, loss=loss, head_version=9))
    is_applied, _ = apply_gradients(
        model.parameters(), optimizer, loss=sum(sample.loss for sample in samples), lr=0.0, grad_clip=1.0
    )
    assert is_applied


def measure(
    run: Callable[[LossConfig], None], losses: dict[str, LossConfig], *, rounds: int, device: str
) -> dict[str, Any]:
    """Least cost of each loss as a ratio to the cheapest, and in seconds."""
    order = random.Random(0)
    cpu: dict[str, list[float]] = {name: [] for name in losses}
    wall: dict[str, list[float]] = {name: [] for name in losses}
    for number in range(rounds + 1):
        names = list(losses)
        order.shuffle(names)
        for name in names:
            if device != "cpu":
                torch.cuda.synchronize()
            started = time.process_time(), time.perf_counter()
            run(losses[name])
            if device != "cpu":
                torch.cuda.synchronize()
            if number:  # the first round warms caches and allocators
                cpu[name].append(time.process_time() - started[0])
                wall[name].append(time.perf_counter() - started[1])
    seconds = cpu if device == "cpu" else wall
    costs = {name: min(times) for name, times in seconds.items()}
    cheapest = min(costs, key=lambda name: costs[name])
    return {
        "cheapest": cheapest,
        "losses": {
            name: {
                "ratio_to_cheapest": round(costs[name] / costs[cheapest], 4),
                "step_s": round(costs[name], 5),
                "median_wall_s": round(statistics.median(wall[name]), 5),
            }
            for name in sorted(costs, key=lambda name: costs[name])
        },
        "over_goal": sorted(name for name in costs if costs[name] > GOAL * costs[cheapest]),
    }


def main() -> None:
    """Measure and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/losses.json"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--groups", type=int, default=2)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--hidden-size", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    arguments = parser.parse_args()
    if arguments.device == "cpu":
        torch.set_num_threads(1)
    adapter: TypeAdapter[LossConfig] = TypeAdapter(LossConfig)
    tables = {kind: {"kind": kind} for kind in ALGORITHMS} | COMBINATIONS
    losses = {name: adapter.validate_python(table) for name, table in tables.items()}
    model = build_model(arguments.device, arguments.hidden_size, arguments.layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    groups = build_groups(arguments.groups, arguments.group_size, arguments.max_tokens)
    whole = arguments.groups * arguments.group_size * (arguments.max_tokens + 32)
    results: dict[str, Any] = {
        "goal_ratio": GOAL,
        "device": torch.cuda.get_device_name() if arguments.device != "cpu" else platform.processor() or "cpu",
        "torch": torch.__version__,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "rollouts": arguments.groups * arguments.group_size,
        "completion_tokens": sum(rollout.token_ids.size for group in groups for rollout in group.rollouts),
        "rounds": arguments.rounds,
        "clock": "processor seconds, one thread" if arguments.device == "cpu" else "wall-clock seconds",
    }
    for name, budget in (("one micro-batch", whole), ("four micro-batches", whole // 4)):
        results[name] = measure(
            lambda loss, budget=budget: step(model, optimizer, groups, loss, micro_batch_tokens=budget),  # type: ignore[misc]
            losses,
            rounds=arguments.rounds,
            device=arguments.device,
        )
        for loss, numbers in results[name]["losses"].items():
            print(f"{name:20} {loss:22} {numbers['ratio_to_cheapest']:.3f} {numbers['step_s']:.3f} s", flush=True)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
