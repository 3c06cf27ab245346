"""Converts TensorRT-LLM's KV events, from `get_kv_cache_events_async`, to neutral cache events.

An event is `{"event_id", "data", "window_size", "attention_dp_rank"?}` with data of type created,
stored, removed or updated. An update has the differences of a block's cache level and priority as
`{"old_value", "new_value"}`, None for the one that stayed. Levels are tiers: 0 the GPU's memory,
1 the host's, 2 disk.
"""

from array import array
from collections.abc import Iterator, Mapping
from typing import Any

from kvmesh.index import TIERS
from kvmesh.worker.adapters.cache_ledger import (
    BlocksMoved,
    BlocksRemoved,
    BlocksStored,
    CacheEvent,
    fold_hash,
)


class EventReader:
    """Reads the events of all ranks in order; `missed` counts missing event ids.

    Only events of the widest attention window count: it retains all blocks.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._window = 0
        self._next: dict[int, int] = {}
        self.missed = 0

    def read(self, event: Mapping[str, Any]) -> tuple[int, list[CacheEvent]]:
        """The rank and its cache events; raises ValueError if the event is malformed."""
        try:
            rank = event.get("attention_dp_rank") or 0
            self._count(rank, event["event_id"])
            self._window = max(self._window, event.get("window_size") or 0)
            if (event.get("window_size") or 0) < self._window:
                return rank, []
            return rank, list(self._events(event["data"]))
        except (KeyError, TypeError, AttributeError, OverflowError) as error:
            raise ValueError(f"malformed KV event: {error!r}") from error

    def _count(self, rank: int, number: int) -> None:
        expected = self._next.get(rank, number)
        self.missed += max(0, number - expected)
        self._next[rank] = number + 1

    def _events(self, data: Mapping[str, Any]) -> Iterator[CacheEvent]:
        kind = data["type"]
        if kind == "stored":
            yield from self._stored(data)
        elif kind == "removed":
            yield BlocksRemoved([fold_hash(value) for value in data["block_hashes"]], None)
        elif kind == "updated" and data.get("cache_level") is not None:
            level = data["cache_level"]
            hashes = [fold_hash(data["block_hash"])]
            yield BlocksMoved(hashes, _tier(level["old_value"]), _tier(level["new_value"]))

    def _stored(self, data: Mapping[str, Any]) -> Iterator[CacheEvent]:
        """One event per block, as cache levels may differ; skips a partial last block."""
        parent = data.get("parent_hash")
        parent = None if parent is None else fold_hash(parent)
        for block in data["blocks"]:
            tokens = array("I", [token["token_id"] for token in block["tokens"]])
            if len(tokens) < self._block_size:
                return
            engine_hash = fold_hash(block["block_hash"])
            level = _tier(block.get("cache_level") or 0)
            yield BlocksStored([engine_hash], parent, tokens.tobytes(), self._block_size, level)
            parent = engine_hash


def _tier(level: int) -> int:
    if level not in range(TIERS):
        raise ValueError(f"malformed KV event: a cache level of {level!r}")
    return level
