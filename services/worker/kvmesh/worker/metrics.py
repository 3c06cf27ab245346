"""Prometheus series of a worker; the collectors read the engine when they are scraped."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Generic, NamedTuple, TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvmesh.bus.messages import Load, Phase, StartSource
from kvmesh.weights.frames import WeightsCounts
from kvmesh.worker.capabilities import HandoffCounts, TierCounts
from kvmesh.worker.enginecore.counters import LedgerCounts, RetentionState

# Field of `Load`: the series' name and its meaning.
GAUGES = {
    "running": ("running_requests", "requests in the running batch"),
    "waiting": ("waiting_requests", "requests queued in the engine"),
    "active_blocks": ("active_blocks", "KV blocks in use by running requests"),
    "cached_blocks": ("cached_blocks", "KV blocks cached for reuse"),
    "total_blocks": ("total_blocks", "KV blocks of the rank"),
    "prefill_tokens": ("prefill_tokens", "prompt tokens still to compute"),
    "step_s": ("step_seconds", "mean duration of recent engine steps"),
    "decoding": ("decoding_requests", "sequences that get a token per step"),
    "decode_tokens": ("decode_tokens", "KV tokens of the decoding sequences"),
    "decode_var": ("decode_var", "variance of the decoding sequences' KV lengths, in tokens²"),
    "waiting_tokens": ("waiting_tokens", "prompt tokens of the queued requests"),
    "waiting_var": ("waiting_var", "variance of the queued requests' lengths, in tokens²"),
}
COUNTERS = {
    "steps": ("steps", "engine steps"),
    "requests": ("requests", "requests accepted"),
    "prompt_tokens": ("prompt_tokens", "prompt tokens of accepted requests"),
    "cached_tokens": ("cached_tokens", "prompt tokens found in the cache"),
    "output_tokens": ("output_tokens", "tokens generated"),
    "preemptions": ("preemptions", "requests preempted for lack of KV blocks"),
    "aborted": ("aborted_requests", "requests cancelled"),
    "busy_s": ("busy_seconds", "seconds in engine steps"),
    "computed_tokens": ("computed_tokens", "prompt tokens computed"),
    "prefill_steps": (
        "prefill_steps",
        "engine steps that computed prompt tokens (mock, torch, and vLLM with vllm.retention)",
    ),
}
RETENTION_COUNTERS = (
    ("outcomes", "directives", "outcome", "explicit retention directives by outcome"),
    (
        "evicted",
        "evicted_blocks",
        "order",
        "blocks evicted for others by what chose them: recency, or claims and doubt",
    ),
)
T = TypeVar("T")
Samples = Iterable[tuple[Sequence[str], float]]  # values of the labels after the worker's own


class WorkerLabels(NamedTuple):
    """The labels of all series of a worker: its model and its name."""

    model: str
    worker: str


class WorkerCollector(Collector, Generic[T]):
    """Reads the engine's figures when it is scraped, and gives series `kvmesh_worker_*`."""

    def __init__(self, labels: WorkerLabels, read: Callable[[], T]) -> None:
        self._labels = labels
        self._read = read

    def _counter(self, name: str, text: str, samples: Samples, *labels: str) -> CounterMetricFamily:
        names = [*WorkerLabels._fields, *labels]
        family = CounterMetricFamily(f"kvmesh_worker_{name}", text, labels=names)
        for own, value in samples:
            family.add_metric([*self._labels, *own], value)
        return family

    def _gauge(self, name: str, text: str, samples: Samples, *labels: str) -> GaugeMetricFamily:
        names = [*WorkerLabels._fields, *labels]
        family = GaugeMetricFamily(f"kvmesh_worker_{name}", text, labels=names)
        for own, value in samples:
            family.add_metric([*self._labels, *own], value)
        return family


class LoadCollector(WorkerCollector[Iterable[Load]]):
    """One sample per rank and field of `Load`, as `kvmesh_worker_*`."""

    def collect(self) -> Iterator[Metric]:
        loads = list(self._read())
        for field, (name, text) in GAUGES.items():
            yield self._gauge(name, text, _by_rank(loads, field), "rank")
        for field, (name, text) in COUNTERS.items():
            yield self._counter(name, text, _by_rank(loads, field), "rank")


class StartCollector(WorkerCollector[Iterable[Phase]]):
    """The phases of the worker's start so far, as `kvmesh_worker_start_seconds`."""

    def collect(self) -> Iterator[Metric]:
        yield self._gauge(
            "start_seconds",
            "seconds of the worker's start that each phase took",
            (([phase.name], phase.seconds) for phase in self._read()),
            "phase",
        )


class SourceCollector(WorkerCollector[Iterable[StartSource]]):
    """Sources of weights and compiled code, as `kvmesh_worker_start_bytes`."""

    def collect(self) -> Iterator[Metric]:
        sources = list(self._read())
        yield self._gauge(
            "start_bytes",
            "bytes of weights and compiled code with which the engine started, by source",
            (([each.part, each.source], each.bytes) for each in sources),
            "part",
            "source",
        )
        yield self._gauge(
            "compile_cache_hit",
            "1 if the engine started with code that was compiled before, 0 if it compiled all",
            (((), float(each.source != "compiled")) for each in sources if each.part == "code"),
        )


