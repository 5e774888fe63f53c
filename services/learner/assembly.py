"""From a configuration to the parts of a learner: task, tokenizer, backend, contract, evaluator. Loads models."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch

from services.common.canary import canary_texts
from services.common.contract import build_contract
from services.common.errors import ConfigError
from services.common.prompts import Prompter
from services.common.signing import Signer, load_signer
from services.common.tasks.registry import build_task
from services.common.tasks.task import Task
from services.common.types import Contract
from services.learner.backends.backend import TrainBackend
from services.learner.backends.torch import TorchBackend
from services.learner.canary import Canary
from services.learner.config import LearnerConfig
from services.learner.evaluate import EngineGenerator, Evaluator
from services.learner.logprobs import logit_temperature


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What `services.learner.app.run` needs beside a coordinator."""

    backend: TrainBackend
    contract: Contract
    evaluator: Evaluator | None
    signer: Signer | None = None
    canary: Canary | None = None


def assemble(config: LearnerConfig) -> Parts:
    """Load the model and everything that goes with it.

    Raises:
        ConfigError: key, model, tokenizer or task cannot be loaded.
    """
    signer = None if config.signing_key is None else load_signer(config.signing_key)
    if not config.model_dir:
        raise ConfigError("model_dir", "is not set", action="name a Hugging Face directory or hub id")
    if config.backend.threads:
        torch.set_num_threads(config.backend.threads)
    task = build_task(config.task)
    prompter = Prompter(config.model_dir, use_chat_template=config.use_chat_template)
    sampling = config.sampling.semantics()
    backend = TorchBackend(
        model_dir=config.model_dir, config=config.backend, loss=config.loss, sampling=sampling, lora=config.lora
    )
    model: Any = backend.torch_model
    contract = build_contract(
        tokenizer=prompter.tokenizer,
        use_chat_template=config.use_chat_template,
        task=task,
        layout_id=backend.layout.layout_id,
        vocab_size=int(model.config.vocab_size),
        group_size=config.group_size,
        sampling=sampling,
        lora=backend.lora,
    )
    evaluator = _build_evaluator(config, task, prompter) if config.evaluation.every_versions else None
    canary = Canary(model, canary_texts(task, prompter), temperature=logit_temperature(sampling))
    return Parts(backend=backend, contract=contract, evaluator=evaluator, signer=signer, canary=canary)


def _build_evaluator(config: LearnerConfig, task: Task, prompter: Prompter) -> Evaluator:
    from services.common.generation.hf import HfEngine

    options = config.evaluation
    sampling = config.sampling.semantics()
    # One candidate makes every draw the most likely token; the temperature then does not matter.
    sampling = (
        dataclasses.replace(sampling, temperature=options.temperature, top_k=0, top_p=1.0)
        if options.temperature
        else dataclasses.replace(sampling, temperature=1.0, top_k=1, top_p=1.0)
    )
    engine = HfEngine(
        model_dir=config.model_dir,
        published_dtype=config.backend.published_dtype,
        compute_dtype=config.backend.compute_dtype,
        device=config.backend.device,
        sampling=sampling,
        batch_rows=options.batch_rows,
        eos_token_id=prompter.eos_token_id,
        lora=config.lora,
    )
    return Evaluator(
        task=task,
        generator=EngineGenerator(engine, prompter),
        num_prompts=options.num_prompts,
        num_per_prompt=options.num_per_prompt,
        seed=options.seed,
    )
