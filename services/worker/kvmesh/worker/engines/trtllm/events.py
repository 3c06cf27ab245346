"""Converts TensorRT-LLM's KV events, from `get_kv_cache_events_async`, to neutral cache events.

An event is `{"event_id", "data", "window_size", "attention_dp_rank"?, "layer_group_id"?}` with data
of type created, stored, removed or updated. Block hashes are integers or hexadecimal digests; some
versions return the cache salt with a block. An update has the differences of a block's cache level
and priority as `{"old_value", "new_value"}`, None for the one that stayed. Levels are tiers: 0 the
GPU's memory, 1 the host's, 2 disk.

Under attention data parallelism each rank has a cache of its own and reports it, all in one queue,
and TensorRT-LLM chooses the rank of a request. So the worker's one rank holds what any of them
does, once for each: a removal takes the copy of its rank alone.
"""

from array import array
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from kvmesh._native import xxh3
from kvmesh.index import TIERS
from kvmesh.worker.adapters.kv_events.cache_events import (
    AllCleared,
    BlocksMoved,
    BlocksRemoved,
    BlocksStored,
    CacheEvent,
    fold_hash,
)
from kvmesh.worker.adapters.kv_events.decoder import WINDOWS
from kvmesh.worker.adapters.kv_events.salts import returned_salt


class EventReader:
    """Reads the events of all ranks in order; `missed` counts missing event ids.

    Only events of the widest attention window count, as it retains all blocks, and of the first
    group of layers that reports one. `limits` has WINDOWS if events of others were met. Each copy
    of a block is stored and removed once, in the tier that its rank has last reported.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._window = 0
        self._groups: set[int | None] = set()
        self._next: dict[int, int] = {}
        self._held: dict[int, dict[int, int]] = {}  # tiers by rank and block
        self.missed = 0
        self.limits: set[str] = set()

    def read(self, event: Mapping[str, Any]) -> tuple[int, list[CacheEvent]]:
        """The rank and its cache events; raises ValueError if the event is malformed."""
        try:
            rank = event.get("attention_dp_rank") or 0
            self._count(rank, event["event_id"])
            data = event["data"]
            events: list[CacheEvent] = []
            if self._has_wider_window(event):
                events.append(AllCleared())
                self._held.clear()
            if self._counts(event, data["type"] == "stored"):
                events += self._events(data, self._held.setdefault(rank, {}))
            return rank, events
        except (KeyError, TypeError, AttributeError, OverflowError) as error:
            raise ValueError(f"malformed KV event: {error!r}") from error

    def _has_wider_window(self, event: Mapping[str, Any]) -> bool:
        """Follow a window that is wider than any before; True if blocks of another were stored."""
        window = event.get("window_size") or 0
        if window <= self._window:
            return False
        has_stored = bool(self._groups)
        if self._window:
            self.limits.add(WINDOWS)
        self._window = window
        self._groups.clear()
        return has_stored

    def _counts(self, event: Mapping[str, Any], is_store: bool) -> bool:
        window, group = event.get("window_size") or 0, event.get("layer_group_id")
        if window == self._window and is_store and not self._groups:
            self._groups.add(group)
        counts = window == self._window and group in self._groups
        if is_store and not counts:
            self.limits.add(WINDOWS)
        return counts

    def _count(self, rank: int, number: int) -> None:
        expected = self._next.get(rank, number)
        self.missed += max(0, number - expected)
        self._next[rank] = number + 1

    def _events(self, data: Mapping[str, Any], held: dict[int, int]) -> Iterator[CacheEvent]:
        """The changes of one rank, which holds blocks in tiers as `held` says."""
        kind = data["type"]
        if kind == "stored":
            for stored in self._stored(data):
                yield from _changes(stored, held)
        elif kind == "removed":
            for removed in map(_hash, data["block_hashes"]):
                if (tier := held.pop(removed, None)) is not None:
                    yield BlocksRemoved([removed], tier)
        elif kind == "updated" and data.get("cache_level") is not None:
            level, moved = data["cache_level"], _hash(data["block_hash"])
            old, new = _tier(level["old_value"]), _tier(level["new_value"])
            if held.get(moved) == old:
                held[moved] = new
                yield BlocksMoved([moved], old, new)

    def _stored(self, data: Mapping[str, Any]) -> Iterator[BlocksStored]:
        """One event per block, as cache levels may differ; skips a partial last block."""
        parent = data.get("parent_hash")
        parent = None if parent is None else _hash(parent)
        for block in data["blocks"]:
            tokens = array("I", [token["token_id"] for token in block["tokens"]])
            if len(tokens) < self._block_size:
                return
            engine_hash = _hash(block["block_hash"])
            level = _tier(block.get("cache_level") or 0)
            key = block.get("cache_salt") or ""
            salt = returned_salt(key)
            yield BlocksStored(
                *([engine_hash], parent, tokens.tobytes(), self._block_size, level, salt),
                extras=_extras(block, key if salt is None else ""),
            )
            parent = engine_hash


def _changes(stored: BlocksStored, held: dict[int, int]) -> Iterator[CacheEvent]:
    """The changes by which a rank comes to hold a block in a tier, none if it does already."""
    [block] = stored.hashes
    before = held.get(block)
    held[block] = stored.tier
    if before is None:
        yield stored
    elif before != stored.tier:
        yield BlocksMoved([block], before, stored.tier)


def _extras(block: Mapping[str, Any], salt: str) -> tuple[int, ...]:
    """A number for what else the engine mixes into a block's hash.

    That are images, learned prompts, adapters, and a `salt` that is not the mesh's.
    """
    ids = [token.get("token_extra_id") or 0 for token in block["tokens"]]
    images = block.get("mm_keys") or None
    adapter = block.get("lora_id")
    if images is None and adapter is None and not salt and not any(ids):
        return ()
    return (xxh3(msgspec.msgpack.encode([ids, images, adapter, salt])) or 1,)


def _hash(value: int | str) -> int:
    return fold_hash(bytes.fromhex(value) if isinstance(value, str) else value)


def _tier(level: int) -> int:
    if level not in range(TIERS):
        raise ValueError(f"malformed KV event: a cache level of {level!r}")
    return level