class RetentionCollector(WorkerCollector[Iterable[RetentionState]]):
    """Sessions, pins, charged blocks and outcomes, as `kvmesh_worker_retention_*`."""

    def collect(self) -> Iterator[Metric]:
        states = list(self._read())
        for field, text in (
            ("sessions", "sessions with a recorded prompt"),
            ("pins", "pins in force, including those whose blocks are absent"),
            ("charged_blocks", "blocks charged to the retention budgets of tenants"),
        ):
            yield self._gauge(f"retention_{field}", text, _by_rank(states, field), "rank")
        for field, name, label, text in RETENTION_COUNTERS:
            samples = (
                ([str(state.rank), value], count)
                for state in states
                for value, count in getattr(state, field).items()
            )
            yield self._counter(f"retention_{name}", text, samples, "rank", label)


class TierCollector(WorkerCollector[TierCounts | None]):
    """Blocks moved between the engine and lower tiers, as `kvmesh_worker_*_blocks`."""

    def collect(self) -> Iterator[Metric]:
        counts = self._read()
        if counts is None:
            return
        yield self._counter(
            "onboarded_blocks",
            "KV blocks loaded from lower tiers",
            (([str(tier)], blocks) for tier, blocks in enumerate(counts.loaded[1:], 1)),
            "tier",
        )
        for name, text, value in (
            ("write_through_blocks", "KV blocks written through to lower tiers", counts.written),
            (
                "write_through_skipped_blocks",
                "KV blocks not written through because the queue was full",
                counts.skipped,
            ),
            ("corrupt_blocks", "KV blocks from lower tiers with a wrong checksum", counts.corrupt),
        ):
            yield self._counter(name, text, [((), value)])


class EventCollector(WorkerCollector[Iterable[LedgerCounts]]):
    """Blocks and messages of an engine's KV events, as `kvmesh_worker_event_*`."""

    def collect(self) -> Iterator[Metric]:
        ranks = list(self._read())
        yield self._counter(
            "event_blocks",
            "blocks of the engine's KV events that reached the index, by tier",
            (
                ([str(each.rank), str(tier)], blocks)
                for each in ranks
                for tier, blocks in enumerate(each.kept)
            ),
            "rank",
            "tier",
        )
        yield self._counter(
            "event_dropped_blocks",
            "blocks of the engine's KV events that the index cannot have, by reason",
            (
                ([str(each.rank), reason, str(tier)], blocks)
                for each in ranks
                for reason, tiers in sorted(each.dropped.items())
                for tier, blocks in enumerate(tiers)
                if blocks
            ),
            "rank",
            "reason",
            "tier",
        )
        yield self._counter(
            "event_malformed_messages",
            "messages of the engine's KV events that could not be decoded",
            _by_rank(ranks, "malformed"),
            "rank",
        )
        yield self._counter(
            "event_lost_messages",
            "messages of the engine's KV events that never arrived",
            _by_rank(ranks, "lost"),
            "rank",
        )
        yield self._gauge(
            "event_unplaced_blocks",
            "blocks that wait for a KV event which says what precedes them",
            _by_rank(ranks, "unplaced"),
            "rank",
        )
        yield self._gauge(
            "event_limits",
            "1 for what the index cannot know of the engine: draft (blocks depend on the tokens"
            " after them) or windows (layers differ in the blocks that they need)",
            (([str(each.rank), limit], 1) for each in ranks for limit in each.limits),
            "rank",
            "limit",
        )


class HandoffCollector(WorkerCollector[HandoffCounts | None]):
    """Handoffs and their bytes, as `kvmesh_worker_handoff*`."""

    def collect(self) -> Iterator[Metric]:
        counts = self._read()
        if counts is None:
            return
        yield self._counter(
            "handoffs",
            "Prompts whose KV was offered to another worker or fetched from one, by result",
            sorted(counts.ended.items()),
            "side",
            "result",
        )
        yield self._counter(
            "handoff_bytes",
            "Bytes of KV fetched from other workers",
            [((), counts.fetched_bytes)],
        )


class WeightsCollector(WorkerCollector[WeightsCounts]):
    """Weights that the worker takes from others and sends to them, as `kvmesh_worker_weights_*`."""

    def __init__(
        self,
        labels: WorkerLabels,
        counts: Callable[[], WeightsCounts],
        stored_bytes: Callable[[], int],
    ) -> None:
        super().__init__(labels, counts)
        self._stored_bytes = stored_bytes

    def collect(self) -> Iterator[Metric]:
        counts = self._read()
        yield self._counter(
            "weights_taken_bytes",
            "bytes of weights that were fetched and verified, from a peer, the disk or the store of"
            " models",
            (([source], count) for source, count in sorted(counts.taken.items())),
            "source",
        )
        yield self._counter(
            "weights_sent_bytes", "bytes of weights sent to other workers", [((), counts.sent)]
        )
        yield self._counter(
            "weights_failed_chunks",
            "requests for chunks of weights that failed: lost, timeout, busy, corrupt (a wrong"
            " digest)",
            (([reason], count) for reason, count in sorted(counts.failed.items())),
            "reason",
        )
        yield self._gauge(
            "weights_sources",
            "workers from which weights come now",
            [((), counts.sources)],
        )
        yield self._gauge(
            "weights_stored_bytes",
            "bytes of all copies of weights in the memory of the worker's node",
            [((), self._stored_bytes())],
        )


def _by_rank(ranks: Iterable[Load | RetentionState | LedgerCounts], field: str) -> Samples:
    return (([str(each.rank)], getattr(each, field)) for each in ranks)
