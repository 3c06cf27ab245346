"""An OTLP collector for tests, over HTTP: decodes and stores the spans that it receives."""

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)


@dataclass(frozen=True)
class ReceivedSpan:
    """One span as a collector receives it; times in seconds."""

    name: str
    service: str
    trace: str
    id: str
    parent: str
    start: float
    end: float
    attributes: dict[str, Any]
    events: list[str]
    links: list[str]
    failed: bool
    kind: int


@dataclass
class Collector:
    """Received spans, in the order of their arrival; `status` is that of the replies."""

    url: str = ""
    spans: list[ReceivedSpan] = field(default_factory=list)
    status: int = 200

    @property
    def env(self) -> dict[str, str]:
        """Environment variables that send the spans of processes here, soon after their end."""
        return {
            "KVMESH_TRACING_ENDPOINT": self.url,
            "KVMESH_TRACING_PROTOCOL": "http",
            "OTEL_BSP_SCHEDULE_DELAY": "100",
        }

    def traces(self) -> dict[str, list[ReceivedSpan]]:
        found: defaultdict[str, list[ReceivedSpan]] = defaultdict(list)
        for span in self.spans:
            found[span.trace].append(span)
        return found

    def named(self, name: str) -> list[ReceivedSpan]:
        return [span for span in self.spans if span.name == name]

    def orphans(self) -> list[ReceivedSpan]:
        """Spans whose parent has not arrived."""
        known = {(span.trace, span.id) for span in self.spans}
        return [s for s in self.spans if s.parent and (s.trace, s.parent) not in known]

    async def receive(self, http: web.Request) -> web.Response:
        request = ExportTraceServiceRequest.FromString(await http.read())
        if self.status == web.HTTPOk.status_code:
            self.spans += _spans(request)
        answer = ExportTraceServiceResponse().SerializeToString()
        return web.Response(body=answer, status=self.status, content_type="application/x-protobuf")

    async def serve(self) -> web.AppRunner:
        """Serve on a free port until the returned runner is cleaned up."""
        app = web.Application()
        app.router.add_post("/v1/traces", self.receive)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        return runner


def _spans(request: ExportTraceServiceRequest) -> list[ReceivedSpan]:
    found = []
    for resource in request.resource_spans:
        service = {a.key: _value(a.value) for a in resource.resource.attributes}["service.name"]
        for scope in resource.scope_spans:
            found += [
                ReceivedSpan(
                    name=span.name,
                    service=service,
                    trace=span.trace_id.hex(),
                    id=span.span_id.hex(),
                    parent=span.parent_span_id.hex(),
                    start=span.start_time_unix_nano / 1e9,
                    end=span.end_time_unix_nano / 1e9,
                    attributes={a.key: _value(a.value) for a in span.attributes},
                    events=[event.name for event in span.events],
                    links=[link.trace_id.hex() for link in span.links],
                    failed=span.status.code == span.status.STATUS_CODE_ERROR,
                    kind=span.kind,
                )
                for span in scope.spans
            ]
    return found


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(each) for each in value.array_value.values]
    return getattr(value, kind) if kind else None
