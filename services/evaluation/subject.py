"""What a command evaluates: sets of its configuration or options; a model's files, or versions of a run, pulled.

Loads tasks and models.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from pydantic import ValidationError

from heterorl.common.errors import ConfigError
from heterorl.common.evaluation.evaluation_sets import EvaluationSetConfig
from heterorl.common.generation.inference_engine import Engine
from heterorl.common.identity.signing import Trust
from heterorl.common.model.contract import LoraConfig
from heterorl.common.model.model_directory import check_model_dir
from heterorl.common.process.clock import SystemClock
from heterorl.common.process.config import InvalidConfig, problems_of
from heterorl.common.process.threads import num_threads
from heterorl.common.pull.puller import PulledVersion, Puller
from heterorl.common.rpc.client import CoordinatorClient
from heterorl.common.rpc.retry import RetryPolicy
from heterorl.common.tasks.task import Measure
from heterorl.common.text.prompter import Prompter
from heterorl.common.types.evaluation import EvaluationDraws
from heterorl.common.types.policy import NO_VERSION, PullPlan
from heterorl.common.weights.arena import Arena
from heterorl.sampler.config import SamplerConfig
from heterorl.sampler.engines import build_engines, take_variant
from heterorl.sampler.prompt_evaluator import SiteSet
from heterorl.sampler.prompt_evaluator import open_set as open_site_set

FROM_TASK = "task"
"""Name of the set that is made of the run's own task where none is configured."""
_OF_SAMPLING = ("temperature", "top_p", "max_new_tokens")
"""Keys of [sampling] that this set takes where the file states them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenSet(SiteSet):
    """A set whose data is loaded; `draws.num_prompts` is no more than it has."""

    draws: EvaluationDraws


def configured(config: SamplerConfig, *, names: Sequence[str], **changes: Any) -> tuple[EvaluationSetConfig, ...]:
    """The sets to evaluate: those of the configuration, or the task's own held-out prompts; each with the changes.

    The task's own prompts are drawn as [sampling] states, as far as it states how.

    Args:
        config: a sampler's.
        names: which of its sets; all where none is named.
        **changes: keys of a set that options override; None leaves the set's own.

    Raises:
        ConfigError: a name is not there, or a change cannot be.
    """
    sampling = config.sampling.model_dump(include=set(_OF_SAMPLING) & config.sampling.model_fields_set)
    sets = config.evaluation or (EvaluationSetConfig(name=FROM_TASK, task=config.task, **sampling),)
    known = {one.name: one for one in sets}
    for name in names:
        if name not in known:
            raise ConfigError("--only", f"there is no set {name}; there are {', '.join(known)}")
    stated = {key: value for key, value in changes.items() if value is not None}
    chosen = [known[name] for name in names] or list(sets)
    try:
        return tuple(EvaluationSetConfig.model_validate({**one.model_dump(), **stated}) for one in chosen)
    except ValidationError as error:
        raise InvalidConfig(problems_of(EvaluationSetConfig, error), source="the set") from error


def open_set(config: EvaluationSetConfig, *, measure: Measure | None = None, notes: Path | None = None) -> OpenSet:
    """Load a set's task, with its rewards in processes that can be killed.

    Args:
        config: of the set.
        measure: counts a prompt's tokens, for sets whose prompts are bounded.
        notes: see heterorl.common.tasks.task_config.build_task.

    Raises:
        ConfigError: its data cannot be read, or holds out nothing.
    """
    found = open_site_set(config, measure=measure, notes=notes)
    num = min(config.num_prompts, found.task.num_evaluation_prompts)
    draws = dataclasses.replace(config.draws, num_prompts=num)
    return OpenSet(name=found.name, task=found.task, tool_parser=found.tool_parser, draws=draws)


BUDGET_S = 30.0
"""What a call may be repeated for over a link that breaks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """An engine that generates with what is evaluated; `name` says what that is, `version` is -1 of a model's files."""

    name: str
    version: int
    engine: Engine
    prompter: Prompter
    end_token_ids: tuple[int, ...]
    max_trajectory_tokens: int
    """Of a completion of several turns."""


