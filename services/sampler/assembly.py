"""From a configuration to what a sampler loads: task, tokenizer, engine, contract. Blocking; loads models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from services.common.canary import ScoredText, canary_texts
from services.common.contract import build_contract
from services.common.errors import ConfigError
from services.common.generation.engine import Engine
from services.common.generation.hf import HfEngine
from services.common.prompts import Prompter
from services.common.tasks.registry import build_task
from services.common.tasks.task import Task
from services.common.types import Contract
from services.common.weights.arena import Arena
from services.sampler.config import SamplerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What `services.sampler.app.join` needs beside a coordinator and an outbox."""

    engine: Engine
    task: Task
    prompter: Prompter
    contract: Contract
    base: Callable[[], Arena | None] = lambda: None
    """Weights of model_dir in the published type, until the engine loads others."""
    canary: tuple[ScoredText, ...] = ()
    """What the engine is compared with the learner on; none: it is not."""


def assemble(config: SamplerConfig) -> Parts:
    """Load model, tokenizer and task.

    Raises:
        ConfigError: one of them cannot be loaded.
    """
    if not config.model_dir:
        raise ConfigError("model_dir", "is not set", action="name a Hugging Face directory or hub id")
    if config.engine.threads:
        torch.set_num_threads(config.engine.threads)
    task = build_task(config.task)
    prompter = Prompter(config.model_dir, use_chat_template=config.use_chat_template)
    sampling = config.sampling.semantics()
    engine = HfEngine(
        model_dir=config.model_dir,
        published_dtype=config.published_dtype,
        compute_dtype=config.engine.compute_dtype,
        device=config.engine.device,
        sampling=sampling,
        batch_rows=config.engine.batch_rows,
        eos_token_id=prompter.eos_token_id,
        lora=config.lora,
    )
    contract = build_contract(
        tokenizer=prompter.tokenizer,
        use_chat_template=config.use_chat_template,
        task=task,
        layout_id=engine.layout.layout_id,
        vocab_size=engine.vocab_size,
        group_size=config.group_size,
        sampling=sampling,
        lora=engine.lora,
    )
    return Parts(
        engine=engine,
        task=task,
        prompter=prompter,
        contract=contract,
        base=engine.base,
        canary=canary_texts(task, prompter),
    )
