"""Prometheus series of a worker, read from its load when they are scraped."""

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import Counter
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvmesh.bus.messages import Load
from kvmesh.worker.enginecore.counters import RetentionState

handoffs = Counter(
    "kvmesh_worker_handoffs",
    "Prompts whose KV was left for another worker or fetched from one, and what came of it",
    ["side", "result"],
)
handoff_bytes = Counter("kvmesh_worker_handoff_bytes", "KV fetched from other workers")
GAUGES = {
    "running": ("requests", "requests in the running batch"),
    "waiting": ("requests", "requests queued in the engine"),
    "active_blocks": ("blocks", "KV blocks that running requests use"),
    "cached_blocks": ("blocks", "KV blocks kept for reuse"),
    "total_blocks": ("blocks", "KV blocks in all"),
    "prefill_tokens": ("tokens", "prompt tokens not computed yet"),
    "step_s": ("seconds", "mean duration of the last engine steps"),
}
COUNTERS = {
    "steps": "engine steps",
    "requests": "requests accepted",
    "prompt_tokens": "prompt tokens of accepted requests",
    "cached_tokens": "prompt tokens that came from the cache",
    "output_tokens": "tokens generated",
    "preemptions": "requests that had to give their blocks back",
    "aborted": "requests that were cancelled",
    "busy_s": "seconds in engine steps",
    "computed_tokens": "prompt tokens computed",
}


class LoadCollector(Collector):
    """One sample per rank and field of `Load`, as `kvmesh_worker_*`."""

    def __init__(self, loads: Callable[[], Iterable[Load]]) -> None:
        self._loads = loads

    def collect(self) -> Iterator[Metric]:
        loads = list(self._loads())
        for field, (_, text) in GAUGES.items():
            name = "step_seconds" if field == "step_s" else field
            gauge = GaugeMetricFamily(f"kvmesh_worker_{name}", text, labels=["rank"])
            for load in loads:
                gauge.add_metric([str(load.rank)], getattr(load, field))
            yield gauge
        for field, text in COUNTERS.items():
            name = "busy_seconds" if field == "busy_s" else field
            counter = CounterMetricFamily(f"kvmesh_worker_{name}", text, labels=["rank"])
            for load in loads:
                counter.add_metric([str(load.rank)], getattr(load, field))
            yield counter


class RetentionCollector(Collector):
    """Sessions, pins, kept blocks and outcomes, as `kvmesh_worker_retention_*`."""

    def __init__(self, states: Callable[[], Iterable[RetentionState]]) -> None:
        self._states = states

    def collect(self) -> Iterator[Metric]:
        states = list(self._states())
        for field, text in (
            ("sessions", "sessions whose prompts are known"),
            ("pins", "pins that hold or wait for their blocks"),
            ("kept_blocks", "blocks kept beyond their turn because somebody asked"),
        ):
            gauge = GaugeMetricFamily(f"kvmesh_worker_retention_{field}", text, labels=["rank"])
            for state in states:
                gauge.add_metric([str(state.rank)], getattr(state, field))
            yield gauge
        counter = CounterMetricFamily(
            "kvmesh_worker_retention_directives",
            "explicit directives by what came of them",
            labels=["rank", "outcome"],
        )
        for state in states:
            for outcome, count in state.outcomes.items():
                counter.add_metric([str(state.rank), outcome], count)
        yield counter
