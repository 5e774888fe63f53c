"""Engines with loaded weights to evaluate, and the evaluation sets."""

from __future__ import annotations

import asyncio
import random
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
from heterorl.common.process.backoff import Backoff
from heterorl.common.process.clock import SystemClock
from heterorl.common.process.config_file import InvalidConfig, problems_of
from heterorl.common.process.threads import num_threads
from heterorl.common.pull.puller import PulledVersion, TrustedPuller
from heterorl.common.rpc.calls import RetryPolicy
from heterorl.common.rpc.client import CoordinatorClient
from heterorl.common.rpc.maintenance import DiagnosisClient
from heterorl.common.tasks.task_config import names_rows
from heterorl.common.text.prompter import Prompter
from heterorl.common.types.common import Contract
from heterorl.common.types.evaluation import MAX_HELD_OUT
from heterorl.common.types.policy import NO_VERSION
from heterorl.common.weights.arena import Arena, Layout
from heterorl.sampler.adoption import adopted, missing_keys
from heterorl.sampler.engines import build_engines, take_variant
from heterorl.sampler.sampler_config import SamplerConfig

FROM_TASK = "task"
"""Name of the set made from the run's own task if none is configured."""
_OF_SAMPLING = ("temperature", "top_p", "max_new_tokens")
"""Keys of [sampling] that the task's own set takes if the file states them."""


def configured(
    config: SamplerConfig, *, names: Sequence[str], every_row: bool = False, **changes: Any
) -> tuple[EvaluationSetConfig, ...]:
    """The sets in `names` (empty: all), with `changes` of their keys.

    A change of None leaves its key. Without configured sets, or with `every_row`, the task's own prompts, drawn as
    [sampling] states. `every_row` draws all of a dataset unless `changes` bound them.
    Raises ConfigError: a name is unknown, or a change is invalid.
    """
    drawn: dict[str, Any] = config.sampling.model_dump(include=set(_OF_SAMPLING) & config.sampling.model_fields_set)
    if every_row and names_rows(config.task.name):
        drawn["num_prompts"] = MAX_HELD_OUT
    own = (EvaluationSetConfig(name=FROM_TASK, task=config.task, **drawn),)
    sets = own if every_row else config.evaluation or own
    known = {one.name: one for one in sets}
    for name in names:
        if name not in known:
            raise ConfigError("--only", f"there is no set {name}; there are {', '.join(known)}")
    stated = {key: value for key, value in changes.items() if value is not None}
    chosen = [known[name] for name in names] or list(sets)
    try:
        # Sections as they are: a dump loses which keys are set, and the configuration's directory.
        kept = [{key: getattr(one, key) for key in one.model_fields_set} for one in chosen]
        return tuple(EvaluationSetConfig.model_validate({**keys, **stated}) for keys in kept)
    except ValidationError as error:
        raise InvalidConfig(problems_of(EvaluationSetConfig, error), source="the set") from error


BUDGET_S = 30.0
"""Seconds for which a call is retried over a broken link, or a pull that brings no byte."""
CALL_S = 5.0
"""Seconds for which a pull retries one call; BUDGET_S bounds all of them."""


def joined(config: SamplerConfig, address: str) -> SamplerConfig:
    """A sampler's file with the keys that it leaves to the run.
    Raises ConfigError: [join] does not accept it, or the coordinator does not state it within BUDGET_S."""
    missing = missing_keys(config)
    if not missing:
        return config

    async def ask() -> SamplerConfig:
        async with asyncio.timeout(BUDGET_S):
            found = await adopted(config.model_copy(update={"coordinator": address}), SystemClock(), asyncio.Event())
        assert found is not None, "nothing stops it"
        return found.config

    try:
        return asyncio.run(ask())
    except TimeoutError as error:
        problem = f"{address} has not stated in {BUDGET_S:g} s what the file leaves to the run: {', '.join(missing)}"
        raise ConfigError("join", problem, action="start the run's coordinator, or state them in the file") from error


