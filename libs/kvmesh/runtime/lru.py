"""Least-recently-used mapping bounded by the sum of its entries' sizes."""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


def _one(_key: object, _value: object) -> int:
    return 1


class LruCache(Generic[K, V]):
    """Evicts the least recently used entries until the total size is at most `max_size`.

    `size_of(key, value)` gives the size of an entry, which must not change while the entry is held;
    without it every entry has size 1, so `max_size` bounds the number of entries. Values must not
    be None. `peek` reads without marking as used. Only `peek` may be called from any thread.
    """

    __slots__ = ("_entries", "_size_of", "max_size", "peek", "size")

    def __init__(self, max_size: int, size_of: Callable[[K, V], int] = _one) -> None:
        self._entries: OrderedDict[K, V] = OrderedDict()
        self._size_of = size_of
        self.max_size = max_size
        self.size = 0
        # the dictionary's own method: peeking is on hot paths
        self.peek: Callable[[K], V | None] = self._entries.get

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def __iter__(self) -> Iterator[K]:
        """Keys, least recently used first."""
        return iter(self._entries)

    def get(self, key: K) -> V | None:
        """Return the value of `key` and mark it as most recently used; None if it is not held."""
        value = self._entries.get(key)
        if value is not None:
            self._entries.move_to_end(key)
        return value

    def put(self, key: K, value: V) -> bool:
        """Store or replace an entry as the most recently used one.

        Returns False for an entry larger than `max_size`: it is not stored, and one of the same key
        is removed.
        """
        self.pop(key)
        size = self._size_of(key, value)
        if size > self.max_size:
            return False
        self._entries[key] = value
        self.size += size
        while self.size > self.max_size:
            self.evict()
        return True

    def pop(self, key: K) -> V | None:
        """Remove an entry; returns its value, or None if it was not held."""
        value = self._entries.pop(key, None)
        if value is not None:
            self.size -= self._size_of(key, value)
        return value

    def evict(self) -> tuple[K, V]:
        """Remove and return the least recently used entry. Raises KeyError if there is none."""
        key, value = self._entries.popitem(last=False)
        self.size -= self._size_of(key, value)
        return key, value
