"""What is wrong with a configuration, in words: keys by the paths that the user wrote, and the key that was meant."""

from __future__ import annotations

import difflib
import re
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

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
"""What a pattern of a schema asks for; a test looks for one that is not here."""
FORMER = {
    "ballast_bytes": "groups are refused before the disk is full: see min_free_bytes",
    "payloads.take_over": "a prefix is free when no coordinator runs and its object `run` is deleted (docs/operate.md)",
}
"""Keys of earlier releases, by their paths, and what stands in their place."""
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
_ALIKE = 0.68
"""Below it, what is alike is so by chance: `lr` and `lora`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One key and what is wrong with it; no key where several do not fit together."""

    key: str
    text: str
    is_unknown_key: bool = False

    def __str__(self) -> str:
        return f"{self.key}: {self.text}" if self.key else self.text


def problems_of(schema: type[BaseModel], error: ValidationError) -> tuple[Problem, ...]:
    """Every problem that pydantic found, in its order."""
    return tuple(_problem(schema, entry) for entry in error.errors())


def all_keys(schema: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Dotted paths of all keys and sections, of all kinds of a section."""
    for name, field in schema.model_fields.items():
        yield prefix + name
        for inner in _models(field.annotation):
            yield from all_keys(inner, f"{prefix}{name}.")


def _problem(schema: type[BaseModel], entry: Any) -> Problem:
    path, models = _walk(schema, entry["loc"])
    key = ".".join(path)
    if entry["type"] == "extra_forbidden" and key in FORMER:
        return Problem(key=key, text=f"is a key no longer; {FORMER[key]}", is_unknown_key=True)
    if entry["type"] == "extra_forbidden":
        return Problem(key=key, text=f"unknown key{_meant(schema, path, models)}", is_unknown_key=True)
    if entry["type"] == "union_tag_invalid" and isinstance(entry["input"], dict):
        key += ".kind"
    return Problem(key=key, text=_words(entry, key))


def _walk(schema: type[BaseModel], location: Sequence[int | str]) -> tuple[list[str], list[type[BaseModel]]]:
    """The user's path, without the kinds that pydantic puts in, and what the last section may be."""
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


def _meant(schema: type[BaseModel], path: list[str], models: list[type[BaseModel]]) -> str:
    """The nearest keys: of this name elsewhere, else of a similar name here, else of a similar name anywhere."""
    *section, name = path
    known = dict.fromkeys(all_keys(schema))
    same = [key for key in known if key.rpartition(".")[2] == name]
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


def _is_secret(key: str, value: Any) -> bool:
    """Whether a value may hold a password or a key: by the key's name, or as an address with a user in it."""
    name = key.rpartition(".")[2].partition("[")[0].lower()
    return bool(_SECRET_NAMES.search(name) or _USER_IN_ADDRESS.search(repr(value)))


def _words(entry: Any, key: str) -> str:
    kind, context, value = entry["type"], entry.get("ctx", {}), entry["input"]
    given = f"{value!r}" if len(repr(value)) <= _SHOWN else f"{repr(value)[:_SHOWN]}..."
    if _is_secret(key, value):
        value = "***"
        context = {**context, "tag": value} if "tag" in context else context
        given = f"a {type(entry['input']).__name__} that is not shown"
    if kind == "missing":
        return "is not set"
    if kind == "string_pattern_mismatch":
        return f"{given} is not {PATTERNS.get(context['pattern'], 'of the form ' + context['pattern'])}"
    if kind == "union_tag_invalid" and not isinstance(value, dict):
        return f"must be a table, is {given}"
    if kind in ("literal_error", "union_tag_invalid"):
        expected = str(context.get("expected", context.get("expected_tags"))).replace("'", "").replace(" or ", ", ")
        given = f"{context['tag']!r}" if kind == "union_tag_invalid" else given
        near = difflib.get_close_matches(str(context.get("tag", value)), expected.split(", "), n=1)
        return f"{given} is none of {expected}" + (f"; did you mean {near[0]}?" if near else "")
    if kind in _BOUNDS:
        word, name = _BOUNDS[kind]
        return f"must be {word} {context[name]:g}, is {given}"
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
