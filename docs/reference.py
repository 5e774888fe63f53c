"""The page docs/configuration.md, made from the schemas of the services."""

from __future__ import annotations

import enum
import json
import re
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from heterorl.common.process.config_file import Config
from heterorl.coordinator.coordinator_config import CoordinatorConfig
from heterorl.learner.learner_config import LearnerConfig
from heterorl.relay.relay_config import RelayConfig
from heterorl.sampler.sampler_config import SamplerConfig

PATH = Path(__file__).parent / "configuration.md"
SERVICES: dict[str, type[Config]] = {
    "coordinator": CoordinatorConfig,
    "learner": LearnerConfig,
    "sampler": SamplerConfig,
    "relay": RelayConfig,
}
_HEAD = """# Configuration

For someone who writes or checks a TOML file: every key of every service, with type, default, bounds and unit. `make
docs` makes this page from the schemas. To see the values that a file gives, and where each comes from:

```
heterorl print-config sampler --config sampler.toml --set engine.device=cuda:0
```

- `--set` overrides the file, and the file overrides the default. Nothing else is read. Unknown keys are refused by
  name.
- `[a]` is a table of the file, `[[a]]` one that may be there several times. In tables with a `kind`, the last column
  names the kinds that have the key.
- Tables that several files share are [at the end](#tables-of-several-services).
"""
_UNITS = {
    "_bytes_per_s": "bytes/s", "_bytes": "bytes", "_versions": "versions", "_steps": "steps", "_tokens": "tokens",
    "_ulp": "ULP", "_s": "s",
}  # fmt: skip
_WORDS = ("nats", "seconds", "bytes", "tokens", "versions")
_WORTH_A_LINK = 10
"""Rows of a table that another one may refer to in place of repeating them."""
_LIMITS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One row: a key as one model has it."""

    name: str
    type: str
    default: str
    bounds: str
    unit: str
    meaning: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """One table of the file: its path, what may stand there, and its models by kind ("" where there is one)."""

    path: str
    meaning: str
    models: dict[str, type[Config]]
    is_list: bool = False
    """Whether the table may stand there several times."""


def sections(model: type[Config], path: str = "", meaning: str = "") -> Iterator[Section]:
    """A model and every section under it, in the order of the keys."""
    yield Section(path=path, meaning=meaning, models={"": model})
    yield from _under(model, path)


def _under(model: type[Config], path: str) -> Iterator[Section]:
    for name, field in model.model_fields.items():
        models = models_of(field)
        below = f"{path.strip('[]')}.{name}" if path else name
        if len(models) == 1 and get_origin(field.annotation) is tuple:
            # An array of tables: [[name]].
            below = f"[{below}]"
        if len(models) == 1:
            yield from sections(models[0], below, meaning_of(model, name))
        elif models:
            kinds = {str(one.model_fields["kind"].default): one for one in models}
            is_list = any(get_origin(leaf) is tuple for leaf in _leaves(field.annotation))
            yield Section(path=below, meaning=meaning_of(model, name), models=kinds, is_list=is_list)
            for one in models:
                yield from _under(one, below)


def keys(model: type[Config]) -> list[Key]:
    """The keys of a model that are values; its sections are elsewhere."""
    return [_key(model, name, field) for name, field in model.model_fields.items() if not models_of(field)]


def models_of(field: FieldInfo) -> list[type[Config]]:
    """Models that a field may hold; none for a plain value."""
    leaves = list(_leaves(field.annotation))
    leaves += [inner for leaf in leaves if get_origin(leaf) is tuple for inner in _leaves(get_args(leaf)[0])]
    return [leaf for leaf in leaves if isinstance(leaf, type) and issubclass(leaf, Config)]


def meaning_of(model: type[Config], name: str) -> str:
    """A key's description, also where a subclass only changes the default."""
    for one in model.__mro__:
        field = getattr(one, "model_fields", {}).get(name)
        if field is not None and field.description:
            return " ".join(field.description.split())
    return ""


def _key(model: type[Config], name: str, field: FieldInfo) -> Key:
    meaning = meaning_of(model, name)
    bounds = _bounds(field)
    return Key(
        name=name,
        type=_type(field.annotation),
        default=_default(field),
        bounds=bounds,
        unit=_unit(name, field, meaning),
        meaning=meaning,
    )


def _leaves(annotation: Any) -> Iterator[Any]:
    origin = get_origin(annotation)
    if origin is Annotated:
        yield from _leaves(get_args(annotation)[0])
    elif origin in (Union, types.UnionType):
        for argument in get_args(annotation):
            yield from _leaves(argument)
    elif origin is tuple and isinstance(first := get_args(annotation)[0], type) and issubclass(first, Config):
        yield first
    else:
        yield annotation


def _type(annotation: Any) -> str:
    names = []
    for leaf in _leaves(annotation):
        origin = get_origin(leaf)
        if leaf is type(None):
            names.append("none")
        elif origin is Literal:
            names += [json.dumps(value) for value in get_args(leaf)]
        elif origin is tuple:
            arguments = [argument for argument in get_args(leaf) if argument is not ...]
            names.append(
                f"list of {len(arguments)} {_type(arguments[0])}"
                if ... not in get_args(leaf)
                else f"list of {_type(arguments[0])}"
            )
        elif isinstance(leaf, type) and issubclass(leaf, Config):
            names.append("table")
        elif isinstance(leaf, type) and issubclass(leaf, enum.Enum):
            names += [json.dumps(member.value) for member in leaf]
        else:
            names.append({"str": "text", "bool": "true, false", "Path": "path"}.get(leaf.__name__, leaf.__name__))
    return ", ".join(names)


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if value is None:
        return "none"
    if isinstance(value, enum.Enum):
        value = value.value
    if isinstance(value, Path):
        value = str(value)
    return f"`{json.dumps(list(value) if isinstance(value, tuple) else value)}`"


