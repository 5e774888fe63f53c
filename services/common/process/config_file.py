"""Configuration: one TOML file a service, checked by pydantic.

Unknown keys are refused with their path.

Precedence: `--set a.b=value`, then the file, then the default.
"""

import difflib
import functools
import json
import re
import tomllib
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic.fields import FieldInfo

from heterorl.common.errors import ConfigError

PATTERNS = {
    r"^[A-Za-z0-9._-]{1,64}$": "a name of up to 64 letters, digits, dots, dashes and underscores",
    r"^[A-Za-z0-9._+-]+$": "a name of letters, digits, dots, dashes, underscores and plus signs",
    r"^[A-Za-z0-9-]{1,64}$": "a name of up to 64 letters, digits and dashes",
    r"^([A-Za-z0-9._=-]+(/[A-Za-z0-9._=-]+)*)?$": "words of letters, digits, dots, dashes, _ and =, joined by /",
    r"^([a-z0-9][a-z0-9.-]{1,61}[a-z0-9])?$": "a bucket: 3 to 63 small letters, digits, dots and dashes; or nothing",
    r"^(cpu|cuda(:[0-9]+)?)$": "cpu, cuda or cuda:N",
    r"^(https?://.+:[0-9]{1,5})?$": "http://host:port or https://host:port",
    r"^https?://[^\s]+$": "a url that begins with http:// or https://",
    r"^[A-Za-z_0-9]*$": "the name of an environment variable",
    r"^([0-9a-f]{64})?$": "64 hexadecimal digits, or nothing",
    r"^[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?$": "a host: a name or an address, without a port",
    r"^([A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?)?$": "a host: a name or an address, without a port; or nothing",
    r"^[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?(\.[a-z0-9]([a-z0-9-]{0,10}[a-z0-9])?){0,2}$": (
        "a site: small letters, digits and dashes, with at most two dots"
    ),
    r"^(\*\.)?[A-Za-z0-9:._-]{1,253}$": "a host, or `*.` and a domain for all hosts below it",
    r"^/[A-Za-z0-9._/@+-]*$": "a path from / of letters, digits and . _ / @ + -",
    r"^(/[A-Za-z0-9._/@+-]*)?$": "a path from / of letters, digits and . _ / @ + -, or nothing",
    r"^ed25519:[0-9a-f]{64}$": "a public key as `heterorl keys show` prints it: ed25519: and 64 hexadecimal digits",
}
"""Patterns of schemas in words; a test checks that none is missing."""
_BOUNDS = {
    "greater_than_equal": ("at least", "ge"),
    "greater_than": ("above", "gt"),
    "less_than_equal": ("at most", "le"),
    "less_than": ("below", "lt"),
}
_TYPES = {
    "int": "a whole number", "float": "a number", "bool": "true or false", "string": "text", "list": "a list",
    "tuple": "a list", "dict": "a table", "model": "a table", "model_attributes": "a table", "path": "a path",
    "finite_number": "a finite number",
}  # fmt: skip
_SHOWN = 60
_SECRET_NAMES = re.compile(r"(^|_)(url|endpoint|key|token|password|secret)$")
_USER_IN_ADDRESS = re.compile(r"://[^\s/]*@")
_RENAMED = {
    "canary_device": "swap_check_device",
    "canary_tolerance": "swap_check_tolerance",
    "explore": "outside_share",
    "kl_coefficient": "sampler_kl",
    "max_policy_age_s": "max_superseded_s",
    "seed": "delay_seed",
    "store_bytes": "payload_space_bytes",
}
"""Other names of keys, which a refusal answers with the right one."""
_ALIKE = 0.68
"""Least similarity of a suggestion; below it, pairs like `lr` and `lora` match."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One key and its problem; empty where several keys do not fit."""

    key: str
    text: str
    is_unknown_key: bool = False

    def __str__(self) -> str:
        return f"{self.key}: {self.text}" if self.key else self.text


def problems_of(schema: type[BaseModel], error: ValidationError) -> tuple[Problem, ...]:
    """Every problem that pydantic found, in its order."""
    found = error.errors()
    # A list without its refused entries is too short as well.
    within = {entry["loc"][:end] for entry in found for end in range(len(entry["loc"]))}
    kept = (entry for entry in found if entry["type"] != "too_short" or entry["loc"] not in within)
    return tuple(_problem(schema, entry) for entry in kept)


