"""Forward passes of a learner: fp32 masters or the published rounding, in fp32 or bf16 products.

A pretrained model is trained on short sums by the learner's own backend; after every step the masters are rounded and
published, and an engine that loaded those bits draws the next step's rollouts, so staleness is 0 throughout. In one
process, without a network. Reward: 0.5 for a completion that begins with a number, 0.5 more for the right one.

For every version: how far the log-probs that the loss is computed with are from the engine's on the run's canary, as
the coordinator compares them (median, nats); what a canary scored with masters would state; the KL of sampler from
learner before the update; and bytes of the delta. At the start and the end: the reward of the published weights on
held-out prompts, with the same seeds.

    python -m benchmarks.forward --model DIR --out FILE [--steps 30] [--lr 5e-6 --lr 1e-6]
"""

from __future__ import annotations

import argparse
import json
import logging
import platform
import random
import re
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from rich.console import Console
from rich.table import Table

from benchmarks.generated import generated
from heterorl.common.generation.hf_engine import HfEngine
from heterorl.common.generation.inference_engine import ScoredText, canary_texts, generate_all
from heterorl.common.process.clock import SystemClock
from heterorl.common.tasks.task import Prompt, Task
from heterorl.common.text.prompter import Prompter
from heterorl.common.types.common import LogprobMode, SamplingSemantics, SiteId
from heterorl.common.types.rollout import QueuedGroup, RewardPart, WorkAssignment, total_reward
from heterorl.common.weights.arena import Arena
from heterorl.common.weights.payload import write_delta
from heterorl.common.wire.common_messages import bytes_digest
from heterorl.learner.backends.torch_backend import TorchBackend
from heterorl.learner.loss.loss_config import GepoConfig
from heterorl.learner.train.backend_config import TorchBackendConfig
from heterorl.learner.train.model import Canary, learner_logprobs
from heterorl.sampler.rollout.group_builder import GroupBuilder

CHOICES = (("masters", "fp32"), ("published", "fp32"), ("masters", "bf16"), ("published", "bf16"))
"""Weights, and type of the matrix products."""
BOUND = 0.1
"""Nats; half of the coordinator's default canary_threshold."""
SAMPLING = SamplingSemantics(temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=4, logprob_mode=LogprobMode.PROCESSED)


class Sums(Task):
    """Asks "7 + 5 =", with half of the reward for any number."""

    digest = bytes_digest(b"bench sums 1")

    def __init__(self) -> None:
        pairs = [(left, right) for left in range(1, 30) for right in range(1, 30)]
        random.Random(0).shuffle(pairs)
        self._held_out, self._training = pairs[:32], pairs[32:]
        self.num_prompts, self.num_evaluation_prompts = len(self._training), len(self._held_out)

    def prompt(self, index: int) -> Prompt:
        """The training prompt at a position."""
        return self._prompt(index, *self._training[index])

    def evaluation_prompt(self, index: int) -> Prompt:
        """The held-out prompt at a position."""
        return self._prompt(index, *self._held_out[index])

    def score(self, prompt: Prompt, completion: str) -> tuple[RewardPart, ...]:
        """Half for a number, half for the right one."""
        found = re.match(r"\s*(\d+)", completion)
        return (
            RewardPart(name="number", value=0.5 * (found is not None)),
            RewardPart(name="correct", value=0.5 * (found is not None and found[1] == prompt.answer)),
        )

    @staticmethod
    def _prompt(index: int, left: int, right: int) -> Prompt:
        return Prompt(index=index, text=f"{left} + {right} =", answer=str(left + right))


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """What all cells share."""

    model_dir: str
    device: str
    steps: int
    groups: int
    group_size: int
    task: Sums
    prompter: Prompter
    engine: HfEngine
    rounded: HfEngine
    """Computes in bf16; asked at the start and the end only."""
    texts: tuple[ScoredText, ...]


def make_bench(options: argparse.Namespace) -> Bench:
    """Load engines in fp32 and bf16."""
    model_dir, task = str(options.model), Sums()
    prompter = Prompter(model_dir, use_chat_template=False)

    def engine(dtype: str) -> HfEngine:
        return HfEngine(
            model_dir=model_dir,
            published_dtype="bf16",
            compute_dtype=dtype,
            device=options.device,
            sampling=SAMPLING,
            batch_rows=256,
            end_token_ids=prompter.end_token_ids,
        )

    return Bench(
        model_dir=model_dir,
        device=options.device,
        steps=options.steps,
        groups=options.groups,
        group_size=options.group_size,
        task=task,
        prompter=prompter,
        engine=engine("fp32"),
        rounded=engine("bf16"),
        texts=canary_texts(task, prompter),
    )


