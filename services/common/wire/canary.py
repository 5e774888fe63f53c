"""A sampler's canary and its outcome <-> their messages."""

from __future__ import annotations

from heterorl.common.api import CanaryReport, CanaryVerdict
from heterorl.common.types.values import SiteId
from heterorl.v1 import run_pb2


def canary_to_pb(value: CanaryReport) -> run_pb2.ReportCanaryRequest:
    """Convert a canary."""
    return run_pb2.ReportCanaryRequest(
        site=value.site, incarnation=value.incarnation, version=value.version, logprobs=value.logprobs
    )


def canary_from_pb(message: run_pb2.ReportCanaryRequest) -> CanaryReport:
    """Convert a canary."""
    return CanaryReport(
        site=SiteId(message.site),
        incarnation=message.incarnation,
        version=message.version,
        logprobs=tuple(message.logprobs),
    )


def verdict_to_pb(value: CanaryVerdict) -> run_pb2.ReportCanaryResponse:
    """Convert the outcome of a canary."""
    return run_pb2.ReportCanaryResponse(difference=value.difference, quarantine=value.quarantine)


def verdict_from_pb(message: run_pb2.ReportCanaryResponse) -> CanaryVerdict:
    """Convert the outcome of a canary."""
    return CanaryVerdict(
        difference=message.difference if message.HasField("difference") else None, quarantine=message.quarantine
    )