def stated_contract(config: SamplerConfig) -> Contract:
    """The contract of a sampler's run.
    Raises ConfigError: no learner has stated one; Unreachable: the coordinator does not answer."""

    async def ask() -> Contract | None:
        policy = RetryPolicy(budget_s=BUDGET_S)
        async with DiagnosisClient(config.coordinator, tls=config.tls, policy=policy) as api:
            return (await api.diagnose()).contract

    contract = asyncio.run(ask())
    if contract is None:
        raise ConfigError(
            "coordinator", f"the run at {config.coordinator} has no version yet", action="start its learner"
        )
    return contract


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """An engine with weights to evaluate; `version` is -1 for model files."""

    name: str
    version: int
    engine: Engine
    prompter: Prompter
    max_trajectory_tokens: int
    """Limit of a completion of several turns."""


@contextmanager
def open_model(model_dir: str, config: SamplerConfig) -> Iterator[Subject]:
    """A model's files, without a run's adapters or variant.
    Raises ConfigError: it cannot be loaded."""
    with _engine(config.model_copy(update={"model_dir": model_dir, "lora": LoraConfig(), "variant": ""})) as opened:
        subject, _ = opened
        yield replace(subject, name=model_dir)


@contextmanager
def open_versions(address: str, versions: list[int], config: SamplerConfig) -> Iterator[Iterator[Subject]]:
    """Versions of a run, one after another, with the configuration's engine.
    Version -1 is the newest. Raises UntrustedVersion: no trusted key signed one of them; UnknownVersion: it does not
    exist, or its payloads were deleted; Unreachable: no byte came in BUDGET_S."""
    with _engine(config) as (subject, base), TemporaryDirectory(prefix="heterorl-evaluate-") as spool:

        def each() -> Iterator[Subject]:
            held: PulledVersion | None = None
            for version in versions:
                held = pull_version(
                    address, version, config, layout=subject.engine.layout, base=base, held=held, spool=Path(spool)
                )
                subject.engine.load(held.arena, held.version)
                yield replace(subject, name=f"version {held.version}", version=held.version)

        yield each()


@contextmanager
def _engine(config: SamplerConfig) -> Iterator[tuple[Subject, Callable[[], Arena | None]]]:
    check_model_dir(config.model_dir)
    if config.engine.threads:
        torch.set_num_threads(config.engine.threads)
    prompter = Prompter.of(config)
    with TemporaryDirectory(prefix="heterorl-engine-") as directory:
        own = config.model_copy(update={"state_dir": Path(directory)})
        engines = build_engines(own, end_token_ids=prompter.end_token_ids)
        taken = take_variant(engines, config.variant)
        try:
            subject = Subject(
                name="", version=NO_VERSION, engine=taken.engine, prompter=prompter,
                max_trajectory_tokens=config.sampling.max_trajectory_tokens,
            )  # fmt: skip
            yield subject, taken.base
        finally:
            engines.close()


def pull_version(
    address: str,
    version: int,
    config: SamplerConfig,
    *,
    layout: Layout,
    spool: Path,
    base: Callable[[], Arena | None] = lambda: None,
    held: PulledVersion | None = None,
) -> PulledVersion:
    """Build and verify a version, -1 the newest.

    It starts from `held` or `base` if the coordinator knows a way. Raises as `open_versions`.
    """

    async def pull() -> PulledVersion:
        async with CoordinatorClient.of(asked, policy=RetryPolicy(budget_s=CALL_S)) as api:
            puller = TrustedPuller(
                api=api,
                spool=spool,
                layout=layout,
                backoff=Backoff(clock=SystemClock(), rng=random.Random(), cap_s=CALL_S, budget_s=BUDGET_S),
                trust=Trust(config.trusted_keys),
                base=base,
                num_streams=config.pull_streams,
                threads=num_threads(config.engine.threads),
                variant=config.variant,
            )
            return await puller.build(version, held=None if is_ahead else held)

    asked = config.model_copy(update={"coordinator": address})
    # Deltas lead only forward: an older version starts from a snapshot.
    is_ahead = held is not None and version != NO_VERSION and held.version > version
    return asyncio.run(pull())
