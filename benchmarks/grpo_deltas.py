"""Weight deltas of real GRPO steps at several learning rates, made by the learner's own backend and cached.

A Qwen3-architecture model of ten million parameters with weights of the usual magnitude (standard deviation 0.02) is
warmed up on sums, then trained by GRPO on rollouts of its own published bf16 weights, from fp32 masters. The first
steps after a fresh Adam change three times as many elements as later ones, so all rates branch off after BURN_IN steps
of the lowest; Adam's moments do not depend on the rate. Versions are kept as a snapshot and deltas.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress

from benchmarks.generated import generated
from heterorl.common.generation.hf_engine import HfEngine
from heterorl.common.generation.tiny_model import build_tokenizer
from heterorl.common.process.clock import SystemClock
from heterorl.common.tasks.task_config import TaskConfig, build_task
from heterorl.common.text.prompter import Prompter
from heterorl.common.types.common import LogprobMode, SamplingSemantics, SiteId
from heterorl.common.types.rollout import QueuedGroup, WorkAssignment
from heterorl.common.weights.arena import Arena, Layout
from heterorl.common.weights.payload import apply_payload, write_delta, write_snapshot
from heterorl.learner.backends.torch_backend import TorchBackend
from heterorl.learner.loss.loss_config import GrpoConfig
from heterorl.learner.train.backend_config import TorchBackendConfig
from heterorl.sampler.rollout.group_builder import GroupBuilder

BURN_IN = 16
DONE = "done.json"
VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What the deltas depend on; `steps` is the number of versions kept of each learning rate."""

    steps: tuple[tuple[float, int], ...] = ((1e-6, 24), (3e-6, 8), (1e-5, 8), (1e-4, 8))
    hidden_size: int = 384
    num_layers: int = 6
    warm_up_steps: int = 100
    groups: int = 8
    group_size: int = 8
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Versions of one learning rate: a snapshot of the first and a delta for each step."""

    lr: float
    directory: Path
    num_steps: int
    layout: Layout

    def states(self) -> Iterator[Arena]:
        """The first state and the state after each step; each an arena of its own."""
        arena = Arena(self.layout)
        apply_payload(self.directory / "first", arena, expected_from_root=None)
        yield arena.copy()
        for number in range(self.num_steps):
            apply_payload(self.directory / f"{number}", arena, expected_from_root=arena.state_root())
            yield arena.copy()


def make_runs(recipe: Recipe, *, cache: Path) -> list[Run]:
    """Train what the cache does not hold, and return one run a learning rate."""
    logging.getLogger("heterorl").setLevel(logging.ERROR)
    directory = _directory(recipe, cache)
    model_dir = directory / "model"
    if not (directory / DONE).exists():
        shutil.rmtree(directory, ignore_errors=True)
        model_dir.mkdir(parents=True)
        started = time.process_time()
        accuracy = _warm_up(recipe, model_dir)
        _train(recipe, directory)
        record = {"seconds": time.process_time() - started, "accuracy": accuracy, "recipe": asdict(recipe)}
        (directory / DONE).write_text(json.dumps(record), encoding="utf-8")
    layout = _backend(model_dir, lr=1e-6).layout
    return [Run(lr=lr, directory=directory / f"{lr:g}", num_steps=steps, layout=layout) for lr, steps in recipe.steps]


def record(recipe: Recipe, *, cache: Path) -> dict[str, Any]:
    """How the runs were made: processor seconds, accuracy after the warm-up, recipe."""
    made: dict[str, Any] = json.loads((_directory(recipe, cache) / DONE).read_text(encoding="utf-8"))
    return made


def _directory(recipe: Recipe, cache: Path) -> Path:
    key = hashlib.sha256(json.dumps([VERSION, torch.__version__, asdict(recipe)]).encode()).hexdigest()[:16]
    return cache / f"grpo-deltas-{key}"


def _task() -> Any:
    return build_task(TaskConfig(name="arithmetic", digits=1))


def _sampling() -> SamplingSemantics:
    return SamplingSemantics(temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=4, logprob_mode=LogprobMode.PROCESSED)


def _warm_up(recipe: Recipe, model_dir: Path) -> float:
    """Write a model that answers some sums; returns the share of right answers of the last batch."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = build_tokenizer()
    size = recipe.hidden_size
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=size,
        intermediate_size=3 * size,
        num_hidden_layers=recipe.num_layers,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=size // 6,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        initializer_range=0.02,
    )
    torch.manual_seed(recipe.seed)
    model: Any = Qwen3ForCausalLM(config)
    task = _task()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.0)
    accuracy = 0.0
    with Progress(transient=True) as progress:
        for _ in progress.track(range(recipe.warm_up_steps), description="warming up"):
            prompts = [task.prompt(int(torch.randint(task.num_prompts, ()))) for _ in range(32)]
            rows = torch.tensor(
                [[*tokenizer.encode(prompt.text + prompt.answer), tokenizer.eos_token_id] for prompt in prompts]
            )
            logits = model(input_ids=rows[:, :-1]).logits[:, -3:]
            loss = torch.nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), rows[:, -3:].reshape(-1))
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            accuracy = float((logits.argmax(-1) == rows[:, -3:]).all(-1).float().mean())
    model.save_pretrained(model_dir)
    tokenizer.save_pretrained(model_dir)
    return accuracy


