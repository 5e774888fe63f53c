"""The page docs/configuration.md, made from the schemas of the services."""

from __future__ import annotations

import dataclasses
import enum
import json
import re
import types
from collections.abc import Iterable, Iterator, Mapping
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

Every key of every service. To see the values that a file gives, and where each comes from:

```
heterorl print-config sampler --config sampler.toml --set engine.device=cuda:0
```

- `--set` overrides the file, which overrides the default. Unknown keys are refused by name.
- `[a]` is a table of the file, `[[a]]` a table that may occur several times. `a.b` is the key `b` of the table `[a]`.
- The default shows the type: `1` is a whole number, `1.0` a number, `[]` a list of text unless *values* says otherwise.
- The name ends with the unit: `_s` is seconds. *Values* are other units, bounds and choices: (0, 1] excludes 0.
- The last column names the kinds or services that have a key; an empty cell: all.
- `[[task.sources]]` and the sampler's `[[evaluation]]` contain tasks: `[evaluation.task.data]` has the keys of
  `[task.data]`.
"""
_SHARED = "Keys and tables of several services"
_KEYS = "Keys of several services"
_WORDS = re.compile(r", (nats|seconds|bytes|tokens|versions)(?=[.;:])")
"""A unit in a meaning, where the name does not end with it."""
_KINDS_EXPLAINED = {"loss": "[Losses](losses.md#kinds) explains each kind."}
"""Sections whose kinds another page explains."""
_SIGNS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
_LENGTHS = {"min_length": "ge", "max_length": "le"}
_WORTH_A_LINK = 10
"""Rows of a table that another one may refer to in place of repeating them."""
_WORTH_A_TABLE = 4
"""Keys of a section with a table of its own; those of a smaller one are `section.key` of the service."""
_WORTH_A_REFERENCE = 4
"""Kinds of a row that a later row refers to in place of repeating them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """A key as one model has it."""

    name: str
    type: str
    choices: tuple[str, ...]
    default: str
    bounds: str
    unit: str
    meaning: str

    @property
    def values(self) -> str:
        """The type or choices, bounds and unit, where default, name and meaning do not show them."""
        has_type = self.default in ("required", "none") or (self.default == "`[]`" and self.type != "list of text")
        named = re.findall(r"`\"?([^`\"]*)\"?`", self.meaning)
        if self.choices and not has_type:
            kind = "" if {choice.strip('"') for choice in self.choices} <= {*named, ""} else self.type
        else:
            kind = self.type if has_type else ""
        return ", ".join(filter(None, [kind, f"{self.bounds} {self.unit}".strip()]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """One table of the file: its path, what may stand there, and its models by kind ("" where there is one)."""

    path: str
    meaning: str
    models: dict[str, type[Config]]
    default_kind: str = ""
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
            yield Section(
                path=below,
                meaning=meaning_of(model, name),
                models={str(one.model_fields["kind"].default): one for one in models},
                default_kind=getattr(field.get_default(call_default_factory=True), "kind", ""),
                is_list=any(get_origin(leaf) is tuple for leaf in _leaves(field.annotation)),
            )
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
    return Key(
        name=name,
        type=_type(field.annotation),
        choices=tuple(_choices(field.annotation)),
        default=_default(field),
        bounds=_bounds(field),
        unit=_unit(field, meaning),
        meaning=_WORDS.sub("", meaning, count=1),
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


def _choices(annotation: Any) -> Iterator[str]:
    for leaf in _leaves(annotation):
        if get_origin(leaf) is Literal:
            yield from map(json.dumps, get_args(leaf))
        elif isinstance(leaf, type) and issubclass(leaf, enum.Enum):
            yield from (json.dumps(member.value) for member in leaf)


def _type(annotation: Any) -> str:
    if choices := list(_choices(annotation)):
        return ", ".join(f"`{choice}`" for choice in choices)
    names = []
    for leaf in _leaves(annotation):
        origin = get_origin(leaf)
        if leaf is type(None):
            names.append("none")
        elif origin is tuple:
            arguments = [argument for argument in get_args(leaf) if argument is not ...]
            names.append(f"list of {_type(arguments[0])}")
        elif isinstance(leaf, type) and issubclass(leaf, Config):
            names.append("table")
        else:
            names.append({"str": "text", "bool": "true, false", "Path": "path"}.get(leaf.__name__, leaf.__name__))
    return ", ".join(name for name in names if name != "none")


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
    limits = {
        name: limit
        for entry in field.metadata
        for name in ("ge", "gt", "le", "lt", "min_length", "max_length", "pattern")
        if (limit := getattr(entry, name, None)) is not None
    }
    shown = {name: f"{limit:g}" if isinstance(limit, float) else str(limit) for name, limit in limits.items()}
    found = _interval(shown)
    if lengths := _interval({_LENGTHS[name]: limit for name, limit in shown.items() if name in _LENGTHS}):
        found.append(f"{lengths[0]} {'characters' if str in _leaves(field.annotation) else 'entries'}")
    if "pattern" in shown:
        found.append(f"`{shown['pattern']}`")
    return ", ".join(found)


def _interval(limits: Mapping[str, str]) -> list[str]:
    """The limits of one number as text, if it has any."""
    low, high = {"ge", "gt"} & limits.keys(), {"le", "lt"} & limits.keys()
    if low and high:
        ends = ("[" if "ge" in low else "(", *(limits[name] for name in (*low, *high)), "]" if "le" in high else ")")
        return ["{}{}, {}{}".format(*ends)]
    return [f"{_SIGNS[name]} {limits[name]}" for name in (*low, *high)]


def _unit(field: FieldInfo, meaning: str) -> str:
    match = _WORDS.search(meaning)
    return match[1] if match and {int, float} & set(_leaves(field.annotation)) else ""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """One table of the page, and all places where it may stand."""

    places: tuple[Place, ...]

    @property
    def title(self) -> str:
        """The shortest of its titles."""
        return min((place.title for place in self.places), key=len)

    @property
    def services(self) -> list[str]:
        """The services that have it."""
        return list(dict.fromkeys(place.service for place in self.places))

    @property
    def heading(self) -> str:
        """Its heading."""
        if len(self.services) == 1:
            return f"{self.services[0]}: {self.title}"
        whose = " and ".join(self.services) if len(self.services) < len(SERVICES) else "every service"
        return f"{self.title} of {whose}"

    @property
    def link(self) -> str:
        """A link to it."""
        return f"[`{self.title}`](#{slug(self.heading)})"

    @property
    def meaning(self) -> str:
        """The meaning of the section, for each service where they differ."""
        found: dict[str, list[str]] = {}
        for place in self.places:
            if place.title == self.title:
                found.setdefault(place.section.meaning, []).append(place.service)
        if len(found) == 1:
            return next(iter(found))
        return " ".join(f"{text[:-1]} ({', '.join(services)})." for text, services in found.items())

    @property
    def users(self) -> dict[str, type[Config]]:
        """Its models by kind, or by service where services have different ones."""
        section = self.places[0].section
        if "" not in section.models:
            return section.models
        models = {place.service: place.section.models[""] for place in self.places}
        return models if len(set(models.values())) > 1 else section.models

    @property
    def rows(self) -> list[tuple[str, ...]]:
        """Its rows as cells."""
        named = {user: [key for key in keys(model) if key.name != "kind"] for user, model in self.users.items()}
        return _rows(named)


def tables_of() -> list[Table]:
    """Every table once, in the order of the first places; services' own keys and small sections are not tables."""
    found: dict[tuple[type[Config], ...], list[Place]] = {}
    for service, schema in SERVICES.items():
        for section in sections(schema):
            if section.path and not _is_small(section):
                found.setdefault(tuple(section.models.values()), []).append(Place(service=service, section=section))
    tables: dict[str, list[Place]] = {}
    for places in found.values():
        tables.setdefault(Table(places=tuple(places)).title, []).extend(places)
    return [Table(places=tuple(places)) for places in tables.values()]


def _is_small(section: Section) -> bool:
    return "" in section.models and len(keys(section.models[""])) < _WORTH_A_TABLE and not section.path.startswith("[")


def service_keys(service: str) -> list[Key]:
    """The keys of a service above the first table of its file, and its small sections as `section.key`."""
    found = keys(SERVICES[service])
    for section in sections(SERVICES[service]):
        if section.path and _is_small(section):
            found += [dataclasses.replace(key, name=f"{section.path}.{key.name}") for key in keys(section.models[""])]
    return found


def _rows(named: Mapping[str, Iterable[Key]]) -> list[tuple[str, ...]]:
    """Rows as cells, one for each name and meaning; the last cell names the users that have it, unless all do."""
    found: dict[tuple[str, str], dict[str, Key]] = {}
    for user, several in named.items():
        for key in several:
            found.setdefault((key.name, key.meaning), {})[user] = key
    rows = []
    known: dict[tuple[str, ...], str] = {}
    for (name, meaning), having in found.items():
        cells = [
            f"`{name}`",
            _each({user: key.default for user, key in having.items()}),
            _each({user: key.values for user, key in having.items()}),
            meaning,
        ]
        if len(named) > 1:
            whose = tuple(having)
            cells.append(known.get(whose) or _whose(list(having), list(named)))
            if len(whose) >= _WORTH_A_REFERENCE:
                known.setdefault(whose, f"as `{name}`" if len(whose) < len(named) else "")
        rows.append(tuple(map(escaped, cells)))
    return rows


def _each(texts: Mapping[str, str]) -> str:
    """The text of most users, then other texts with their users."""
    users: dict[str, list[str]] = {}
    for user, text in texts.items():
        users.setdefault(text, []).append(user)
    usual, *others = sorted(users, key=lambda text: -len(users[text]))
    return "; ".join([usual, *(f"{text or 'any'} ({_names(users[text])})" for text in others)])


def _whose(having: list[str], every: list[str]) -> str:
    others = [user for user in every if user not in having]
    if not others:
        return ""
    return _names(having) if len(having) <= len(others) + 1 else f"all except {_names(others)}"


def _names(users: Iterable[str]) -> str:
    return ", ".join(f"`{user}`" for user in users)


def render() -> str:
    """The whole page: each table once, what several services have at the end, with links from every service."""
    tables = tables_of()
    shared = [table for table in tables if len(table.services) > 1]
    every = {service: service_keys(service) for service in SERVICES}
    counts: dict[tuple[str, str], int] = {}
    for several in every.values():
        for key in several:
            counts[key.name, key.meaning] = counts.get((key.name, key.meaning), 0) + 1
    lines = [_HEAD]
    for service, schema in SERVICES.items():
        links = [f"[keys](#{slug(_KEYS)})", *(table.link for table in shared if service in table.services)]
        lines += [f"## {service}\n", f"{_sentence(schema)}\n", f"Shared: {', '.join(links)}.\n"]
        lines += _written(_rows({"": (key for key in every[service] if counts[key.name, key.meaning] == 1)}))
        for table in tables:
            if table.services == [service]:
                lines += _shown(table, tables)
    lines += [f"## {_SHARED}\n", f"### {_KEYS}\n"]
    common = {
        service: [key for key in several if counts[key.name, key.meaning] > 1] for service, several in every.items()
    }
    lines += _written(_rows(common), last="services")
    for table in shared:
        lines += _shown(table, tables)
    return "\n".join(lines)


def slug(heading: str) -> str:
    """The fragment of a heading's address."""
    return re.sub(r"[^a-z0-9_ -]", "", heading.lower()).replace(" ", "-")


def _base(table: Table, tables: list[Table]) -> Table | None:
    """Another table, all whose keys this one has too, so that they need not stand here again."""
    rows = set(table.rows)
    return next(
        (other for other in tables if other is not table and len(other.rows) >= _WORTH_A_LINK and rows > {*other.rows}),
        None,
    )


def _shown(table: Table, tables: list[Table]) -> list[str]:
    section = table.places[0].section
    lines = [f"### {table.heading}\n", f"{table.meaning}\n"]
    rows = table.rows
    explained = _KINDS_EXPLAINED.get(section.path)
    if explained:
        choices = ", ".join(f'`"{kind}"`' for kind in section.models)
        rows = [("`kind`", f'`"{section.default_kind}"`', choices, explained, ""), *rows]
    elif "" not in section.models:
        for kind, model in section.models.items():
            default = " (default)" if kind == section.default_kind else ""
            lines.append(f"- `{kind}`{default}: {_sentence(model)}")
        lines.append("")
    if base := _base(table, tables):
        lines.append(f"The keys of {base.link}, and these:\n")
        rows = [row for row in rows if row not in base.rows]
    return lines + _written(rows, last="kinds" if "" not in section.models else "services")


def _written(rows: list[tuple[str, ...]], last: str = "") -> list[str]:
    if not rows:
        return []
    header = ("key", "default", "values", "meaning", last)[: len(rows[0])]
    return [f"| {' | '.join(header)} |", "|" + "---|" * len(header), *(f"| {' | '.join(row)} |" for row in rows), ""]


def _sentence(model: type[Config]) -> str:
    return " ".join((model.__doc__ or "").split())
