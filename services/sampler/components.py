"""Loads a sampler's components from its configuration: task, tokenizer, engine, contract. Blocking."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch

from heterorl.common.evaluation.evaluation_sets import ignored_draws
from heterorl.common.generation.inference_engine import Engine, ScoredText, canary_texts
from heterorl.common.model.contract import build_contract
from heterorl.common.model.model_directory import check_model_dir
from heterorl.common.tasks.sources.dataset_files import NOTES
from heterorl.common.tasks.sources.mixture import num_trained_on
from heterorl.common.tasks.task import Task, close_task
from heterorl.common.tasks.task_config import build_task
from heterorl.common.text.conversation import Conversations, try_reward, try_task
from heterorl.common.text.prompter import Prompter
from heterorl.common.types.common import Contract
from heterorl.common.weights.arena import Arena
from heterorl.sampler.engines import build_engines, take_variant
from heterorl.sampler.prompt_evaluator import SiteSet, naming_set, open_set, with_workers
from heterorl.sampler.sampler_config import SamplerConfig

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Components:
    """Arguments of `heterorl.sampler.sampler_app.join`, without coordinator and outbox."""

    engine: Engine
    task: Task
    prompter: Prompter
    contract: Contract
    base: Callable[[], Arena | None] = lambda: None
    """Weights of model_dir in the published type, until the engine loads others."""
    canary: tuple[ScoredText, ...] = ()
    """Texts on which the coordinator compares the engine with the learner; empty: no comparison."""
    sets: tuple[SiteSet, ...] = ()
    conversations: Conversations | None = None
    """Environments of the task; None if no prompt has one."""
    close: Callable[[], None] = lambda: None
    """Ends the reward processes and the engine's processes."""


def load_components(config: SamplerConfig, *, is_stopped: threading.Event | None = None) -> Components:
    """Load model, tokenizer and task.

    `is_stopped` gives up the start of an engine's process.

    Raises ConfigError: one of them cannot be loaded; DependencyMissing: the engine's package is not installed;
    EngineDied: the engine's own process does not start.
    """
    check_model_dir(config.model_dir)
    if config.engine.threads:
        torch.set_num_threads(config.engine.threads)
    prompter = Prompter.of(config)
    task = build_task(with_workers(config.task), measure=prompter.num_tokens, notes=config.state_dir / NOTES)
    # Before the model is loaded and before the coordinator counts on this site.
    conversations = try_task(config, task, prompter)
    if ignored := ignored_draws(config.evaluation):
        _LOG.warning(ignored)
    opened = []
    for each in config.evaluation:
        with naming_set(each.name):
            opened.append(open_set(each, measure=prompter.num_tokens, notes=config.state_dir / NOTES).played(prompter))
            try_reward(opened[-1].task, prompter)
        if num_known := num_trained_on(task, opened[-1].task):
            _LOG.warning(
                "evaluation.%s: the run trains on %d of its %d held-out prompts; name these in task.evaluation_path or"
                " evaluation_split at every node of the run",
                each.name, num_known, opened[-1].task.num_evaluation_prompts,
            )  # fmt: skip
    sets = tuple(opened)
    engines = build_engines(config, end_token_ids=prompter.end_token_ids, is_stopped=is_stopped)
    # The contract states the trained weights; a variant is another form of them.
    taken = take_variant(engines, config.variant)
    contract = build_contract(
        config,
        text=prompter.digests,
        task=task,
        layout_id=engines.engine.layout.layout_id,
        vocab_size=engines.vocab_size,
        end_token_ids=prompter.end_token_ids,
        lora=engines.lora,
        routed_token_bytes=engines.routed_token_bytes,
    )

    def close() -> None:
        for each in (task, *(one.task for one in sets)):
            close_task(each)
        engines.close()

    return Components(
        engine=taken.engine,
        task=task,
        prompter=prompter,
        contract=contract,
        conversations=conversations,
        base=taken.base,
        canary=canary_texts(task, prompter),
        sets=sets,
        close=close,
    )
