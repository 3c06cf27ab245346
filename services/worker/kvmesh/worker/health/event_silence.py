"""Detects engines that compute prompts and publish no KV events."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kvmesh.bus.messages import Load

SILENT_BLOCKS = 64
SILENT_REQUESTS = 8


@dataclass(frozen=True)
class RankCounters:
    """The counters of a rank at its last event."""

    published: int
    blocks: float
    requests: int


class EventSilence:
    """Finds ranks without an event for SILENT_BLOCKS blocks and SILENT_REQUESTS requests."""

    def __init__(self, name: str, block_size: int) -> None:
        self._name = name
        self._size = block_size
        self._last_event: dict[int, RankCounters] = {}

    def check(self, loads: Iterable[Load], published: Mapping[int, int]) -> dict[str, str]:
        """Return the silent ranks, each with a warning; `published` counts events so far."""
        found = {}
        for load in loads:
            now = self._counters(load, published.get(load.rank, 0))
            since = self._last_event.setdefault(load.rank, now)
            if now.published != since.published:
                self._last_event[load.rank] = now
                continue
            if (
                now.blocks - since.blocks >= SILENT_BLOCKS
                and now.requests - since.requests >= SILENT_REQUESTS
            ):
                found[str(load.rank)] = (
                    f"{self._name} rank {load.rank} computes prompts and publishes no KV events:"
                    " the index does not know what it holds"
                )
        return found

    def _counters(self, load: Load, published: int) -> RankCounters:
        """The counters of a rank now; full blocks are at least the tokens less a block per request.

        Some engines count as requests only those that were not aborted.
        """
        blocks = load.computed_tokens / self._size - load.requests - load.aborted
        return RankCounters(published, blocks, load.requests)