def all_keys(schema: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Dotted paths of all keys and sections, in all their kinds."""
    for name, field in schema.model_fields.items():
        yield prefix + name
        for inner in _models(field.annotation):
            yield from all_keys(inner, f"{prefix}{name}.")


def _problem(schema: type[BaseModel], entry: Any) -> Problem:
    path, models = _walk(schema, entry["loc"])
    key = ".".join(path)
    if entry["type"] == "extra_forbidden":
        return Problem(key=key, text=_unknown(schema, path, models), is_unknown_key=True)
    if entry["type"] == "union_tag_not_found" and isinstance(entry["input"], dict):
        name = path[-1].partition("[")[0]
        fields = [model.model_fields[name] for model in models if name in model.model_fields]
        kinds = [kind for field in fields for inner in _models(field.annotation) for kind in _kinds(inner)]
        return Problem(key=f"{key}.kind", text=f"is not set, and other keys depend on it; one of {', '.join(kinds)}")
    if entry["type"] == "union_tag_invalid" and isinstance(entry["input"], dict):
        key += ".kind"
    return Problem(key=key, text=_words(entry, key))


def _walk(schema: type[BaseModel], location: Sequence[int | str]) -> tuple[list[str], list[type[BaseModel]]]:
    """The user's path without pydantic's kinds, and the last section's models."""
    path: list[str] = []
    models: list[type[BaseModel]] = [schema]
    inside = models
    for part in location:
        fields: list[FieldInfo] = [m.model_fields[part] for m in inside if part in m.model_fields]
        chosen = [model for model in inside if part in _kinds(model)]
        if isinstance(part, int):
            path[-1] += f"[{part}]"
        elif len(inside) > 1 and chosen:
            models = inside = chosen
        else:
            path.append(part)
            models, inside = inside, list({m: None for field in fields for m in _models(field.annotation)})
    return path, models


def _unknown(schema: type[BaseModel], path: list[str], models: list[type[BaseModel]]) -> str:
    section: list[type[BaseModel]] = [schema]
    for name in path[:-1]:
        fields = [model.model_fields.get(name.partition("[")[0]) for model in section]
        section = list({found: None for field in fields if field is not None for found in _models(field.annotation)})
    own = [kind for model in models for kind in _kinds(model)]
    others = [kind for model in section if path[-1] in model.model_fields for kind in _kinds(model)]
    if own and others:
        return f"is a key of kind {', '.join(others)}, not of {', '.join(own)}; remove it"
    return f"unknown key{_meant(schema, path, models)}"


def _meant(schema: type[BaseModel], path: list[str], models: list[type[BaseModel]]) -> str:
    """Suggested keys: the same name elsewhere, else similar here, else similar anywhere."""
    *section, name = path
    known = dict.fromkeys(all_keys(schema))
    same = [key for key in known if key.rpartition(".")[2] == _RENAMED.get(name)]
    same = same or [key for key in known if key.rpartition(".")[2] == name]
    if not same:
        here = list(dict.fromkeys(key for model in models for key in model.model_fields))
        same = [".".join([*section, near]) for near in difflib.get_close_matches(name, here, n=1, cutoff=_ALIKE)]
    if not same:
        leaves = {key.rpartition(".")[2]: key for key in reversed(known)}
        same = [leaves[near] for near in difflib.get_close_matches(name, leaves, n=1, cutoff=0.75)]
    if not same:
        return ""
    if section and "." not in same[0]:
        return f"; did you mean {same[0]}, above the first [table] of the file?"
    return f"; did you mean {' or '.join(same[:3])}?"


def _words(entry: Any, key: str) -> str:
    kind, context, value = entry["type"], entry.get("ctx", {}), entry["input"]
    given = f"{value!r}" if len(repr(value)) <= _SHOWN else f"{repr(value)[:_SHOWN]}..."
    name = key.rpartition(".")[2].partition("[")[0].lower()
    if _SECRET_NAMES.search(name) or _USER_IN_ADDRESS.search(repr(value)):
        value = "***"
        context = {**context, "tag": value} if "tag" in context else context
        given = f"a {type(entry['input']).__name__} that is not shown"
    if kind == "missing":
        return "is not set"
    if kind == "path_type" and isinstance(entry["input"], _Other):
        return "must be a path, is empty; remove the key for its default"
    if kind == "string_pattern_mismatch":
        words = PATTERNS.get(context["pattern"], "of the form " + context["pattern"])
        hidden = f"must be {words} (the value is not shown, it may hold a secret)"
        return hidden if value == "***" else f"{given} is not {words}"
    if kind == "union_tag_invalid" and not isinstance(value, dict):
        return f"must be a table, is {given}"
    if kind in ("literal_error", "union_tag_invalid"):
        expected = str(context.get("expected", context.get("expected_tags"))).replace("'", "").replace(" or ", ", ")
        given = f"{context['tag']!r}" if kind == "union_tag_invalid" else given
        near = difflib.get_close_matches(str(context.get("tag", value)), expected.split(", "), n=1)
        expected = expected if expected[0] != "," else f"empty{expected}"
        return f"{given} is none of {expected}" + (f"; did you mean {near[0]}?" if near else "")
    if kind in _BOUNDS:
        word, bound = _BOUNDS[kind]
        least_or_most = context[bound]
        # `g` alone writes 1048576 as 1.04858e+06.
        text = f"{least_or_most:.0f}" if float(least_or_most).is_integer() else f"{least_or_most:g}"
        return f"must be {word} {text}, is {given}"
    wanted = _TYPES.get(kind.removesuffix("_type").removesuffix("_parsing").removesuffix("_from_float"))
    if wanted:
        return f"must be {wanted}, is {given}"
    return str(entry["msg"]).removeprefix("Value error, ")


def _models(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and get_origin(annotation) is None:
        return [annotation] if issubclass(annotation, BaseModel) else []
    is_union = get_origin(annotation) in (Union, types.UnionType)
    arguments = get_args(annotation)
    return [m for argument in (arguments if is_union else arguments[:1]) for m in _models(argument)]


def _kinds(model: type[BaseModel]) -> tuple[Any, ...]:
    field = model.model_fields.get("kind")
    return get_args(field.annotation) if field is not None and get_origin(field.annotation) is Literal else ()


DIRECTORY = "directory"
"""Key of the validation context: the configuration file's directory, for relative paths."""
_PLAIN = (int, float, bool, Path, type(None))


class _Other:
    """A text or boolean in place of a number, shown unchanged."""

    def __init__(self, value: str | bool) -> None:
        self._value = value

    def __repr__(self) -> str:
        return str(self._value).lower() if isinstance(self._value, bool) else repr(self._value)


class Config(BaseModel):
    """Base of configuration sections: frozen, no unknown keys, fields' docstrings as reference."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True, ser_json_inf_nan="constants"
    )

    reference: ClassVar[str] = "heterorl print-config SERVICE"
    """Lists every key."""

    def stated(self) -> dict[str, Any]:
        """Plain values of kinds, keys that are set, and paths."""
        # Validators fill paths.
        return _stated(self, self.model_dump(mode="json"))

    @model_validator(mode="before")
    @classmethod
    def _refuse_others_as_numbers(cls, table: object) -> object:
        """Refuse text for numbers and booleans, booleans for numbers, and empty paths."""
        if not isinstance(table, dict):
            return table
        kinds = {name: _plain_kinds(field.annotation) for name, field in cls.model_fields.items()}

        def is_other(kinds: tuple[object, ...], each: object) -> bool:
            if Path in kinds:
                return each == ""
            return isinstance(each, str) or (isinstance(each, bool) and bool not in kinds)

        return {
            name: _Other(each) if kinds.get(name) and is_other(kinds[name], each) else each
            for name, each in table.items()
        }


def _stated(section: BaseModel, dumped: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            inner = _stated(value, dumped[name])
            if inner or name in section.model_fields_set:
                found[name] = inner
        elif (
            name == "kind" or name in section.model_fields_set or value != field.get_default(call_default_factory=True)
        ):
            is_list = isinstance(value, tuple) and value and all(isinstance(each, BaseModel) for each in value)
            found[name] = [*map(_stated, value, dumped[name])] if is_list else dumped[name]
    return found


def _plain_kinds(wanted: object) -> tuple[object, ...]:
    kinds = get_args(wanted) if get_origin(wanted) in (Union, types.UnionType) else (wanted,)
    return kinds if all(kind in _PLAIN for kind in kinds) else ()


ConfigT = TypeVar("ConfigT", bound=Config)


def quoted(text: str) -> str:
    """A text as TOML has it."""
    # JSON's escapes are TOML's, except halves of pairs and this character.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def parse_override(text: str) -> tuple[list[str], Any]:
    """Split `a.b=value`; the value is TOML, or else a plain string."""
    path, separator, raw = text.partition("=")
    if not separator or not path.strip():
        raise ConfigError(text, "is not of the form key.path=value", action="write --set backend.lr=1e-6")
    try:
        table = tomllib.loads(f"value = {raw}")
    except tomllib.TOMLDecodeError:
        table = {}
    # A text of several lines may read like one value and other keys.
    return path.strip().split("."), table["value"] if table.keys() == {"value"} else raw


def read_tables(path: Path | None, overrides: Sequence[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """Merge file and overrides; sources map dotted keys to path or `--set`."""
    table: dict[str, Any] = {}
    sources: dict[str, str] = {}
    if path is not None:
        try:
            # A pipe gives its text once, and a command reads its file several times.
            table = tomllib.loads(path.read_text(encoding="utf-8-sig") if path.is_file() else _piped(path))
        except OSError as error:
            action = "check the path, and that this user can read the file"
            raise ConfigError("--config", f"cannot read {path}: {error.strerror}", action=action) from error
        except UnicodeDecodeError as error:
            raise ConfigError("--config", f"{path} is not UTF-8: {error}", action="save it as UTF-8") from error
        except tomllib.TOMLDecodeError as error:
            action = "correct this line; text needs quotes, and a [table] comes after the keys above it"
            raise ConfigError("--config", f"{path} is not TOML: {error}", action=action) from error
        sources.update({key: str(path) for key in flatten(table)})
    for text in overrides:
        keys, value = parse_override(text)
        section = table
        for key in keys[:-1]:
            section = section.setdefault(key, {})
            if not isinstance(section, dict):
                action = "write the keys below it in a [table] of this name, or remove the dot"
                raise ConfigError(".".join(keys), f"{key} is a value, not a section", action=action)
        section[keys[-1]] = value
        key = ".".join(keys)
        # A table takes the place of all that was below it.
        sources = {known: source for known, source in sources.items() if not f"{known}.".startswith(f"{key}.")}
        sources.update(dict.fromkeys(flatten({key: value}), "--set"))
    return table, sources


@functools.cache
def _piped(path: Path) -> str:
    return path.read_text(encoding="utf-8-sig")


class InvalidConfig(ConfigError):
    """All unknown keys and invalid values of a file, one a line."""

    def __init__(self, problems: Sequence[Problem], *, source: str, reference: str = Config.reference) -> None:
        self.problems = tuple(problems)
        action = f"{reference} lists every key" if any(problem.is_unknown_key for problem in problems) else None
        super().__init__(problems[0].key, problems[0].text, action=action)
        if len(problems) > 1:
            lines = [f"{source} has {len(problems)} problems:", *map(str, problems), *([action] if action else [])]
            self.args, self.action = ("\n".join(lines),), ""
        elif not problems[0].key:
            self.args = (problems[0].text,)


def load(schema: type[ConfigT], path: Path | None, overrides: Sequence[str] = ()) -> ConfigT:
    """Read, merge and check a configuration.

    Raises:
        InvalidConfig: keys are unknown or values out of bounds; names every path.
        ConfigError: a file or an override cannot be read.
    """
    table, _ = read_tables(path, overrides)
    try:
        return schema.model_validate(table, context={DIRECTORY: path.parent if path is not None else ""})
    except ValidationError as error:
        source = str(path) if path is not None else "the configuration"
        raise InvalidConfig(problems_of(schema, error), source=source, reference=schema.reference) from error


def checked(check: Callable[..., object], *arguments: object) -> None:
    """Call a check of the start from a validator.
    Raises ValueError: the check's ConfigError."""
    try:
        check(*arguments)
    except ConfigError as error:
        raise ValueError(str(error)) from error


def flatten(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Map dotted keys to leaf values; an empty table is one."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, dict) and value:
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def explain(config: Config, sources: dict[str, str]) -> list[tuple[str, object, str]]:
    """List a loaded configuration's keys by dotted path, with value and source."""
    flat = flatten(config.model_dump(mode="json"))
    return [(key, value, sources.get(key, "default")) for key, value in flat.items()]
