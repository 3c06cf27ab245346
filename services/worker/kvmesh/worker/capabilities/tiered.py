"""What an engine does that has tiers below it, and what the mesh learns of that."""

from collections.abc import Callable, Iterator
from typing import Protocol, runtime_checkable

from msgspec import Struct
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from kvmesh.bus.messages import ControlReply, Prefetch
from kvmesh.worker.engine import Engine

PREFIX = "kvmesh_worker_"


class TierCounts(Struct, frozen=True, kw_only=True):
    """Blocks since the start; `loaded` by the tier that they were in."""

    loaded: list[int]
    written: int = 0
    skipped: int = 0
    corrupt: int = 0


@runtime_checkable
class Prefetching(Protocol):
    """What an engine has besides `Engine` if it can bring in blocks before they are asked for."""

    def prefetch(self, wish: Prefetch) -> str:
        """Have a prompt's blocks ready in time; returns why not if so. `abort` ends it."""
        ...


@runtime_checkable
class Tiered(Protocol):
    """What an engine has besides `Engine` if blocks come to it from below, and go there."""

    def tier_counts(self) -> TierCounts | None:
        """What has moved so far; None if there can be no tiers below."""
        ...


def prefetch(engine: Engine, name: str, wish: Prefetch) -> ControlReply:
    """Do it, or say why not."""
    if not isinstance(engine, Prefetching):
        return ControlReply(False, f"unsupported: the {name} engine cannot prefetch")
    reason = engine.prefetch(wish)
    return ControlReply(not reason, reason)


class TierCollector(Collector):
    """The counts as `kvmesh_worker_*`."""

    def __init__(self, counts: Callable[[], TierCounts | None]) -> None:
        self._counts = counts

    def collect(self) -> Iterator[Metric]:
        counts = self._counts()
        if counts is None:
            return
        text = "KV blocks that came from a tier below"
        loaded = CounterMetricFamily(f"{PREFIX}loaded_blocks", text, labels=["tier"])
        for tier, blocks in enumerate(counts.loaded[1:], 1):
            loaded.add_metric([str(tier)], blocks)
        yield loaded
        for name, text, value in (
            ("written_blocks", "KV blocks written through to the tiers below", counts.written),
            ("unwritten_blocks", "KV blocks not written through, to wait for none", counts.skipped),
            ("corrupt_blocks", "KV blocks from below that had a wrong checksum", counts.corrupt),
        ):
            yield CounterMetricFamily(PREFIX + name, text, value=value)
