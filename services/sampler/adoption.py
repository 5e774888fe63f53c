"""Adoption of the run's configuration, within the bounds of [join].

`adopted` asks the coordinator before anything is loaded and waits for the learner's statement. `check_consent` judges
what the stated task would make this site read or run. `adopt` merges both.
"""

from __future__ import annotations

import asyncio
import logging
import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from pydantic import ValidationError

from heterorl.common.errors import ConfigError
from heterorl.common.model.contract import without_local
from heterorl.common.process.backoff import Backoff
from heterorl.common.process.clock import Clock
from heterorl.common.process.config_file import problems_of
from heterorl.common.rpc.maintenance import Diagnosis, DiagnosisClient
from heterorl.common.tasks.sources.dataset_files import parse
from heterorl.common.types.common import Contract
from heterorl.common.wire.statement import KEYS, Statement, contract_digest, leaves, statement_from_bytes
from heterorl.sampler.sampler_config import JoinConfig, SamplerConfig

_LOG = logging.getLogger(__name__)
_REWARDS = ("reward", "rewards")
_BY_DIGEST = ("sampling.end_token_ids", "lora.target_modules")
"""Keys whose values may differ in form and mean the same: the contract's digest decides."""
_BOUNDS = (
    ("group_size", "max_group_size"), ("sampling.max_new_tokens", "max_new_tokens"), ("lora.rank", "max_lora_rank"),
)  # fmt: skip
ASK_AGAIN_S = 2.0
_BUILT_IN = ("arithmetic", "progression", "reasoning_gym", "seeds", "mixture")
_INSTEAD = "state task in this file"
_STATE = f"or {_INSTEAD}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Adopted:
    """The whole configuration, with what the run stated.

    `got` has the adopted keys, `other` the keys of [task] that the file states differently. `contract` is the digest
    that the loaded components must give.
    """

    config: SamplerConfig
    contract: str
    got: Mapping[str, Any]
    other: tuple[str, ...]

    def check(self, contract: Contract) -> None:
        """Check that the loaded components give the run's contract.

        Raises ConfigError: they do not; names the keys in which the file differs, if any.
        """
        own = contract_digest(contract)
        if own == self.contract:
            return
        if self.other:
            problem = f"this file says otherwise than the run, and means something else: {'; '.join(self.other)}"
            raise ConfigError(self.other[0].partition(":")[0], problem, action="leave it out, or make it the same data")
        raise ConfigError(
            "join",
            f"with what the run states this node comes to the contract {own[:12]}, the run has {self.contract[:12]}",
            action="give it the run's model_dir, data and code; `heterorl doctor` names what differs",
        )


def missing_keys(config: SamplerConfig) -> tuple[str, ...]:
    """Keys of KEYS that the file leaves to the run."""
    return () if config.join is None else tuple(key for key in KEYS if key not in config.model_fields_set)


def adopt(config: SamplerConfig, statement: Statement) -> Adopted:
    """Merge the file with the run's statement.

    Raises ConfigError: [join] does not accept it, or the file states another value; names the key.
    """
    join = config.join
    assert join is not None, "only a file with [join] adopts"
    stated = {**statement.settings, "task": without_local(statement.settings["task"])}
    own: dict[str, Any] = config.model_dump(mode="json", exclude_unset=True, include=set(KEYS))
    if any(key in own.get("task", {}) for key in _REWARDS):
        stated["task"] = {key: value for key, value in stated["task"].items() if key not in _REWARDS}
    flat, flat_own = leaves(stated), leaves(own)
    other = tuple(
        f"{key}: the run has {flat[key]!r}, this file {flat_own[key]!r}"
        for key in flat_own
        if key in flat and flat_own[key] != flat[key] and key not in _BY_DIGEST
    )
    for difference in other:
        if not difference.startswith("task."):
            key, _, problem = difference.partition(": ")
            raise ConfigError(key, problem, action="leave it out, or give it the run's value")
    got = {key: value for key, value in flat.items() if key not in flat_own}
    data, taken = own.get("task", {}).get("data", {}), stated["task"].get("data", {})
    left = {key: taken[key] for key in taken.keys() - data.keys()} if data and isinstance(taken, Mapping) else {}
    name, of_run = (re.split(r"[@\[]", str(task.get("name", "")))[0] for task in (own.get("task", {}), stated["task"]))
    if left and name in ("", of_run):
        # A file with cache_dir, a key of one machine, leaves the columns to the run. Another data set has its own.
        own["task"]["data"] = {**left, **data}
        got["task.data"] = left
    check_consent({key[5:]: value for key, value in got.items() if key.startswith("task.")}, join)
    _check_bounds(got, join)
    values = {key: getattr(config, key) for key in config.model_fields_set}
    values |= {key: value for key, value in stated.items() if key not in own}
    for section in ("sampling", "lora"):
        values[section] = {**stated[section], **own.get(section, {})}
    values["task"] = _placed({**stated["task"], **own.get("task", {})}, own.get("task", {}), join)
    return Adopted(
        config=_validated(values), contract=statement.contract, got={key: got[key] for key in sorted(got)}, other=other
    )