def _bounds(field: FieldInfo) -> str:
    found = []
    for entry in field.metadata:
        found += [
            f"{sign} {getattr(entry, name):g}"
            if isinstance(getattr(entry, name), float)
            else f"{sign} {getattr(entry, name)}"
            for name, sign in _LIMITS.items()
            if getattr(entry, name, None) is not None
        ]
        low, high = getattr(entry, "min_length", None), getattr(entry, "max_length", None)
        if low is not None:
            found.append(f"length >= {low}")
        if high is not None:
            found.append(f"length <= {high}")
        if getattr(entry, "pattern", None):
            found.append(f"`{entry.pattern}`")
    return ", ".join(found)


def _unit(name: str, field: FieldInfo, meaning: str) -> str:
    if not {int, float} & set(_leaves(field.annotation)):
        return ""
    for suffix, unit in _UNITS.items():
        if name.endswith(suffix):
            return unit
    match = re.search(rf", ({'|'.join(_WORDS)})[.;]", meaning)
    return "" if match is None else match[1]


def _rows(section: Section) -> list[str]:
    cells: dict[tuple[str, ...], list[str]] = {}
    for kind, model in section.models.items():
        for key in keys(model):
            if key.name == "kind" and kind:
                continue
            row = (f"`{key.name}`", key.type, key.default, key.bounds, key.unit, key.meaning)
            cells.setdefault(row, []).append(kind)
    has_kinds = "" not in section.models
    rows = []
    for row, kinds in cells.items():
        whose = "all" if len(kinds) == len(section.models) else ", ".join(f"`{kind}`" for kind in kinds)
        rows.append(" | ".join(escaped(cell) for cell in (*row, *([whose] if has_kinds else []))))
    return [f"| {row} |" for row in rows]


def escaped(cell: str) -> str:
    """Text for a cell of a table."""
    return cell.replace("|", "\\|")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a table may stand: a service and a section of its file."""

    service: str
    section: Section

    @property
    def title(self) -> str:
        """The section as the file writes it."""
        brackets = "[[{}]]" if self.section.is_list else "[{}]"
        return brackets.format(self.section.path)


def tables_of() -> list[list[Place]]:
    """Every table once, with all places where it may stand, in the order of the first ones."""
    found: dict[tuple[tuple[str, type[Config]], ...], list[Place]] = {}
    for service, schema in SERVICES.items():
        for section in sections(schema):
            found.setdefault(tuple(section.models.items()), []).append(Place(service=service, section=section))
    return list(found.values())


def render() -> str:
    """The whole page: each table once, those of several places at the end, with links from every service."""
    every = tables_of()
    shared = [places for places in every if len(places) > 1]
    names = _names(shared)
    lines = [_HEAD]
    for service, schema in SERVICES.items():
        lines += [f"## {service}\n", f"{_sentence(schema)}\n"]
        for places in every:
            if len(places) == 1 and places[0].service == service:
                section = places[0].section
                title = f"### {service}: {places[0].title}\n"
                lines += ([title, f"{section.meaning}\n"] if section.path else []) + _table(section)
        links = [
            f"[`{place.title}`](#{_slug(name)})"
            for name, places in zip(names, shared, strict=True)
            for place in places
            if place.service == service
        ]
        lines.append(f"Shared tables: {', '.join(links)}.\n")
    lines.append("## Tables of several services\n")
    for name, places in zip(names, shared, strict=True):
        lines += [f"### {name}\n", f"{places[0].section.meaning}\n", f"Used by: {_users(places)}.\n"]
        lines += _table(places[0].section, base=_base(places[0].section, shared, names))
    return "\n".join(lines)


def _names(shared: list[list[Place]]) -> list[str]:
    """A heading for each: the shortest of its places, with the services where two have the same."""
    titles = [min((place.title for place in places), key=len) for places in shared]
    users = [" and ".join(dict.fromkeys(place.service for place in places)) for places in shared]
    return [
        f"{title} of {services}" if titles.count(title) > 1 else title
        for title, services in zip(titles, users, strict=True)
    ]


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9_ -]", "", name.lower()).replace(" ", "-")


def _users(places: list[Place]) -> str:
    users: dict[str, list[str]] = {}
    for place in places:
        users.setdefault(place.service, []).append(f"`{place.title}`")
    return ", ".join(f"{service} ({', '.join(titles)})" for service, titles in users.items())


def _base(section: Section, shared: list[list[Place]], names: list[str]) -> tuple[str, Section] | None:
    """Another table, all whose keys this one has too, so that they need not stand here again."""
    rows = set(_rows(section))
    for name, places in zip(names, shared, strict=True):
        other = places[0].section
        if other is not section and len(_rows(other)) >= _WORTH_A_LINK and set(_rows(other)) <= rows:
            return name, other
    return None


def _table(section: Section, base: tuple[str, Section] | None = None) -> list[str]:
    lines = []
    has_kinds = "" not in section.models
    if has_kinds:
        lines += [f'- `kind = "{kind}"`: {_sentence(model)}' for kind, model in section.models.items()]
        lines.append("")
    rows = _rows(section)
    if base is not None:
        name, other = base
        lines.append(f"The keys of [`{name}`](#{_slug(name)}), and these:\n")
        rows = [row for row in rows if row not in _rows(other)]
    if rows:
        header = "key | type | default | bounds | unit | meaning" + (" | kinds" if has_kinds else "")
        lines += [f"| {header} |", "|" + "---|" * (header.count("|") + 1), *rows, ""]
    return lines


def _sentence(model: type[Config]) -> str:
    return " ".join((model.__doc__ or "").split())
