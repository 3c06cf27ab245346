"""Buddy allocator: runs are aligned, disjoint and below the limit, and merge when freed."""

from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from kvmesh.kvbm.core.blocks.buddy_allocator import BuddyAllocator


def extents(runs: Iterable[tuple[int, int]]) -> set[int]:
    return {extent for base, order in runs for extent in range(base, base + (1 << order))}


@given(st.integers(1, 70), st.lists(st.tuples(st.booleans(), st.integers(0, 4)), max_size=60))
def test_runs_do_not_overlap_and_merge_again(count: int, steps: list[tuple[bool, int]]) -> None:
    space = BuddyAllocator(count)
    taken: list[tuple[int, int]] = []
    for allocate, order in steps:
        if allocate or not taken:
            base = space.allocate(order) if order < space.orders else None
            if base is not None:
                assert base % (1 << order) == 0
                assert not extents(taken) & extents([(base, order)])
                taken.append((base, order))
        else:
            space.free(*taken.pop(order % len(taken)))
    assert all(extent < count for extent in extents(taken))
    for run in taken:
        space.free(*run)
    whole = count.bit_length() - 1
    assert space.allocate(whole) is not None


@given(st.integers(2, 70), st.integers(0, 69), st.integers(0, 4))
def test_a_run_is_allocated_at_its_old_base(count: int, index: int, order: int) -> None:
    space = BuddyAllocator(count)
    base = index % count >> order << order
    fits = base + (1 << order) <= count
    assert space.allocate_at(base, order) == fits
    assert not space.allocate_at(base, order)
    rest = [space.allocate(0) for _ in range(count - (1 << order if fits else 0))]
    assert None not in rest
    assert space.allocate(0) is None


@given(st.integers(1, 40), st.integers(0, 40))
def test_nothing_is_allocated_beyond_the_limit(count: int, limit: int) -> None:
    space = BuddyAllocator(count)
    taken = [base for _ in range(count // 2) if (base := space.allocate(0)) is not None]
    space.limit = min(count, limit)
    for base in taken:
        space.free(base, 0)
    assert drain(space) == list(range(min(count, limit)))
    space.limit = count
    assert drain(space) == list(range(min(count, limit), count))


def drain(space: BuddyAllocator) -> list[int]:
    """Allocate and return all free extents."""
    left = []
    while (base := space.allocate(0)) is not None:
        left.append(base)
    return sorted(left)