def _backend(model_dir: Path, *, lr: float) -> TorchBackend:
    return TorchBackend(
        model_dir=model_dir, config=TorchBackendConfig(lr=lr, threads=1), loss=GrpoConfig(), sampling=_sampling()
    )


def _train(recipe: Recipe, directory: Path) -> None:
    model_dir = directory / "model"
    prompter = Prompter(str(model_dir), use_chat_template=False)
    engine = HfEngine(
        model_dir=str(model_dir),
        published_dtype="bf16",
        compute_dtype="fp32",
        device="cpu",
        sampling=_sampling(),
        batch_rows=recipe.groups * recipe.group_size,
        end_token_ids=prompter.end_token_ids,
    )
    maker = GroupBuilder(
        task=_task(),
        prompter=prompter,
        site=SiteId("bench"),
        incarnation="0" * 8,
        group_size=recipe.group_size,
        clock=SystemClock(),
    )
    backend = _backend(model_dir, lr=recipe.steps[0][0])
    state = directory / "burn-in"
    state.mkdir()
    with Progress(transient=True) as progress:
        bar = progress.add_task("GRPO steps", total=BURN_IN + sum(steps for _, steps in recipe.steps))
        for step in range(BURN_IN):
            _step(backend, maker, engine, recipe, step=step)
            progress.advance(bar)
        backend.freeze(state)()
        for lr, steps in recipe.steps:
            run = directory / f"{lr:g}"
            run.mkdir()
            backend = _backend(model_dir, lr=lr)
            backend.restore(state)
            before = Arena(backend.layout)
            backend.store(before)
            write_snapshot(run / "first", before)
            for number in range(steps):
                _step(backend, maker, engine, recipe, step=BURN_IN + number)
                after = Arena(backend.layout)
                backend.store(after)
                write_delta(run / f"{number}", before, after)
                before = after
                progress.advance(bar)
    shutil.rmtree(state)


def _step(backend: TorchBackend, maker: GroupBuilder, engine: HfEngine, recipe: Recipe, *, step: int) -> None:
    """One GRPO step on rollouts of the weights as published; repeated until some group has both rewards."""
    arena = Arena(backend.layout)
    backend.store(arena)
    engine.load(arena, step)
    for attempt in range(20):
        first = (attempt * 1000 + step) * recipe.groups
        work = [
            WorkAssignment(id=number, prompt_index=number % maker.task.num_prompts, seed=number, lease_s=60.0)
            for number in range(first, first + recipe.groups)
        ]
        groups = generated(maker, engine, work, state_root=arena.state_root(), first=first + 1)
        if any(len({rollout.reward for rollout in group.rollouts}) > 1 for group in groups):
            break
    else:
        raise RuntimeError("no group has two different rewards: the warm-up was too short or too long")
    backend.train_step(
        [QueuedGroup(group=group, policy_age_s=0.0, queue_age_s=0.0) for group in groups], head_version=step, step=step
    )
