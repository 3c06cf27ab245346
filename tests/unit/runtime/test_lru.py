"""LruCache against a plain model, and at its edges."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.runtime.lru import LruCache

OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["put", "get", "peek", "pop"]), st.integers(0, 7), st.integers(0, 9)),
    max_size=60,
)


class Model:
    """Entries in a list, least recently used first."""

    def __init__(self, max_size: int) -> None:
        self.max_size = max_size
        self.entries: list[tuple[int, str]] = []

    def pop(self, key: int) -> str | None:
        value = self.peek(key)
        self.entries = [entry for entry in self.entries if entry[0] != key]
        return value

    def peek(self, key: int) -> str | None:
        return dict(self.entries).get(key)

    def get(self, key: int) -> str | None:
        value = self.pop(key)
        if value is not None:
            self.entries.append((key, value))
        return value

    def put(self, key: int, value: str) -> bool:
        self.pop(key)
        if len(value) > self.max_size:
            return False
        self.entries.append((key, value))
        while sum(len(value) for _, value in self.entries) > self.max_size:
            self.entries.pop(0)
        return True


@given(st.integers(0, 20), OPERATIONS)
def test_agrees_with_the_model(max_size: int, operations: list[tuple[str, int, int]]) -> None:
    cache: LruCache[int, str] = LruCache(max_size, lambda _, value: len(value))
    model = Model(max_size)
    for operation, key, size in operations:
        if operation == "put":
            assert cache.put(key, "x" * size) == model.put(key, "x" * size)
        else:
            assert getattr(cache, operation)(key) == getattr(model, operation)(key)
        assert list(cache) == [key for key, _ in model.entries]
        assert cache.size == sum(len(value) for _, value in model.entries) <= max_size
        assert len(cache) == len(model.entries)
        assert (key in cache) == (model.peek(key) is not None)


def test_counts_entries_without_a_size() -> None:
    cache: LruCache[str, bool] = LruCache(2)
    for key in "abc":
        assert cache.put(key, True)
    assert list(cache) == ["b", "c"]
    cache.get("b")
    assert cache.evict() == ("c", True)


def test_refuses_an_entry_beyond_the_bound() -> None:
    cache: LruCache[str, bytes] = LruCache(4, lambda _, value: len(value))
    assert cache.put("a", b"1234")
    assert not cache.put("a", b"12345")
    assert "a" not in cache
    assert cache.size == 0


def test_evicting_from_an_empty_cache_fails() -> None:
    with pytest.raises(KeyError):
        LruCache[str, int](1).evict()
