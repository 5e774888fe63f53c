"""From a configuration to the parts of a learner: task, tokenizer, backend, contract, evaluator. Loads models."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from heterorl.common.errors import ConfigError
from heterorl.common.identity.signing import Signer, load_signer
from heterorl.common.model.canary import canary_texts
from heterorl.common.model.contract import build_contract
from heterorl.common.model.directory import check_model_dir
from heterorl.common.model.prompts import Prompter
from heterorl.common.model.trial import try_reward
from heterorl.common.tasks.registry import build_task
from heterorl.common.tasks.task import Task
from heterorl.common.types.common import NO_LORA, Contract
from heterorl.learner.backends.backend import TrainBackend
from heterorl.learner.backends.torch import TorchBackend
from heterorl.learner.backends.zero.backend import DeepSpeedBackend
from heterorl.learner.backends.zero.collectives import Collectives
from heterorl.learner.backends.zero.engine import import_deepspeed
from heterorl.learner.backends.zero.ranks import LocalRanks
from heterorl.learner.checks.examiner import Yardstick
from heterorl.learner.checks.replay import Replayer
from heterorl.learner.config import LearnerConfig
from heterorl.learner.evaluate import Evaluator
from heterorl.learner.progress import PassCount
from heterorl.learner.publish.canary import Canary
from heterorl.learner.train.config import DeepSpeedBackendConfig, TorchBackendConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What `heterorl.learner.app.join` needs beside a coordinator."""

    backend: TrainBackend
    contract: Contract
    evaluator: Evaluator | None = None
    signer: Signer | None = None
    canary: Canary | None = None
    yardstick: Yardstick | None = None
    passes: PassCount = field(default_factory=PassCount)
    """Where the backend says how far a step is."""
    close: Callable[[], None] = lambda: None
    """Ends the other ranks; for an orderly end, because they end with this process anyway."""


def assemble(config: LearnerConfig, *, num_ranks: int = 1) -> Parts:
    """Load the model and everything that goes with it; start the other ranks, if there are to be any.

    Raises:
        ConfigError: key, model, tokenizer or task cannot be loaded.
    """
    signer = None if config.signing_key is None else load_signer(config.signing_key)
    check_model_dir(config.model_dir)
    task = build_task(config.task)
    prompter = Prompter(config.model_dir, use_chat_template=config.use_chat_template)
    if config.verification.recompute_rewards or config.evaluation.every_versions:
        # Otherwise every group would be given up, one after another.
        try_reward(task, prompter)
    sampling = config.sampling.semantics()
    passes = PassCount()
    backend, close = build_backend(config, num_ranks, passes)
    model: Any = backend.torch_model
    contract = build_contract(
        tokenizer=prompter.tokenizer,
        use_chat_template=config.use_chat_template,
        task=task,
        layout_id=backend.layout.layout_id,
        vocab_size=int(model.config.vocab_size),
        group_size=config.group_size,
        sampling=sampling,
        end_token_ids=config.sampling.end_token_ids or prompter.end_token_ids,
        lora=backend.lora if isinstance(backend, TorchBackend) else NO_LORA,
    )
    evaluator = _build_evaluator(config, task, prompter) if config.evaluation.every_versions else None
    # In ZeRO stage 3 no rank alone has the weights, and versions are published without a canary.
    is_whole = isinstance(config.backend, TorchBackendConfig) or config.backend.stage < 3
    texts = canary_texts(task, prompter)
    canary = Canary(model, texts, temperature=sampling.logprob_temperature) if is_whole else None
    if config.verification.max_log_ratio > 0 and not is_whole:
        raise ConfigError("verification.max_log_ratio", "in ZeRO stage 3 no rank has the weights", action="set it to 0")
    replayer = None
    if config.verification.logprob_floor > 0:
        replayer = Replayer(
            model_dir=config.model_dir, device=config.verification.device, sampling=sampling, lora=contract.lora
        )
    yardstick = Yardstick(config=config.verification, task=task, prompter=prompter, replayer=replayer)
    return Parts(
        backend=backend,
        contract=contract,
        evaluator=evaluator,
        signer=signer,
        canary=canary,
        yardstick=yardstick,
        passes=passes,
        close=close,
    )


def build_backend(
    config: LearnerConfig, num_ranks: int, passes: PassCount | None = None
) -> tuple[TrainBackend, Callable[[], None]]:
    """The backend of rank 0, with the other ranks started, and what ends them.

    Raises:
        ConfigError: the backend is one process, or cannot be built.
        DependencyMissing: its package is not installed.
    """
    options = config.backend
    if isinstance(options, TorchBackendConfig):
        if num_ranks > 1:
            raise ConfigError("--nproc", "backend torch is one process", action="set backend.kind to deepspeed")
        if options.threads:
            torch.set_num_threads(options.threads)
        sampling = config.sampling.semantics()
        single = TorchBackend(
            model_dir=config.model_dir,
            config=options,
            loss=config.loss,
            sampling=sampling,
            lora=config.lora,
            passes=passes,
        )
        return single, lambda: None
    if config.lora.is_on:
        raise ConfigError("lora", "backend deepspeed trains all weights", action="remove [lora] or use backend torch")
    # Before processes are started, which would all miss it.
    import_deepspeed(options.device)
    local = LocalRanks(num_ranks)
    local.configure(config)
    ranks = join_ranks(config, rank=0, num_ranks=num_ranks, rendezvous=local.rendezvous)
    backend = build_deepspeed(config, ranks, passes)

    def close() -> None:
        backend.stop()
        local.close()
        ranks.leave()

    return backend, close


def join_ranks(config: LearnerConfig, *, rank: int, num_ranks: int, rendezvous: Path) -> Collectives:
    """Meet the other ranks of a learner that is divided; every rank calls it once."""
    # All cores for every rank would be threads that wait for each other.
    torch.set_num_threads(config.backend.threads or max(1, (os.cpu_count() or 1) // num_ranks))
    device = "cuda" if config.backend.device.startswith("cuda") else "cpu"
    return Collectives(rank=rank, world_size=num_ranks, rendezvous=rendezvous, device=device)


def build_deepspeed(config: LearnerConfig, ranks: Collectives, passes: PassCount | None = None) -> DeepSpeedBackend:
    """This rank's part of a backend that all ranks build together."""
    assert isinstance(config.backend, DeepSpeedBackendConfig)
    return DeepSpeedBackend(
        model_dir=config.model_dir,
        config=config.backend,
        loss=config.loss,
        sampling=config.sampling.semantics(),
        ranks=ranks,
        passes=passes,
    )


def _build_evaluator(config: LearnerConfig, task: Task, prompter: Prompter) -> Evaluator:
    from heterorl.common.generation.hf import HfEngine

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
        end_token_ids=config.sampling.end_token_ids or prompter.end_token_ids,
        lora=config.lora,
    )
    return Evaluator(
        task=task,
        engine=engine,
        prompter=prompter,
        num_prompts=options.num_prompts,
        num_per_prompt=options.num_per_prompt,
        seed=options.seed,
    )
