"""OpenTelemetry spans of a group's life, off unless an endpoint is configured.

A group carries the W3C trace context of its generation (`traceparent`, Trace Context level 1); later services add spans
to the same trace:

    generate    sampler        the batch that made it
    push        sampler        the call that delivered it
    queue       coordinator    from its arrival to its lease
    inbox       learner        from its arrival to the step
    train       learner        the step that used it

Guarantees: it imports, keeps and sends only while tracing is on; no prompt, token or reward is in a span; a malformed
context counts as none. Tracing never changes a decision.
"""

import re
import time
from collections.abc import Mapping
from typing import Any

from pydantic import Field

from heterorl import __version__
from heterorl.common.errors import ConfigError, DependencyMissing
from heterorl.common.process.address import Url, is_loopback
from heterorl.common.process.config_file import Config

NO_TRACE = ""
"""Context of a group without a trace."""
_CONTEXT = re.compile(r"00-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-01")
_EXPORT_S = 5
Attributes = Mapping[str, str | int | float]


class TracingConfig(Config):
    """The receiver of traces; samplers choose the groups, other services follow."""

    otlp_endpoint: Url = Field(default="", pattern=r"^(https?://.+:[0-9]{1,5})?$")
    """OTLP over gRPC, such as http://127.0.0.1:4317 (http only on loopback). Empty: no traces."""
    share: float = Field(default=1.0, ge=0.0, le=1.0)
    """Share of its groups that a sampler traces."""


class Tracer:
    """The spans of one process."""

    def __init__(self) -> None:
        self._tracer: Any = None

    @property
    def is_on(self) -> bool:
        return self._tracer is not None

    def use(self, tracer: Any) -> None:
        """Make spans with an OpenTelemetry tracer; None makes none."""
        self._tracer = tracer

    def begin(self, name: str, *, lasted_s: float, attributes: Attributes) -> str:
        """Record a trace's first span, which just ended; returns its context."""
        if self._tracer is None:
            return NO_TRACE
        from opentelemetry.context import Context

        context = self._span(name, Context(), lasted_s, 0.0, attributes).get_span_context()
        if not context.trace_flags.sampled:
            return NO_TRACE
        return f"00-{context.trace_id:032x}-{context.span_id:016x}-01"

    def add(
        self, name: str, *, trace: str, lasted_s: float, ended_ago_s: float = 0.0, attributes: Attributes | None = None
    ) -> None:
        """Record a span of a trace that began elsewhere; ignores NO_TRACE."""
        if self._tracer is None or not (match := _CONTEXT.fullmatch(trace)):
            return
        from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, set_span_in_context

        parent = SpanContext(
            trace_id=int(match[1], 16), span_id=int(match[2], 16), is_remote=True, trace_flags=TraceFlags(1)
        )
        context = set_span_in_context(NonRecordingSpan(parent))
        self._span(name, context, lasted_s, ended_ago_s, attributes or {})

    def _span(self, name: str, context: Any, lasted_s: float, ended_ago_s: float, attributes: Attributes) -> Any:
        end = time.time_ns() - int(max(0.0, ended_ago_s) * 1e9)
        span = self._tracer.start_span(
            name,
            context=context,
            start_time=end - int(max(0.0, lasted_s) * 1e9),
            attributes={f"heterorl.{key}": value for key, value in attributes.items()},
        )
        span.end(end_time=end)
        return span


TRACER = Tracer()


def well_formed(trace: str) -> str:
    """A context that another machine stated, or NO_TRACE if it is malformed."""
    return trace if _CONTEXT.fullmatch(trace) else NO_TRACE


def start(config: TracingConfig, *, service: str, name: str) -> None:
    """Send this process's spans to the configured endpoint, if any.

    Raises:
        ConfigError: plaintext would leave this machine.
        DependencyMissing: the extra `otel` is not installed.
    """
    if not config.otlp_endpoint:
        return
    scheme, _, address = config.otlp_endpoint.partition("://")
    if scheme == "http" and not is_loopback(address):
        action = "use https, or a collector on this machine"
        raise ConfigError("tracing.otlp_endpoint", "plaintext is for loopback only", action=action)
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio
    except ModuleNotFoundError:
        raise DependencyMissing("opentelemetry", "otel") from None
    resource = Resource.create({"service.name": f"heterorl-{service}", "service.instance.id": name})
    provider = TracerProvider(resource=resource, sampler=ParentBasedTraceIdRatio(config.share))
    # Own thread and bounded queue: a lost collector costs spans, never a step.
    exporter = OTLPSpanExporter(endpoint=config.otlp_endpoint, insecure=scheme == "http", timeout=_EXPORT_S)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    TRACER.use(provider.get_tracer("heterorl", __version__))