def _placed(task: dict[str, Any], own: Mapping[str, Any], join: JoinConfig) -> dict[str, Any]:
    """Add this site's code directory to each key that names code."""
    if not any(key in own for key in _REWARDS):
        task = _with_code(task, join)
        if "reward_path" in own:
            task["reward_path"] = str(Path(join.reward_path) / own["reward_path"])
    if task.get("environment"):
        task["environment_path"] = str(Path(join.reward_path) / own.get("environment_path", ""))
    if "sources" in task and "sources" not in own:
        task["sources"] = [_with_code(dict(source), join) for source in task["sources"]]
    return task


def _with_code(source: dict[str, Any], join: JoinConfig) -> dict[str, Any]:
    for key in ("reward", "environment"):
        if source.get(key):
            source[f"{key}_path"] = join.reward_path
    if source.get("rewards"):
        source["rewards"] = [
            {**reward, "directory": join.reward_path} if reward["kind"] == "function" else reward
            for reward in source["rewards"]
        ]
    return source


def _check_bounds(got: Mapping[str, Any], join: JoinConfig) -> None:
    for key, bound in _BOUNDS:
        value, most = got.get(key, 0), getattr(join, bound)
        if not isinstance(value, int) or value > most:
            problem = f"the run has {key} = {value!r}, and this file allows {most}"
            raise ConfigError(f"join.{bound}", problem, action="raise it if this site has room for that")


def _validated(values: dict[str, Any]) -> SamplerConfig:
    try:
        return SamplerConfig.model_validate(values)
    except ValidationError as error:
        problem = problems_of(SamplerConfig, error)[0]
        action = "change this key of the site's file, or leave it out to adopt the run's value"
        raise ConfigError("join", f"what the run states does not fit this file: {problem}", action=action) from error


