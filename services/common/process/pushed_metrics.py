"""Metrics that nodes push, and the coordinator's page of them.

Nodes push where Prometheus cannot scrape them. A failed push is dropped: the next one has newer numbers.

A node adds only numbers of its own service's metrics under its own name. Names and labels must be in heterorl's table,
each once; the coordinator adds run, service and site. So one node cannot make Prometheus refuse the page, and its part
of the page is bounded.
"""

import asyncio
import contextlib
import functools
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.utils import floatToGoString

from heterorl.common.errors import HeterorlError, InvalidRequest, RemoteError
from heterorl.common.process import metrics
from heterorl.common.process.clock import Clock
from heterorl.common.process.metrics import Service
from heterorl.common.types.common import Series


@dataclass(frozen=True, slots=True)
class Limit:
    """Bounds of a push: bytes, count of numbers, bytes of rendered lines."""

    num_bytes: int
    lines: int
    rendered: int


_SAMPLERS = Limit(num_bytes=256 << 10, lines=4096, rendered=1 << 20)
# A learner has numbers of each site.
LIMITS: Mapping[Service, Limit] = MappingProxyType(
    {"sampler": _SAMPLERS, "relay": _SAMPLERS, "learner": Limit(num_bytes=2 << 20, lines=32768, rendered=8 << 20)}
)
"""Many times the metrics of an honest process."""

_PAIR = r'([a-zA-Z_][a-zA-Z0-9_]*)="(?:[^"\\\n\0]|\\["\\n])*"'
_LABELS = re.compile(rf"(?:{_PAIR}(?:,{_PAIR})*)?")
_NAMES = re.compile(_PAIR)
_ENDINGS = MappingProxyType({"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")})


def series_of(registry: CollectorRegistry) -> list[Series]:
    """All numbers of a registry, without the creation times of counters."""
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
    """Lines of the text format by name, with the labels `added`.

    Names and labels of another release are left out. A number needs exactly the labels that its metric declares. They
    are in the order of their names, so that equal labels are equal texts. Raises InvalidRequest if the series are not a
    node's own measurements: drop all of them.
    """
    limit = LIMITS[service]
    num_lines = sum(len(one.values) for one in series)
    if num_lines > limit.lines:
        raise InvalidRequest(f"series: more than {limit.lines} numbers")
    if sum(len(text) for one in series for text in one.labels) + 8 * num_lines > limit.num_bytes:
        raise InvalidRequest(f"series: more than {limit.num_bytes} bytes")
    if len({one.name for one in series}) < len(series):
        raise InvalidRequest("series: a name stands in two entries")
    known = _known(service)
    prefix = ",".join(f'{name}="{value}"' for name, value in added.items())
    reserved = frozenset({*added, "job", "__name__"})
    blocks: dict[str, str] = {}
    for one in series:
        if one.name not in known or not _is_declared(one, known[one.name], reserved):
            continue
        blocks[one.name] = "".join(
            f"{one.name}{{{prefix}{',' if labels else ''}{labels}}} {floatToGoString(value)}\n"  # type: ignore[no-untyped-call]
            for labels, value in zip(one.labels, one.values, strict=True)
        )
    if sum(map(len, blocks.values())) > limit.rendered:
        raise InvalidRequest(f"series: more than {limit.rendered} bytes on the page")
    return blocks


def lines_of(blocks: Mapping[str, str]) -> Iterator[str]:
    """Name and labels of each number of a node."""
    for block in blocks.values():
        # Not splitlines: it also ends a line at U+2028 and others, which a label's value may have.
        for line in block.split("\n")[:-1]:
            yield line.rpartition(" ")[0]


def page(nodes: Iterable[Mapping[str, str]]) -> bytes:
    """The text format of all nodes' lines, grouped by metric."""
    blocks = list(nodes)
    parts = []
    for metric, names in _table():
        lines = [found for node in blocks for name in names if (found := node.get(name))]
        if lines:
            family = f"{metric.name}_total" if metric.type == "counter" else metric.name
            parts += [f"# TYPE {family} {metric.type}\n", *lines]
    return "".join(parts).encode()


def _is_declared(one: Series, declared: tuple[str, ...], reserved: frozenset[str]) -> bool:
    """Whether labels are the metric's; raises InvalidRequest for malformed or reserved ones."""
    if len(one.labels) != len(one.values):
        raise InvalidRequest(f"series: {one.name} has {len(one.labels)} labels for {len(one.values)} numbers")
    if len(set(one.labels)) < len(one.labels):
        raise InvalidRequest(f"series: {one.name} has two numbers under the same labels")
    are_own = True
    for text in one.labels:
        names = [found[1] for found in _NAMES.finditer(text)]
        if not _LABELS.fullmatch(text) or not reserved.isdisjoint(names) or len(set(names)) < len(names):
            raise InvalidRequest(f"series: {one.name} has labels that are no node's own: {text[:64]!r}")
        are_own = are_own and tuple(names) == declared
    return are_own


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _names(metric: Metric) -> tuple[str, ...]:
    return tuple(metric.name + ending for ending in _ENDINGS[metric.type])


@functools.cache
def _table() -> tuple[tuple[Metric, tuple[str, ...]], ...]:
    return tuple((metric, _names(metric)) for metric in metrics.REGISTRY.collect())


@functools.cache
def _known(service: Service) -> Mapping[str, tuple[str, ...]]:
    """Names of a service's numbers, each with its label names in order."""
    return {
        name: tuple(sorted({*metrics.labels_of(metric), *(("le",) if name.endswith("_bucket") else ())}))
        for metric, names in _table()
        if metrics.is_of(metric, service)
        for name in names
    }


_LOG = logging.getLogger(__name__)
UNWANTED_S = 300.0
"""Between two attempts while the coordinator does not keep this node's metrics."""


Push = Callable[[Sequence[Series]], Awaitable[bool]]
"""Sends numbers once; returns whether the coordinator keeps them."""


@contextlib.asynccontextmanager
async def pushing(push: Push, *, registry: CollectorRegistry, interval_s: float, clock: Clock) -> AsyncIterator[None]:
    """Push a registry's numbers while the body runs; see `push_metrics`."""
    task = asyncio.create_task(push_metrics(push, registry=registry, interval_s=interval_s, clock=clock))
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def push_metrics(push: Push, *, registry: CollectorRegistry, interval_s: float, clock: Clock) -> None:
    """Send a registry's numbers every `interval_s` seconds; returns at once for 0."""
    wanted = True
    while interval_s:
        try:
            kept = await push(series_of(registry))
            problem = "" if kept else "it keeps too many other nodes' metrics"
        except HeterorlError as error:
            # A permanent refusal, as of an earlier release, will be repeated.
            kept, problem = isinstance(error, RemoteError) and error.is_transient, str(error)
            _LOG.debug("this node's metrics did not reach the coordinator: %s", error)
        if wanted and not kept:
            _LOG.warning(
                "the coordinator does not take this node's metrics, asked again in %.0f s: %s", UNWANTED_S, problem
            )
        wanted = kept
        await clock.sleep(interval_s if kept else UNWANTED_S)
