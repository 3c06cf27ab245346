"""Prometheus series of a worker; the collectors read the engine when they are scraped."""

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

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
    (
        "evicted",
        "evicted_blocks",
        "order",
        "blocks evicted for others by what chose them: a forecast, recency, or claims and doubt",
    ),
    (
        "forecasts",
        "forecasts",
        "result",
        "forecasts of returns: applied, unknown (no ended request here yet), malformed",
    ),
    (
        "returns",
        "returns",
        "blocks",
        "prompts with a forecast whose session came back: all blocks held, or some evicted",
    ),
)
_RANK = ["model", "worker", "rank"]


class WorkerLabels(NamedTuple):
    """The labels of all series of a worker: its model and its name."""

    model: str
    worker: str


class LoadCollector(Collector):
    """One sample per rank and field of `Load`, as `kvmesh_worker_*`."""

    def __init__(self, labels: WorkerLabels, loads: Callable[[], Iterable[Load]]) -> None:
        self._labels = labels
        self._loads = loads

    def collect(self) -> Iterator[Metric]:
        loads = list(self._loads())
        for field, (name, text) in GAUGES.items():
            gauge = GaugeMetricFamily(f"kvmesh_worker_{name}", text, labels=_RANK)
            for load in loads:
                gauge.add_metric([*self._labels, str(load.rank)], getattr(load, field))
            yield gauge
        for field, (name, text) in COUNTERS.items():
            counter = CounterMetricFamily(f"kvmesh_worker_{name}", text, labels=_RANK)
            for load in loads:
                counter.add_metric([*self._labels, str(load.rank)], getattr(load, field))
            yield counter


class StartCollector(Collector):
    """The phases of the worker's start so far, as `kvmesh_worker_start_seconds`."""

    def __init__(self, labels: WorkerLabels, phases: Callable[[], Iterable[Phase]]) -> None:
        self._labels = labels
        self._phases = phases

    def collect(self) -> Iterator[Metric]:
        gauge = GaugeMetricFamily(
            "kvmesh_worker_start_seconds",
            "seconds of the worker's start that each phase took",
            labels=["model", "worker", "phase"],
        )
        for phase in self._phases():
            gauge.add_metric([*self._labels, phase.name], phase.seconds)
        yield gauge


class SourceCollector(Collector):
    """Sources of weights and compiled code, as `kvmesh_worker_start_bytes`."""

    def __init__(self, labels: WorkerLabels, sources: Callable[[], Iterable[StartSource]]) -> None:
        self._labels = labels
        self._sources = sources

    def collect(self) -> Iterator[Metric]:
        sources = list(self._sources())
        gauge = GaugeMetricFamily(
            "kvmesh_worker_start_bytes",
            "bytes of weights and of compiled code with which the engine started, by their source:"
            " disk, workers, or the node's memory",
            labels=["model", "worker", "part", "source"],
        )
        for each in sources:
            gauge.add_metric([*self._labels, each.part, each.source], each.bytes)
        yield gauge
        hit = GaugeMetricFamily(
            "kvmesh_worker_compile_cache_hit",
            "1 if the engine started with code that was compiled before, 0 if it compiled all",
            labels=["model", "worker"],
        )
        for each in sources:
            if each.part == "code":
                hit.add_metric(self._labels, float(each.source != "compiled"))
        yield hit


class RetentionCollector(Collector):
    """Sessions, pins, charged blocks and outcomes, as `kvmesh_worker_retention_*`."""

    def __init__(
        self, labels: WorkerLabels, states: Callable[[], Iterable[RetentionState]]
    ) -> None:
        self._labels = labels
        self._states = states

    def collect(self) -> Iterator[Metric]:
        states = list(self._states())
        for field, text in (
            ("sessions", "sessions with a recorded prompt"),
            ("pins", "pins in force, including those whose blocks are absent"),
            ("charged_blocks", "blocks charged to the retention budgets of tenants"),
        ):
            gauge = GaugeMetricFamily(f"kvmesh_worker_retention_{field}", text, labels=_RANK)
            for state in states:
                gauge.add_metric([*self._labels, str(state.rank)], getattr(state, field))
            yield gauge
        counter = CounterMetricFamily(
            "kvmesh_worker_retention_directives",
            "explicit retention directives by outcome",
            labels=[*_RANK, "outcome"],
        )
        for state in states:
            for outcome, count in state.outcomes.items():
                counter.add_metric([*self._labels, str(state.rank), outcome], count)
        yield counter
        for field, name, label, text in RETENTION_COUNTERS:
            counter = CounterMetricFamily(
                f"kvmesh_worker_retention_{name}", text, labels=[*_RANK, label]
            )
            for state in states:
                for value, count in getattr(state, field).items():
                    counter.add_metric([*self._labels, str(state.rank), value], count)
            yield counter


class TierCollector(Collector):
    """Blocks moved between the engine and lower tiers, as `kvmesh_worker_*_blocks`."""

    def __init__(self, labels: WorkerLabels, counts: Callable[[], TierCounts | None]) -> None:
        self._labels = labels
        self._counts = counts

    def collect(self) -> Iterator[Metric]:
        counts = self._counts()
        if counts is None:
            return
        onboarded = CounterMetricFamily(
            "kvmesh_worker_onboarded_blocks",
            "KV blocks loaded from lower tiers",
            labels=["model", "worker", "tier"],
        )
        for tier, blocks in enumerate(counts.loaded[1:], 1):
            onboarded.add_metric([*self._labels, str(tier)], blocks)
        yield onboarded
        for name, text, value in (
            ("write_through_blocks", "KV blocks written through to lower tiers", counts.written),
            (
                "write_through_skipped_blocks",
                "KV blocks not written through because the queue was full",
                counts.skipped,
            ),
            ("corrupt_blocks", "KV blocks from lower tiers with a wrong checksum", counts.corrupt),
        ):
            counter = CounterMetricFamily(f"kvmesh_worker_{name}", text, labels=["model", "worker"])
            counter.add_metric(self._labels, value)
            yield counter


