"""Figures of a process's connection to NATS, read when they are scraped, as `kvmesh_bus_*`."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

_PREFIX = "kvmesh_bus_"
_TRAFFIC = {
    "sent_messages": ("out_msgs", "Messages sent to NATS"),
    "sent_bytes": ("out_bytes", "Bytes of the messages sent to NATS"),
    "received_messages": ("in_msgs", "Messages received from NATS"),
    "received_bytes": ("in_bytes", "Bytes of the messages received from NATS"),
}
_COUNTS = {
    "reconnects": "Times the connection to NATS was lost and made again",
    "refusals": "Publishes and subscriptions that the server's permissions have refused",
    "failed_posts": "Messages dropped: the queue of unsent messages was full, or sending failed",
    "kv_events": "KV events that this process has stored in the stream of KV events",
    "kv_retries": "Batches of KV events sent again since NATS had not stored them",
    "kv_overflows": "Times a rank's backlog of KV events was dropped in favour of a dump",
}


@dataclass
class BusCounts:
    """Events of one connection since the process began; the last two are by stream."""

    reconnects: int = 0
    refusals: int = 0
    failed_posts: int = 0
    kv_events: int = 0
    kv_retries: int = 0
    kv_overflows: int = 0
    reader_restarts: Counter[str] = field(default_factory=Counter)
    stream_resets: Counter[str] = field(default_factory=Counter)


class PendingReader(Protocol):
    """A reader of a stream."""

    @property
    def stream(self) -> str: ...
    @property
    def pending(self) -> int: ...


class KvBacklog(Protocol):
    """A publisher of KV events."""

    @property
    def backlog_bytes(self) -> int: ...


class ObservedBus(Protocol):
    """A connection, as its collector sees it; `client.stats` is that of nats-py."""

    counts: BusCounts
    client: Any

    @property
    def readers(self) -> Iterable[PendingReader]: ...
    @property
    def connected(self) -> bool: ...
    @property
    def unsent(self) -> int: ...
    @property
    def kv_backlog_bytes(self) -> int: ...


class BusCollector(Collector):
    """Exports the counts and levels of one bus; None yields the families without samples."""

    def __init__(self, bus: ObservedBus | None) -> None:
        self._bus = bus

    def collect(self) -> Iterator[Metric]:
        yield from self._connection()
        yield from self._streams()

    def _connection(self) -> Iterator[Metric]:
        bus = self._bus
        levels = {
            "connected": ("1 while the process has a connection to NATS, else 0", "connected"),
            "unsent_messages": ("Messages queued in front of the connection", "unsent"),
            "kv_backlog_bytes": ("Estimated bytes of unsent KV events", "kv_backlog_bytes"),
        }
        for name, (text, attribute) in levels.items():
            value = None if bus is None else float(getattr(bus, attribute))
            yield GaugeMetricFamily(_PREFIX + name, text, value=value)
        for name, (key, text) in _TRAFFIC.items():
            value = None if bus is None else bus.client.stats[key]
            yield CounterMetricFamily(_PREFIX + name, text, value=value)
        for name, text in _COUNTS.items():
            value = None if bus is None else getattr(bus.counts, name)
            yield CounterMetricFamily(_PREFIX + name, text, value=value)

    def _streams(self) -> Iterator[Metric]:
        pending = GaugeMetricFamily(
            _PREFIX + "pending_messages",
            "Messages of a stream that this process has yet to read",
            labels=["stream"],
        )
        restarts = CounterMetricFamily(
            _PREFIX + "reader_restarts",
            "Times a reader got a new consumer: a message was missing, or the consumer fell silent",
            labels=["stream"],
        )
        resets = CounterMetricFamily(
            _PREFIX + "stream_resets",
            "Times a stream was read anew, since it had been recreated or rewound",
            labels=["stream"],
        )
        if self._bus is not None:
            counts = self._bus.counts
            levels: Counter[str] = Counter()
            for reader in self._bus.readers:
                levels[reader.stream] += reader.pending
            for stream, messages in levels.items():
                pending.add_metric([stream], messages)
                restarts.add_metric([stream], counts.reader_restarts[stream])
                resets.add_metric([stream], counts.stream_resets[stream])
        yield from (pending, restarts, resets)
