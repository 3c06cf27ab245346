"""Least-recently-used mappings of several owners, bounded together by the sum of their sizes."""

import sys
from collections.abc import Callable, Hashable, Iterable
from typing import Generic, TypeVar

from kvmesh.runtime.lru import LruCache

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class FairLru(Generic[K, V]):
    """Beyond `max_size`, the owner with the largest entries in sum loses its least recent one.

    So one owner cannot crowd out the others. `size_of` is that of `LruCache`.
    """

    def __init__(self, max_size: int, size_of: Callable[[K, V], int]) -> None:
        self._max_size = max_size
        self._size_of = size_of
        self._owners: dict[str, LruCache[K, V]] = {}
        self.size = 0

    def get(self, owner: str, key: K) -> V | None:
        """Return the value and mark it as most recently used; None if it is not held."""
        entries = self._owners.get(owner)
        return None if entries is None else entries.get(key)

    def get_all(self, owner: str, keys: Iterable[K]) -> dict[K, V]:
        """Return those of the values that are held, and mark them as used."""
        entries = self._owners.get(owner)
        if entries is None:
            return {}
        held = [key for key in keys if key in entries]
        return {key: value for key in held if (value := entries.get(key)) is not None}

    def put(self, owner: str, key: K, value: V) -> None:
        """Store or replace an entry as the owner's most recently used one."""
        entries = self._owners.setdefault(owner, LruCache(sys.maxsize, self._size_of))
        self.size -= entries.size
        entries.put(key, value)
        self.size += entries.size
        while self.size > self._max_size:
            largest = max(self._owners, key=lambda name: self._owners[name].size)
            entries = self._owners[largest]
            self.size -= entries.size
            entries.evict()
            self.size += entries.size
            if not entries:
                del self._owners[largest]

    def pop(self, owner: str, key: K) -> None:
        """Remove an entry, if it is held."""
        entries = self._owners.get(owner)
        if entries is None:
            return
        self.size -= entries.size
        entries.pop(key)
        self.size += entries.size
        if not entries:
            del self._owners[owner]
