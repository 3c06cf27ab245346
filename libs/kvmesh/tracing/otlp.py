"""Export of spans by the OpenTelemetry SDK over OTLP. The only module that imports the SDK."""

import logging
import os
import time
from collections.abc import Sequence
from threading import Thread

from opentelemetry import trace as api
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import Event, ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult
from opentelemetry.sdk.trace.export import SpanExporter as SdkExporter
from opentelemetry.sdk.trace.sampling import Decision, ParentBased, TraceIdRatioBased
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace.span import TraceState
from opentelemetry.trace.status import Status, StatusCode
from opentelemetry.util.re import parse_env_headers

from kvmesh.settings.schema import TracingSettings
from kvmesh.tracing.endpoint import HTTP, protocol, traces_url
from kvmesh.tracing.names import CONVENTIONS, MODEL, OPERATION, PROVIDER, REQUEST, opted_in
from kvmesh.tracing.span import TraceContext, TraceSpan

log = logging.getLogger(__name__)
_KINDS = {
    "internal": api.SpanKind.INTERNAL,
    "server": api.SpanKind.SERVER,
    "client": api.SpanKind.CLIENT,
}
_SCOPE = InstrumentationScope("kvmesh")
_UNSET = Status()


class OtlpExport:
    """Queues spans for a thread of the SDK, which sends them; a full queue drops the oldest.

    The SDK reads its `OTEL_…` variables wherever a setting is absent.
    """

    def __init__(
        self, settings: TracingSettings, service: str, instance: str, version: str
    ) -> None:
        own = Resource.create(
            {
                "service.name": service,
                "service.namespace": "kvmesh",
                "service.instance.id": instance,
                "service.version": version,
            }
        )
        merged = own.merge(OTELResourceDetector().detect())
        resource = _HashedResource(merged.attributes, merged.schema_url)
        ratio = settings.sample_ratio
        sampler = None if ratio is None else ParentBased(TraceIdRatioBased(ratio))
        self._provider = TracerProvider(sampler=sampler, resource=resource, shutdown_on_exit=False)
        self._exporter = _LoggedExporter(_otlp(settings))
        self._processor = BatchSpanProcessor(
            self._exporter,
            max_queue_size=settings.queue,
            max_export_batch_size=min(512, settings.queue),
        )
        self._conventions = opted_in(os.environ.get("OTEL_SEMCONV_STABILITY_OPT_IN", ""))

    def samples(self, trace_id: str, parent: TraceContext | None) -> bool:
        context = None
        if parent is not None:
            remote = api.NonRecordingSpan(_context(parent.trace_id, parent.span_id, parent.sampled))
            context = api.set_span_in_context(remote)
        result = self._provider.sampler.should_sample(context, int(trace_id, 16), REQUEST)
        return result.decision is Decision.RECORD_AND_SAMPLE

    def export(self, span: TraceSpan) -> None:
        self._processor.on_end(self._readable(span))

    def close(self, timeout_s: float) -> None:
        """Send what is queued, for at most `timeout_s` seconds; blocks."""
        # the exporter may wait for a server beyond any deadline, so a daemon thread waits for it
        closing = Thread(target=self._processor.shutdown, name="tracing", daemon=True)
        closing.start()
        closing.join(timeout_s)

    def _readable(self, span: TraceSpan) -> ReadableSpan:
        # one offset per span: the clocks' difference changes when the machine's time is set
        offset = time.time_ns() - time.monotonic_ns()
        attributes, name = span.attributes, span.name
        if self._conventions:
            if name == REQUEST:
                name = (
                    f"{attributes.get(OPERATION, '')} {attributes.get(MODEL, '')}".strip() or name
                )
                attributes = {PROVIDER: "kvmesh", **attributes}
            attributes = {CONVENTIONS.get(key, key): value for key, value in attributes.items()}
        parent = _context(span.trace.id, span.parent_id, True) if span.parent_id else None
        return ReadableSpan(
            name=name,
            context=_context(span.trace.id, span.id, True, span.trace.state),
            parent=parent,
            resource=self._provider.resource,
            attributes=attributes,
            events=[Event(event, timestamp=offset + _ns(at)) for event, at in span.events],
            links=[api.Link(_context(*link)) for link in span.links],
            kind=_KINDS[span.kind],
            status=Status(StatusCode.ERROR, span.error) if span.error else _UNSET,
            start_time=offset + _ns(span.start),
            end_time=offset + _ns(span.stop if span.stop is not None else span.start),
            instrumentation_scope=_SCOPE,
        )


class _HashedResource(Resource):
    """A resource that is hashed once: the SDK's encoder hashes it, as JSON, for every span."""

    _hash: int | None = None

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = super().__hash__()
        return self._hash

    def __eq__(self, other: object) -> bool:
        return super().__eq__(other)


class _LoggedExporter(SdkExporter):
    """Logs the first failure of an outage with its cause, and the end of the outage."""

    def __init__(self, exporter: SdkExporter) -> None:
        self._exporter = exporter
        self._failing = False
        self._causes = _Causes()
        sdk = logging.getLogger("opentelemetry")
        sdk.addHandler(self._causes)
        sdk.propagate = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self._causes.last = ""
        try:
            result = self._exporter.export(spans)
        except Exception as error:  # exporters and their transports raise any type
            self._causes.last, result = repr(error), SpanExportResult.FAILURE
        failed = result is not SpanExportResult.SUCCESS
        if failed and not self._failing:
            log.warning("spans are lost, the exporter fails: %s", self._causes.last or "no cause")
        elif self._failing and not failed:
            log.info("the exporter of spans works again")
        self._failing = failed
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()
        logging.getLogger("opentelemetry").removeHandler(self._causes)

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return self._exporter.force_flush(timeout_millis)


class _Causes(logging.Handler):
    """Holds the last message of the SDK's exporter, in place of a line for each retry.

    Messages about the queue are logged: the SDK repeats none within a minute.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.last = ""

    def emit(self, record: logging.LogRecord) -> None:
        if record.name.startswith("opentelemetry.sdk"):
            log.warning("spans are lost: %s", record.getMessage())
        elif record.name.startswith("opentelemetry.exporter"):
            self.last = record.getMessage()  # others repeat what clients send, such as `tracestate`


def _otlp(settings: TracingSettings) -> SdkExporter:
    """The SDK's exporter; absent settings are None, so that it reads its own variables."""
    headers = parse_env_headers(settings.headers, liberal=True) if settings.headers else None
    named: str | None = settings.endpoint or None
    if protocol(settings) == HTTP:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        url = None if named is None else traces_url(named)
        return OTLPSpanExporter(url, headers=headers, timeout=settings.timeout_s)
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import (
        OTLPSpanExporter as GrpcExporter,
    )

    # the SDK reads "no TLS" from the URL's scheme
    return GrpcExporter(
        named, headers=dict(headers) if headers else None, timeout=settings.timeout_s
    )


def _context(trace_id: str, span_id: str, sampled: bool, state: str = "") -> api.SpanContext:
    flags = api.TraceFlags(api.TraceFlags.SAMPLED if sampled else api.TraceFlags.DEFAULT)
    known = TraceState.from_header([state]) if state else None
    return api.SpanContext(int(trace_id, 16), int(span_id, 16), True, flags, known)


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
