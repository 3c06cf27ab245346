"""The collector that the settings name, or else the variables of the OpenTelemetry SDK."""

import os

from kvmesh.settings.schema import TracingSettings

GRPC, HTTP = "grpc", "http"
HTTP_PATH = "/v1/traces"


def turned_on(settings: TracingSettings) -> bool:
    """True if spans are to be exported."""
    env = os.environ
    if env.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return False
    if settings.endpoint:
        return True
    return bool(endpoint(settings)) and env.get("OTEL_TRACES_EXPORTER", "otlp") == "otlp"


def endpoint(settings: TracingSettings) -> str:
    """The endpoint; empty if none is named."""
    env = os.environ
    named = env.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") or env.get("OTEL_EXPORTER_OTLP_ENDPOINT")
    return settings.endpoint or named or ""


def protocol(settings: TracingSettings) -> str:
    """`GRPC` or `HTTP`."""
    if settings.protocol != "auto":
        return settings.protocol
    env = os.environ
    named = env.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or env.get("OTEL_EXPORTER_OTLP_PROTOCOL")
    return HTTP if (named or "").startswith("http") else GRPC


def traces_url(url: str) -> str:
    """The URL of an HTTP endpoint for traces."""
    return url if url.endswith(HTTP_PATH) else url.rstrip("/") + HTTP_PATH
