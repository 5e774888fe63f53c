"""From a short file and what the run's learner stated to a whole configuration. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from heterorl.common.errors import ConfigError
from heterorl.common.model.contract import without_local
from heterorl.common.process.config_words import problems_of
from heterorl.common.types.common import Contract
from heterorl.common.wire.statement import KEYS, Statement, contract_digest, leaves
from heterorl.sampler.acceptance import JoinConfig
from heterorl.sampler.config import SamplerConfig
from heterorl.sampler.joining.consent import check_consent

_REWARDS = ("reward", "rewards")
_BY_DIGEST = ("sampling.end_token_ids", "lora.target_modules")
"""Empty or in another order they may mean the same: the contract decides."""
_BOUNDS = (
    ("group_size", "max_group_size"), ("sampling.max_new_tokens", "max_new_tokens"), ("lora.rank", "max_lora_rank"),
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Adopted:
    """A whole configuration; `got` are the keys that the file left out, `other` those of [task] that it has otherwise.

    `contract` is the digest that must come of it.
    """

    config: SamplerConfig
    contract: str
    got: Mapping[str, Any]
    other: tuple[str, ...]

    def check(self, contract: Contract) -> None:
        """See that what was loaded is what the run agreed on.

        Raises:
            ConfigError: it is not; names the keys in which the file differs, if any.
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
    """What a file leaves to the run: of KEYS those that it states no part of."""
    return () if config.join is None else tuple(key for key in KEYS if key not in config.model_fields_set)


def adopt(config: SamplerConfig, statement: Statement) -> Adopted:
    """The configuration with what the run states where the file says nothing.

    Raises:
        ConfigError: [join] does not accept it, or the file states another value; names the key.
    """
    join = config.join
    assert join is not None, "who has no [join] adopts nothing"
    stated = {**statement.settings, "task": without_local(statement.settings["task"])}
    own = {key: _own(config, key) for key in KEYS if key in config.model_fields_set}
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


def _own(config: SamplerConfig, key: str) -> Any:
    return config.model_dump(mode="json", exclude_unset=True, include={key})[key]


def _placed(task: dict[str, Any], own: Mapping[str, Any], join: JoinConfig) -> dict[str, Any]:
    """With the directory of this site's code wherever code is named."""
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
        raise ConfigError("join", f"what the run states does not fit this file: {problem}") from error
