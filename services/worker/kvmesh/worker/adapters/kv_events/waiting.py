"""Blocks that an engine has reported and that cannot be placed in a prompt yet."""

from collections import Counter, OrderedDict
from collections.abc import Iterable

from msgspec.structs import replace

from kvmesh.worker.adapters.kv_events.cache_events import BlocksStored

_Key = tuple[int, int]  # engine hash, tier


class WaitingBlocks:
    """At most `limit` blocks, each with the engine hash that must become known first.

    That is the hash of the parent, or the block's own if the event does not say enough of it.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._needs: OrderedDict[_Key, int] = OrderedDict()
        self._events: dict[int, dict[_Key, BlocksStored]] = {}

    def __len__(self) -> int:
        return len(self._needs)

    def add(self, event: BlocksStored, needed: int) -> int | None:
        """Add the one block of `event`; returns the tier of the block given up for it, if any."""
        key = event.hashes[0], event.tier
        self._pop(key)
        self._needs[key] = needed
        self._events.setdefault(needed, {})[key] = event
        if len(self._needs) <= self._limit:
            return None
        oldest = next(iter(self._needs))
        self._pop(oldest)
        return oldest[1]

    def take(self, known: Iterable[int]) -> list[BlocksStored]:
        """Remove and return the blocks that need one of these hashes."""
        found: list[BlocksStored] = []
        for engine_hash in known:
            for key, event in self._events.pop(engine_hash, {}).items():
                del self._needs[key]
                found.append(event)
        return found

    def remove(self, engine_hash: int, tier: int) -> bool:
        """The engine has dropped a block; False if it does not wait."""
        return bool(self._needs) and self._pop((engine_hash, tier))

    def move(self, engine_hash: int, tier: int, to: int) -> None:
        """A block that may wait is in another tier now."""
        needed = self._needs.get((engine_hash, tier))
        if needed is not None:
            event = self._events[needed][engine_hash, tier]
            self._pop((engine_hash, tier))
            self.add(replace(event, tier=to), needed)

    def clear(self, tier: int | None) -> Counter[int]:
        """Remove all blocks of a tier (None: of all) and return their number by tier."""
        gone = [key for key in self._needs if tier in (None, key[1])]
        for key in gone:
            self._pop(key)
        return Counter(tier for _, tier in gone)

    def _pop(self, key: _Key) -> bool:
        needed = self._needs.pop(key, None)
        if needed is None:
            return False
        events = self._events[needed]
        del events[key]
        if not events:
            del self._events[needed]
        return True
