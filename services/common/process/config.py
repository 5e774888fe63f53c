"""Configuration: one TOML file per service, checked by pydantic, unknown keys refused with their path.

Precedence: `--set a.b=value` beats the file, the file beats the default; nothing else is read.
"""

from __future__ import annotations

import tomllib
import types
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from heterorl.common.errors import ConfigError
from heterorl.common.process.config_words import Problem, problems_of

_ACTION = "heterorl print-config SERVICE lists every key"


DIRECTORY = "directory"
"""Key of the validation context: the configuration file's directory, for paths that are meant from there."""


_PLAIN = (int, float, bool, type(None))


class _Text:
    """A text where a number is wanted, which nothing reads as one; shown as it is written."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return repr(self._text)


class Config(BaseModel):
    """Base of every configuration section: frozen, no unknown keys, docstrings under fields are the reference."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True)

    @model_validator(mode="before")
    @classmethod
    def _refuse_text_as_number(cls, table: object) -> object:
        """Text is no number and no truth, also where it reads like one."""
        if not isinstance(table, dict):
            return table
        plain = {name for name, field in cls.model_fields.items() if _is_plain(field.annotation)}
        return {name: _Text(each) if isinstance(each, str) and name in plain else each for name, each in table.items()}


def _is_plain(wanted: object) -> bool:
    kinds = get_args(wanted) if get_origin(wanted) in (Union, types.UnionType) else (wanted,)
    return all(kind in _PLAIN for kind in kinds)


ConfigT = TypeVar("ConfigT", bound=Config)


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """One key of a loaded configuration: its dotted path, its value and where the value came from."""

    key: str
    value: object
    source: str


def parse_override(text: str) -> tuple[list[str], Any]:
    """Split `a.b=value`; the value is read as TOML and, failing that, as a plain string."""
    path, separator, raw = text.partition("=")
    if not separator or not path.strip():
        raise ConfigError(text, "is not of the form key.path=value")
    try:
        value = tomllib.loads(f"value = {raw}")["value"]
    except tomllib.TOMLDecodeError:
        value = raw
    return path.strip().split("."), value


def read_tables(path: Path | None, overrides: Sequence[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """Merge file and overrides into one table; the second value maps dotted keys to `file` or `--set`."""
    table: dict[str, Any] = {}
    sources: dict[str, str] = {}
    if path is not None:
        try:
            table = tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError("--config", f"cannot read {path}: {error.strerror}") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError("--config", f"{path} is not TOML: {error}") from error
        sources.update({key: str(path) for key in flatten(table)})
    for text in overrides:
        keys, value = parse_override(text)
        section = table
        for key in keys[:-1]:
            section = section.setdefault(key, {})
            if not isinstance(section, dict):
                raise ConfigError(".".join(keys), f"{key} is a value, not a section")
        section[keys[-1]] = value
        sources[".".join(keys)] = "--set"
    return table, sources


class InvalidConfig(ConfigError):
    """Keys that are unknown or have values that they may not have: all of them, one a line."""

    def __init__(self, problems: Sequence[Problem], *, source: str) -> None:
        self.problems = tuple(problems)
        unknown = any(problem.is_unknown_key for problem in problems)
        super().__init__(problems[0].key, problems[0].text, action=_ACTION if unknown else None)
        if len(problems) > 1:
            lines = [f"{source} has {len(problems)} problems:", *map(str, problems), *([_ACTION] if unknown else [])]
            self.args, self.action = ("\n".join(lines),), ""
        elif not problems[0].key:
            self.args = (problems[0].text,)


def load(schema: type[ConfigT], path: Path | None, overrides: Sequence[str] = ()) -> ConfigT:
    """Read, merge and check a configuration.

    Raises:
        InvalidConfig: keys are unknown, or values out of bounds; names every one by its path.
        ConfigError: a file or an override cannot be read.
    """
    table, _ = read_tables(path, overrides)
    try:
        return schema.model_validate(table, context={DIRECTORY: path.parent if path is not None else ""})
    except ValidationError as error:
        source = str(path) if path is not None else "the configuration"
        raise InvalidConfig(problems_of(schema, error), source=source) from error


def flatten(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Map dotted keys to leaf values."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, dict):
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def explain(config: Config, sources: dict[str, str]) -> list[Resolved]:
    """List every key of a loaded configuration with the place its value came from."""
    flat = flatten(config.model_dump(mode="json"))
    return [Resolved(key=key, value=value, source=sources.get(key, "default")) for key, value in flat.items()]