def prompter_of(config: SamplerConfig) -> Prompter:
    """The tokenizer of a configuration's model, and the way prompts go through it.

    Raises:
        ConfigError: there is none.
    """
    return Prompter(
        config.model_dir,
        use_chat_template=config.use_chat_template,
        template_arguments=config.chat_template_arguments,
    )


@contextmanager
def open_model(model_dir: str, config: SamplerConfig) -> Iterator[Subject]:
    """A model as its files are: neither a run's adapters nor a variant are put on it.

    Raises:
        ConfigError: it cannot be loaded.
    """
    with _engine(config.model_copy(update={"model_dir": model_dir, "lora": LoraConfig(), "variant": ""})) as opened:
        subject, _ = opened
        yield replace(subject, name=model_dir)


@contextmanager
def open_versions(address: str, versions: list[int], config: SamplerConfig) -> Iterator[Iterator[Subject]]:
    """Versions of a run, one after another, with the engine of the sampler that the configuration describes.

    Args:
        address: host:port of the coordinator.
        versions: to pull; -1 is the newest one.
        config: a sampler's; its certificate asks, its trusted keys judge.

    Raises:
        UntrustedVersion: no trusted key signed one of them.
        UnknownVersion: there is none of this number, or no payloads lead to it any more.
        Unreachable: the coordinator does not answer.
    """
    with _engine(config) as (subject, base), TemporaryDirectory(prefix="heterorl-evaluate-") as spool:

        def each() -> Iterator[Subject]:
            held: PulledVersion | None = None
            for version in versions:
                held = asyncio.run(_pull(address, version, config, subject.engine, base, held, Path(spool)))
                subject.engine.load(held.arena, held.version)
                yield replace(subject, name=f"version {held.version}", version=held.version)

        yield each()


@contextmanager
def _engine(config: SamplerConfig) -> Iterator[tuple[Subject, Callable[[], Arena | None]]]:
    check_model_dir(config.model_dir)
    if config.engine.threads:
        torch.set_num_threads(config.engine.threads)
    prompter = prompter_of(config)
    ends = config.sampling.end_token_ids or prompter.end_token_ids
    with TemporaryDirectory(prefix="heterorl-engine-") as directory:
        own = config.model_copy(update={"state_dir": Path(directory)})
        engines = build_engines(own, config.sampling.semantics(), end_token_ids=ends)
        taken = take_variant(engines, config.variant)
        try:
            subject = Subject(
                name="", version=NO_VERSION, engine=taken.engine, prompter=prompter, end_token_ids=ends,
                max_trajectory_tokens=config.sampling.max_trajectory_tokens,
            )  # fmt: skip
            yield subject, taken.base
        finally:
            engines.close()


async def _pull(
    address: str,
    version: int,
    config: SamplerConfig,
    engine: Engine,
    base: Callable[[], Arena | None],
    held: PulledVersion | None,
    spool: Path,
) -> PulledVersion:
    trust = Trust(config.trusted_keys)

    async def admit(plan: PullPlan) -> None:
        trust.check(plan.manifests[-1], plan.signature, version=plan.target_version)

    policy = RetryPolicy(budget_s=BUDGET_S)
    async with CoordinatorClient(address, tls=config.tls, policy=policy, bandwidth=config.bandwidth) as api:
        puller = Puller(
            api=api,
            spool=spool,
            layout=engine.layout,
            clock=SystemClock(),
            base=base,
            num_streams=config.pull_streams,
            threads=num_threads(config.engine.threads),
            variant=config.variant,
        )
        # Deltas lead forward only: what is older is built anew.
        is_ahead = held is not None and version != NO_VERSION and held.version > version
        return await puller.pull(held=None if is_ahead else held, want_version=version, admit=admit)