class EventCollector(Collector):
    """Blocks and messages of an engine's KV events, as `kvmesh_worker_event_*`."""

    def __init__(self, labels: WorkerLabels, counts: Callable[[], Iterable[LedgerCounts]]) -> None:
        self._labels = labels
        self._counts = counts

    def collect(self) -> Iterator[Metric]:
        ranks = list(self._counts())
        kept = CounterMetricFamily(
            "kvmesh_worker_event_blocks",
            "blocks of the engine's KV events that reached the index, by tier",
            labels=[*_RANK, "tier"],
        )
        dropped = CounterMetricFamily(
            "kvmesh_worker_event_dropped_blocks",
            "blocks of the engine's KV events that the index cannot have: of another block_size,"
            " without as many tokens, of unknown_position (no event said what precedes them), below"
            " an engine that was reset, or the oldest of those never_removed",
            labels=[*_RANK, "reason", "tier"],
        )
        malformed = CounterMetricFamily(
            "kvmesh_worker_event_malformed_messages",
            "messages of the engine's KV events that could not be decoded",
            labels=_RANK,
        )
        unplaced = GaugeMetricFamily(
            "kvmesh_worker_event_unplaced_blocks",
            "blocks that wait for a KV event which says what precedes them",
            labels=_RANK,
        )
        limits = GaugeMetricFamily(
            "kvmesh_worker_event_limits",
            "1 for what the index cannot know of the engine: draft (blocks depend on the tokens"
            " after them) or windows (some of a prompt's blocks are enough, or other groups' are"
            " needed)",
            labels=[*_RANK, "limit"],
        )
        for counts in ranks:
            rank = [*self._labels, str(counts.rank)]
            for limit in counts.limits:
                limits.add_metric([*rank, limit], 1)
            for tier, blocks in enumerate(counts.kept):
                kept.add_metric([*rank, str(tier)], blocks)
            for reason, tiers in sorted(counts.dropped.items()):
                for tier, blocks in enumerate(tiers):
                    if blocks:
                        dropped.add_metric([*rank, reason, str(tier)], blocks)
            malformed.add_metric(rank, counts.malformed)
            unplaced.add_metric(rank, counts.unplaced)
        yield from (kept, dropped, malformed, unplaced, limits)


class HandoffCollector(Collector):
    """Handoffs and their bytes, as `kvmesh_worker_handoff*`."""

    def __init__(self, labels: WorkerLabels, counts: Callable[[], HandoffCounts | None]) -> None:
        self._labels = labels
        self._counts = counts

    def collect(self) -> Iterator[Metric]:
        counts = self._counts()
        if counts is None:
            return
        ended = CounterMetricFamily(
            "kvmesh_worker_handoffs",
            "Prompts whose KV was offered to another worker or fetched from one, by result",
            labels=["model", "worker", "side", "result"],
        )
        for (side, result), count in sorted(counts.ended.items()):
            ended.add_metric([*self._labels, side, result], count)
        yield ended
        fetched = CounterMetricFamily(
            "kvmesh_worker_handoff_bytes",
            "Bytes of KV fetched from other workers",
            labels=["model", "worker"],
        )
        fetched.add_metric(self._labels, counts.fetched_bytes)
        yield fetched


class WeightsCollector(Collector):
    """Weights that the worker takes from others and sends to them, as `kvmesh_worker_weights_*`."""

    def __init__(
        self,
        labels: WorkerLabels,
        counts: Callable[[], WeightsCounts],
        stored_bytes: Callable[[], int],
    ) -> None:
        self._labels = labels
        self._counts = counts
        self._stored_bytes = stored_bytes

    def collect(self) -> Iterator[Metric]:
        counts = self._counts()
        names = ["model", "worker"]
        taken = CounterMetricFamily(
            "kvmesh_worker_weights_taken_bytes",
            "bytes of weights that were fetched and verified, from a peer, the disk or the store of"
            " models",
            labels=[*names, "source"],
        )
        for source, count in sorted(counts.taken.items()):
            taken.add_metric([*self._labels, source], count)
        yield taken
        sent = CounterMetricFamily(
            "kvmesh_worker_weights_sent_bytes",
            "bytes of weights sent to other workers",
            labels=names,
        )
        sent.add_metric(self._labels, counts.sent)
        yield sent
        failed = CounterMetricFamily(
            "kvmesh_worker_weights_failed_chunks",
            "requests for chunks of weights that failed: lost, timeout, busy, corrupt (a wrong"
            " digest)",
            labels=[*names, "reason"],
        )
        for reason, count in sorted(counts.failed.items()):
            failed.add_metric([*self._labels, reason], count)
        yield failed
        sources = GaugeMetricFamily(
            "kvmesh_worker_weights_sources",
            "workers from which weights come now",
            labels=names,
        )
        sources.add_metric(self._labels, counts.sources)
        yield sources
        stored = GaugeMetricFamily(
            "kvmesh_worker_weights_stored_bytes",
            "bytes of all copies of weights in the memory of the worker's node",
            labels=names,
        )
        stored.add_metric(self._labels, self._stored_bytes())
        yield stored