def run_cell(bench: Bench, *, weights: str, products: str, lr: float, start: float | None) -> dict[str, Any]:
    """Train `steps` versions with one choice; `start` is the reward of version 0, None where it is not known yet."""
    started = time.perf_counter()
    config = TorchBackendConfig.model_validate(
        {"lr": lr, "forward_weights": weights, "compute_dtype": products, "device": bench.device}
    )
    backend = TorchBackend(model_dir=bench.model_dir, config=config, loss=GepoConfig(), sampling=SAMPLING)
    canary = Canary(backend.torch_model, bench.texts, temperature=1.0)
    maker = GroupBuilder(
        task=bench.task,
        prompter=bench.prompter,
        site=SiteId("bench"),
        incarnation="0" * 8,
        group_size=bench.group_size,
        clock=SystemClock(),
    )
    published, versions = Arena(backend.layout), []
    backend.store(published)
    spare = Arena(backend.layout)
    for version in range(bench.steps + 1):
        bench.engine.load(published, version)
        row: dict[str, Any] = {"version": version, **_distances(bench, backend, canary, published, products, version)}
        versions.append(row)
        if version == 0:
            # The same for every choice, so computed once.
            row["held_out"] = _held_out(bench) if start is None else start
        if version == bench.steps:
            row["held_out"] = _held_out(bench)
        if version == bench.steps:
            break
        report = backend.train_step(_groups(bench, maker, version, published), head_version=version, step=version)
        backend.store(spare)
        with tempfile.TemporaryDirectory() as directory:
            info = write_delta(Path(directory) / "delta", published, spare)
        published, spare = spare, published
        row |= {
            "kl": report.kl,
            "iw_variance": report.iw_variance,
            "reward": report.reward_mean,
            "grad_norm": report.grad_norm,
            "is_applied": report.is_applied,
            "delta_bytes": info.num_bytes,
            "num_changed": info.num_changed,
            "step_s": round(report.step_s, 3),
        }
        print(weights, products, f"{lr:g}", json.dumps(row), flush=True)
    return {
        "weights": weights,
        "products": products,
        "lr": lr,
        "seconds": round(time.perf_counter() - started, 1),
        "versions": versions,
    }


def _distances(
    bench: Bench, backend: TorchBackend, canary: Canary, published: Arena, products: str, version: int
) -> dict[str, float]:
    """Median |difference| of log-probs of the canary, nats."""
    engine = np.concatenate(bench.engine.score(bench.texts))
    model = backend.torch_model
    batch = canary.batch.to(next(model.parameters()).device)

    def median(one: Any, other: Any) -> float:
        return float(np.median(np.abs(np.asarray(one, np.float64) - np.asarray(other, np.float64))))

    def logprobs(*, is_low: bool) -> Any:
        with torch.no_grad(), torch.autocast(bench.device.split(":")[0], torch.bfloat16, enabled=is_low):
            return learner_logprobs(model, batch, temperature=1.0)[0].float().cpu().numpy()

    with backend.computing():
        loss = logprobs(is_low=products == "bf16")
    stated = canary.score(published)
    found = {
        "loss": median(loss, engine),
        "masters": median(logprobs(is_low=False), engine),
        "stated": median(stated, engine),
    }
    if version in (0, bench.steps):
        bench.rounded.load(published, version)
        rounded = np.concatenate(bench.rounded.score(bench.texts))
        found |= {"loss_to_bf16_engine": median(loss, rounded), "stated_to_bf16_engine": median(stated, rounded)}
    return found


def _held_out(bench: Bench) -> float:
    prompts = [bench.task.evaluation_prompt(index) for index in range(bench.task.num_evaluation_prompts)]
    drawn = generate_all(
        bench.engine,
        [bench.prompter.encode(prompt.text) for prompt in prompts],
        seeds=range(len(prompts)),
        num_per_prompt=4,
    )
    return float(
        np.mean(
            [
                total_reward(bench.task.score(prompt, bench.prompter.completion(completion.token_ids, prompt)))
                for prompt, completions in zip(prompts, drawn, strict=True)
                for completion in completions
            ]
        )
    )


