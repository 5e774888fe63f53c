"""Protobuf <-> series."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from heterorl.common.types.series import Series
from heterorl.v1 import metrics_pb2


def series_to_pb(series: Sequence[Series]) -> list[metrics_pb2.MetricSeries]:
    """Convert series."""
    return [metrics_pb2.MetricSeries(name=one.name, labels=one.labels, values=one.values) for one in series]


def series_from_pb(messages: Iterable[metrics_pb2.MetricSeries]) -> list[Series]:
    """Convert series; whether they are a node's own measurements, their reader judges."""
    return [Series(name=one.name, labels=tuple(one.labels), values=tuple(one.values)) for one in messages]
