"""This frontend's metrics under the names of NVIDIA Dynamo's, for its boards and autoscalers."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector

from kvmesh.frontend import metrics
from kvmesh.frontend.models import ModelRegistry

PREFIX = "dynamo_frontend_"
# Its names of the generating endpoints, by ours.
ENDPOINTS = {
    "chat": "chat_completions",
    "completions": "completions",
    "responses": "responses",
    "messages": "anthropic_messages",
}
SUCCESS, CLIENT_CLOSED = range(200, 300), 499
ERRORS = {
    **dict.fromkeys((400, 413, 415), "validation"),
    404: "not_found",
    **dict.fromkeys((429, 529), "overload"),
    CLIENT_CLOSED: "cancelled",
    503: "unavailable",
    504: "response_timeout",
}


class Source(Protocol):
    """A metric of this process."""

    def collect(self) -> Iterable[Metric]: ...


SAME: Mapping[str, Source] = {
    "time_to_first_token_seconds": metrics.ttft,
    "inter_token_latency_seconds": metrics.itl,
    "request_duration_seconds": metrics.duration,
    "output_tokens": metrics.output_tokens,
    "model_cancellation": metrics.cancellations,
}
# Sizes by model: the sum, and the requests counted; Dynamo's have buckets besides.
SIZES: Mapping[str, Source] = {
    "input_sequence_tokens": metrics.prompt_tokens,
    "output_sequence_tokens": metrics.output_tokens,
    "cached_tokens": metrics.cached_tokens,
}


class DynamoMetrics(Collector):
    """Reads the metrics that this process has anyway; it counts nothing itself."""

    def __init__(self, registry: ModelRegistry, migration_limit: int) -> None:
        self._registry = registry
        self._migration_limit = migration_limit

    def collect(self) -> Iterator[Metric]:
        for name, source in SAME.items():
            yield from _renamed(source, PREFIX + name)
        yield from self._sizes()
        yield from _requests()
        yield from _running()
        yield from _migrations()
        yield from self._models()

    def _sizes(self) -> Iterator[Metric]:
        counts = _by_model(metrics.duration, "_count")
        for name, source in SIZES.items():
            family = SummaryMetricFamily(PREFIX + name, "Tokens of requests", labels=["model"])
            for model, total in _by_model(source, "_total").items():
                family.add_metric([model], int(counts.get(model, 0.0)), total)
            yield family

    def _models(self) -> Iterator[Metric]:
        context = _gauge("model_context_length", "Tokens of the context")
        block = _gauge("model_kv_cache_block_size", "Tokens of a block")
        limit = _gauge("model_migration_limit", "Most migrations of a request")
        ready = _gauge("model_ready", "The model is served")
        for model in self._registry.models:
            name = model.card.name
            context.add_metric([name], model.card.context)
            block.add_metric([name], model.card.block_size)
            limit.add_metric([name], self._migration_limit)
            ready.add_metric([name], 1)
        yield from (context, block, limit, ready)


def _gauge(name: str, text: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(PREFIX + name, text, labels=["model"])


def _requests() -> Iterator[Metric]:
    """Requests by endpoint and outcome, and those whose clients have left."""
    labels = ["model", "endpoint", "status", "error_type"]
    ended = CounterMetricFamily(f"{PREFIX}requests", "Requests answered", labels=labels)
    counts: Counter[tuple[str, str, str, str]] = Counter()
    left = 0.0
    for family in metrics.requests.collect():
        for sample in family.samples:
            status, api = int(sample.labels["status"]), sample.labels["api"]
            if api in ENDPOINTS and sample.name.endswith("_total"):
                outcome = "success" if status in SUCCESS else "error"
                error = "" if status in SUCCESS else ERRORS.get(status, "internal")
                key = (sample.labels["model"], ENDPOINTS[api], outcome, error)
                counts[key] += int(sample.value)
                left += sample.value if status == CLIENT_CLOSED else 0.0
    for found, count in counts.items():
        ended.add_metric(found, count)
    yield ended
    yield GaugeMetricFamily(f"{PREFIX}disconnected_clients", "Clients that left early", left)


def _running() -> Iterator[Metric]:
    """Requests that run, and those of them without a first token."""
    running = _gauge("inflight_requests", "Requests that run")
    active = _gauge("active_requests", "Requests that run")
    queued = _gauge("queued_requests", "Requests without a first token")
    counts: Counter[str] = Counter()
    for family in metrics.running.collect():
        for sample in family.samples:
            model, value = sample.labels["model"], int(sample.value)
            counts[model] += value
            if sample.labels["phase"] == metrics.WAITING:
                queued.add_metric([model], value)
    for model, count in counts.items():
        running.add_metric([model], count)
        active.add_metric([model], count)
    yield from (running, active, queued)


def _migrations() -> Iterator[Metric]:
    labels = ["model", "migration_type"]
    found = CounterMetricFamily(f"{PREFIX}model_migration", "Migrations", labels=labels)
    for model, count in _by_model(metrics.migrations, "_total").items():
        found.add_metric([model, "ongoing_request"], count)
    yield found


def _by_model(source: Source, suffix: str) -> dict[str, float]:
    return {
        sample.labels["model"]: sample.value
        for family in source.collect()
        for sample in family.samples
        if sample.name.endswith(suffix)
    }


def _renamed(source: Source, name: str) -> Iterator[Metric]:
    for family in source.collect():
        found = Metric(name, family.documentation, family.type)
        found.samples = [
            sample._replace(name=name + sample.name.removeprefix(family.name))
            for sample in family.samples
        ]
        yield found