def _groups(bench: Bench, maker: GroupBuilder, version: int, published: Arena) -> list[QueuedGroup]:
    first = version * bench.groups
    work = [
        WorkAssignment(id=number, prompt_index=number % bench.task.num_prompts, seed=number, lease_s=60.0)
        for number in range(first, first + bench.groups)
    ]
    made = generated(maker, bench.engine, work, state_root=published.state_root(), first=first + 1)
    return [QueuedGroup(group=group, policy_age_s=0.0, queue_age_s=0.0) for group in made]


def table(cells: list[dict[str, Any]]) -> Table:
    """One line a cell."""
    shown = Table(
        "lr", "weights", "products", "loss off, end", "loss off, max", "to bf16 engine", "masters off, end",
        "masters over 0.1 at", "stated, max", "KL, mean", "KL, end", "held out, start", "end", "MB a delta",
        title="medians over the canary in nats; KL of sampler from learner per sequence, staleness 0",
    )  # fmt: skip
    for cell in cells:
        rows = cell["versions"]
        steps = [row for row in rows if "kl" in row]
        over = [row["version"] for row in rows if row["masters"] > BOUND]
        shown.add_row(
            f"{cell['lr']:g}", cell["weights"], cell["products"],
            f"{rows[-1]['loss']:.2g}", f"{max(row['loss'] for row in rows):.2g}",
            f"{rows[-1]['loss_to_bf16_engine']:.2g}", f"{rows[-1]['masters']:.2g}",
            str(over[0]) if over else "-", f"{max(row['stated'] for row in rows):.1g}",
            f"{np.mean([row['kl'] for row in steps]):.2g}", f"{np.mean([row['kl'] for row in steps[-5:]]):.2g}",
            f"{rows[0]['held_out']:.3f}", f"{rows[-1]['held_out']:.3f}",
            f"{np.mean([row['delta_bytes'] for row in steps]) / 1e6:.2f}",
        )  # fmt: skip
    return shown


def _kept(options: argparse.Namespace) -> list[dict[str, Any]]:
    if not (options.resume and options.out.exists()):
        return []
    record: dict[str, Any] = json.loads(options.out.read_text(encoding="ascii"))
    shape = (options.steps, options.groups, options.group_size, options.device, options.model.resolve().name)
    if shape != tuple(record[key] for key in ("steps", "groups_per_step", "group_size", "device", "model")):
        raise SystemExit(f"{options.out} is of other settings; write to another file")
    return list(record["cells"])


def main() -> None:
    """Run every cell, write the record after each one, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a Hugging Face directory")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=30, help="versions of each cell")
    parser.add_argument("--groups", type=int, default=2, help="groups of a step")
    parser.add_argument("--group-size", type=int, default=4)
    parser.add_argument("--lr", type=float, action="append", help="learning rates; default 5e-6 and 1e-6")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--resume", action="store_true", help="keep the cells that --out has")
    parser.add_argument("--threads", type=int, default=0, help="of torch on the CPU; 0 leaves its choice")
    options = parser.parse_args()
    logging.getLogger("heterorl").setLevel(logging.ERROR)
    transformers.logging.disable_progress_bar()
    if options.threads:
        torch.set_num_threads(options.threads)
    bench, cells = make_bench(options), _kept(options)
    for weights, products in CHOICES:
        for lr in options.lr or (5e-6, 1e-6):
            if any((cell["weights"], cell["products"], cell["lr"]) == (weights, products, lr) for cell in cells):
                continue
            start = cells[0]["versions"][0]["held_out"] if cells else None
            cells.append(run_cell(bench, weights=weights, products=products, lr=lr, start=start))
            record = {
                "model": options.model.resolve().name,
                "task": "sums of two numbers below 30, 0.5 for a number, 0.5 more for the right one, temperature 1",
                "groups_per_step": options.groups,
                "group_size": options.group_size,
                "steps": options.steps,
                "device": options.device,
                "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
                "machine": platform.machine(),
                "cells": cells,
            }
            options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="ascii")
    Console(width=200).print(table(cells))


if __name__ == "__main__":
    main()
