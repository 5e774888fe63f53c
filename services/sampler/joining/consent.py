"""Whether a site's file accepts what a stated task would make it read or run. Pure but for links in paths."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from heterorl.common.errors import ConfigError
from heterorl.common.tasks.sources.name import parse
from heterorl.sampler.acceptance import JoinConfig

_BUILT_IN = ("arithmetic", "progression", "reasoning_gym", "seeds", "mixture")
_OWN_REVISION = re.compile(r"[A-Za-z0-9._/-]*")
_FOREIGN_REVISION = re.compile(r"(/*refs(/|$)|[0-9a-f]{7,64}$)", re.IGNORECASE)
"""Of a hub's data set: what its owner did not name, such as a pull request, or a commit that may be one's."""
_INSTEAD = "state task in this file"
_STATE = f"or {_INSTEAD}"


def check_consent(task: Mapping[str, Any], join: JoinConfig) -> None:
    """See that every file, data set and function that a stated task names is accepted.

    Args:
        task: the stated keys of [task] that this node would adopt.
        join: what its operator accepts.

    Raises:
        ConfigError: names the key of [join] and what to add to it.
    """
    for source in (task, *_tables(task.get("sources", ()), "task.sources")):
        _check_source(source, join)
        _check_numbers(source, join)


def _tables(value: Any, key: str) -> Iterator[Mapping[str, Any]]:
    # What is no list is one entry that is no table.
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
        raise ConfigError("join.accept", f"the run's task is {kind!r}, which this program does not know")
    # Also without a name: the one of the file itself or of another source may take them.
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
        # With a colon the datasets library takes an address, file:// among them, or a file within another.
        if pattern.startswith(("/", "~")) or ":" in pattern or ".." in PurePosixPath(pattern).parts:
            problem = f"the run reads {pattern!r}, which leaves the data set"
            raise ConfigError("join.accept", problem, action=_INSTEAD)


def _check_hub(argument: str, join: JoinConfig) -> None:
    place = parse("task.name", argument)
    if place.is_local:
        _check_path("hf", place.place, join)
    elif f"hf:{place.place}@{place.revision}" in join.accept:
        return
    elif f"hf:{place.place}" not in join.accept:
        _refuse(f"the run's task reads the data set {place.place}", f"hf:{place.place}")
    elif not _OWN_REVISION.fullmatch(place.revision) or _FOREIGN_REVISION.match(place.revision):
        # Anybody may open a pull request at the hub, and its commits are found by their numbers.
        what = f"the run's task reads revision {place.revision!r} of the data set {place.place}, no branch or tag of it"
        _refuse(what, f"hf:{place.place}@{place.revision}")


def _check_path(kind: str, path: str, join: JoinConfig) -> None:
    # Links are followed on both sides: what counts is the file that would be read.
    if path.startswith("~"):
        raise ConfigError("join.accept", f"the run's task reads {path}: a home is another one at each site")
    try:
        target = Path(path).resolve()
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError("join.accept", f"the run's task reads {path!r}: {error}", action=_INSTEAD) from error
    for entry in join.accept:
        accepted, _, directory = entry.partition(":")
        # Of the hub, `hf:NAME` is no directory.
        is_directory = kind in ("jsonl", "parquet") or directory.startswith("/")
        if accepted == kind and is_directory and target.is_relative_to(Path(directory).resolve()):
            return
    _refuse(f"the run's task reads {target}", f"{kind}:{target.parent}")


def _check_numbers(source: Mapping[str, Any], join: JoinConfig) -> None:
    for key in ("size", "evaluation_size"):
        number = source.get(key, 0)
        if not isinstance(number, int) or number > join.max_prompts:
            raise ConfigError(
                "join.max_prompts", f"the run has task.{key} = {number!r}, and this file allows {join.max_prompts}",
                action=f"raise it, {_STATE}",
            )  # fmt: skip


def _refuse(what: str, entry: str) -> None:
    problem = f"{what}, which this file does not accept"
    raise ConfigError("join.accept", problem, action=f'add "{entry}" to it, {_STATE}')


def _refuse_kind(what: str) -> None:
    raise ConfigError(
        "join.accept", f"the run has a reward {what}, which is never adopted", action="state task.rewards in this file"
    )
