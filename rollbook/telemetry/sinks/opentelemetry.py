"""Exports spans over OTLP. Every episode is a trace, with a span for each turn."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, TraceFlags

from rollbook.telemetry.config import TelemetryConfig
from rollbook.telemetry.sinks.sink import Sink
from rollbook.telemetry.spans import Span

EPISODE = "rollout.episode"
BATCH = 512
SCOPE = InstrumentationScope("rollbook")


class OpenTelemetrySink(Sink):
    """Spans are written when they end, with their real times, so the exporter is called directly."""

    shows_spans: ClassVar[bool] = True

    def __init__(self, exporter: SpanExporter, *, run_name: str) -> None:
        self._exporter = exporter
        self._resource = Resource.create({"service.name": "rollbook", "rollbook.run": run_name})

    def write_spans(self, spans: Sequence[Span]) -> None:
        exported = [readable for span in spans for readable in self._trace(span)]
        for start in range(0, len(exported), BATCH):
            self._exporter.export(exported[start : start + BATCH])

    def _trace(self, span: Span) -> list[ReadableSpan]:
        """One trace for each span; an episode has its turns as children."""
        fields = dict(span.fields)
        turns = fields.pop("turns", []) if span.name == EPISODE else []
        context = _context(random.getrandbits(128))
        root = self._readable(span.name, context, (span.start, span.end), {**fields, "process": span.process})
        children = [
            self._readable("rollout.turn", _context(context.trace_id), times, {"turn": number}, parent=context)
            for number, times in enumerate(turns, start=1)
        ]
        return [root, *children]

    def _readable(
        self,
        name: str,
        context: SpanContext,
        times: tuple[float, float],
        fields: dict[str, Any],
        *,
        parent: SpanContext | None = None,
    ) -> ReadableSpan:
        start, end = times
        return ReadableSpan(
            name,
            context=context,
            parent=parent,
            resource=self._resource,
            attributes={f"rollbook.{key}": _plain(value) for key, value in fields.items() if value is not None},
            instrumentation_scope=SCOPE,
            start_time=int(start * 1e9),
            end_time=int(end * 1e9),
        )

    def close(self) -> None:
        self._exporter.shutdown()


def _context(trace_id: int) -> SpanContext:
    return SpanContext(trace_id, random.getrandbits(64), is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))


def _plain(value: Any) -> str | bool | int | float:
    return value if isinstance(value, str | bool | int | float) else str(value)


def open_sink(
    config: TelemetryConfig, *, directory: Path, run_name: str, settings: dict[str, Any]
) -> OpenTelemetrySink:
    """The endpoint and its headers are read from OpenTelemetry's own variables (`OTEL_EXPORTER_OTLP_ENDPOINT`, ...)."""
    return OpenTelemetrySink(OTLPSpanExporter(), run_name=run_name)
