"""A node's metrics as it sends them, and the page that the coordinator makes of those of all nodes.

Guarantees: what a node sends can add nothing to the page but numbers of its own service's metrics under its own name:
names are those of heterorl's table, and the coordinator writes whose they are.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.utils import floatToGoString

from heterorl.common.errors import InvalidRequest
from heterorl.common.process import metrics
from heterorl.common.process.metrics import Service
from heterorl.common.types.series import Series

MAX_BYTES = 512 << 10
"""Of all labels and numbers of a node."""

_PAIR = r'([a-zA-Z_][a-zA-Z0-9_]*)="(?:[^"\\\n]|\\["\\n])*"'
_LABELS = re.compile(rf"(?:{_PAIR}(?:,{_PAIR})*)?")
_NAMES = re.compile(_PAIR)
_ENDINGS = MappingProxyType({"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")})


def series_of(registry: CollectorRegistry) -> list[Series]:
    """All numbers of a registry, but the instants at which its counters were made."""
    found: dict[str, tuple[list[str], list[float]]] = {}
    for metric in registry.collect():
        names = _names(metric)
        for sample in metric.samples:
            if sample.name in names:
                labels, values = found.setdefault(sample.name, ([], []))
                labels.append(",".join(f'{name}="{_escaped(value)}"' for name, value in sorted(sample.labels.items())))
                values.append(float(sample.value))
    return [Series(name=name, labels=tuple(labels), values=tuple(values)) for name, (labels, values) in found.items()]


def rendered(series: Sequence[Series], *, service: Service, added: Mapping[str, str]) -> dict[str, str]:
    """Lines of the text format by name of the numbers, with labels added; names of a later release are left out.

    Args:
        series: as a node sent it.
        service: of the node.
        added: labels that say whose numbers they are; their values are names of a run, a service or a site.

    Raises:
        InvalidRequest: it is no node's own measurements; nothing of it is to be kept.
    """
    if sum(len(text) for one in series for text in one.labels) + 8 * sum(len(one.values) for one in series) > MAX_BYTES:
        raise InvalidRequest(f"series: more than {MAX_BYTES} bytes")
    if len({one.name for one in series}) < len(series):
        raise InvalidRequest("series: a name stands in two entries")
    known = _known(service)
    prefix = ",".join(f'{name}="{value}"' for name, value in added.items())
    reserved = frozenset({*added, "job"})
    blocks: dict[str, str] = {}
    for one in series:
        if one.name not in known:
            continue
        _check(one, reserved)
        blocks[one.name] = "".join(
            f"{one.name}{{{prefix}{',' if labels else ''}{labels}}} {floatToGoString(value)}\n"  # type: ignore[no-untyped-call]
            for labels, value in zip(one.labels, one.values, strict=True)
        )
    return blocks


def page(nodes: Iterable[Mapping[str, str]]) -> bytes:
    """The text format of all nodes' lines, each metric's together."""
    blocks = list(nodes)
    parts = []
    for metric, names in _table():
        lines = [found for node in blocks for name in names if (found := node.get(name))]
        if lines:
            parts += [f"# TYPE {_family(metric)} {metric.type}\n", *lines]
    return "".join(parts).encode()


def _check(one: Series, reserved: frozenset[str]) -> None:
    if len(one.labels) != len(one.values):
        raise InvalidRequest(f"series: {one.name} has {len(one.labels)} labels for {len(one.values)} numbers")
    if len(set(one.labels)) < len(one.labels):
        raise InvalidRequest(f"series: {one.name} has two numbers under the same labels")
    for text in one.labels:
        if not _LABELS.fullmatch(text) or not reserved.isdisjoint(_NAMES.findall(text)):
            raise InvalidRequest(f"series: {one.name} has labels that are no node's own: {text[:64]!r}")


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _family(metric: Metric) -> str:
    return f"{metric.name}_total" if metric.type == "counter" else metric.name


def _names(metric: Metric) -> tuple[str, ...]:
    return tuple(metric.name + ending for ending in _ENDINGS[metric.type])


@functools.cache
def _table() -> tuple[tuple[Metric, tuple[str, ...]], ...]:
    return tuple((metric, _names(metric)) for metric in metrics.REGISTRY.collect())


@functools.cache
def _known(service: Service) -> frozenset[str]:
    return frozenset(name for metric, names in _table() if metrics.is_of(metric, service) for name in names)