async def adopted(config: SamplerConfig, clock: Clock, stop: asyncio.Event) -> Adopted | None:
    """Adopt the run's statement, log each adopted key; None after `stop`.

    Raises ConfigError: [join] does not accept the statement, or there is none; RemoteError: the coordinator refuses
    this node.
    """
    asking = asyncio.ensure_future(_ask(config, clock))
    stopping = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({asking, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not asking.done():
            return None
        found = adopt(config, asking.result())
    finally:
        for task in (asking, stopping):
            task.cancel()
        await asyncio.gather(asking, stopping, return_exceptions=True)
    for key, value in found.got.items():
        _LOG.info("the sampler joins with %s = %.300r, as the run states it", key, value)
    return found


async def _ask(config: SamplerConfig, clock: Clock) -> Statement:
    backoff = Backoff(clock=clock, rng=random.Random())
    client = DiagnosisClient(config.coordinator, tls=config.tls, clock=clock, bandwidth=config.bandwidth)
    try:
        diagnosis = await backoff.retry(client.diagnose)
        if not statement_of(diagnosis):
            _LOG.info("the sampler waits until the learner of run %s states its settings", diagnosis.run_id)
        while not (statement := statement_of(diagnosis)):
            await clock.sleep(ASK_AGAIN_S)
            diagnosis = await backoff.retry(client.diagnose)
        return statement
    finally:
        await client.close()


def statement_of(diagnosis: Diagnosis) -> Statement | None:
    """The run's statement; None before the learner has come.

    Raises ConfigError: the learner states none.
    """
    if diagnosis.statement:
        return statement_from_bytes(diagnosis.statement)
    if diagnosis.contract is not None:
        problem = f"the learner of run {diagnosis.run_id} states no configuration"
        action = "state task, sampling, group_size, lora and template in this file, and leave [join] out"
        raise ConfigError("join", problem, action=action)
    return None


def check_consent(task: Mapping[str, Any], join: JoinConfig) -> None:
    """Check that [join] accepts an adopted task's files, datasets and functions.

    Raises ConfigError: names the key of [join] and what to add to it.
    """
    for source in (task, *_tables(task.get("sources", ()), "task.sources")):
        _check_source(source, join)
        _check_numbers(source, join)


def _tables(value: Any, key: str) -> Iterator[Mapping[str, Any]]:
    # A value that is not a list counts as one entry that is not a table.
    for entry in value if isinstance(value, list | tuple) else (None,):
        if not isinstance(entry, Mapping):
            raise ConfigError("join.accept", f"{key}: the run states {value!r} where tables belong", action=_INSTEAD)
        yield entry


def _check_source(source: Mapping[str, Any], join: JoinConfig) -> None:
    kind, _, argument = str(source.get("name", "arithmetic")).partition(":")
    if kind in ("jsonl", "parquet"):
        _check_path(kind, argument, join)
    elif kind == "hf":
        _check_hub(argument, join)
    elif kind not in _BUILT_IN:
        action = "install the coordinator's release of heterorl"
        raise ConfigError("join.accept", f"the run's task is {kind!r}, which this program does not know", action=action)
    # Also without a name: the file's own source, or another one, may use them.
    _check_patterns(source.get("data", {}))
    if held_out := source.get("evaluation_path"):
        _check_path(kind if kind in ("jsonl", "parquet") else "jsonl", str(held_out), join)
    for name in _functions(source):
        if f"reward:{name}" not in join.accept:
            _refuse(f"the run's reward is your own function {name}", f"reward:{name}")
    if (name := str(source.get("environment") or "")) and f"environment:{name}" not in join.accept:
        _refuse(f"the run's environment is {name}", f"environment:{name}")


def _functions(source: Mapping[str, Any]) -> Iterator[str]:
    if reward := str(source.get("reward", "")):
        if reward.startswith(("http://", "https://")):
            _refuse_kind(f"the service {reward}")
        yield reward
    for table in _tables(source.get("rewards", ()), "task.rewards"):
        kind = table.get("kind")
        if kind == "function":
            yield str(table.get("function"))
        elif kind != "match":
            _refuse_kind(f"of kind {kind!r}")


def _check_patterns(data: Any) -> None:
    patterns = data.get("files", ()) if isinstance(data, Mapping) else ()
    for pattern in map(str, patterns if isinstance(patterns, list | tuple) else (patterns,)):
        # With a colon the datasets library takes an address (also file://) or a file within another.
        if pattern.startswith(("/", "~")) or ":" in pattern or ".." in PurePosixPath(pattern).parts:
            problem = f"the run reads {pattern!r}, which leaves the data set"
            raise ConfigError("join.accept", problem, action=_INSTEAD)


def _check_hub(argument: str, join: JoinConfig) -> None:
    place = parse("task.name", argument)
    if place.is_local:
        _check_path("hf", place.place, join)
    elif (entry := f"hf:{place.place}@{place.revision}") not in join.accept:
        # A commit too: any user may open a pull request at the hub, and its commits are addressable.
        _refuse(f"the run's task reads revision {place.revision!r} of the data set {place.place}", entry)


def _check_path(kind: str, path: str, join: JoinConfig) -> None:
    # Both sides follow links: the file that would be read counts.
    if path.startswith("~"):
        problem = f"the run's task reads {path}: a home is another one at each site"
        action = "set task.name in the site's file, or let the learner name a path without ~"
        raise ConfigError("join.accept", problem, action=action)
    try:
        target = Path(path).resolve()
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError("join.accept", f"the run's task reads {path!r}: {error}", action=_INSTEAD) from error
    for entry in join.accept:
        accepted, _, directory = entry.partition(":")
        # `hf:NAME` of the hub is not a directory.
        is_directory = kind in ("jsonl", "parquet") or directory.startswith("/")
        if accepted == kind and is_directory and target.is_relative_to(Path(directory).resolve()):
            return
    _refuse(f"the run's task reads {target}", f"{kind}:{target.parent}")


def _check_numbers(source: Mapping[str, Any], join: JoinConfig) -> None:
    for key in ("size", "evaluation_size"):
        number = source.get(key, 0)
        if not isinstance(number, int) or number > join.max_prompts:
            problem = f"the run has task.{key} = {number!r}, and this file allows {join.max_prompts}"
            raise ConfigError("join.max_prompts", problem, action=f"raise it, {_STATE}")


def _refuse(what: str, entry: str) -> None:
    problem = f"{what}, which this file does not accept"
    raise ConfigError("join.accept", problem, action=f'add "{entry}" to it, {_STATE}')


def _refuse_kind(what: str) -> None:
    raise ConfigError(
        "join.accept", f"the run has a reward {what}, which is never adopted", action="state task.rewards in this file"
    )
