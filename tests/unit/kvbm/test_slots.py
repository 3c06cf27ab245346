"""Slots of several sizes in one tier: apart, within bounds, and all of it usable again."""

from collections.abc import Iterable
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.kvbm.core.blocks.buddy_allocator import BuddyAllocator
from kvmesh.kvbm.core.blocks.slab_allocator import SlabAllocator, slot_bytes
from kvmesh.kvbm.core.errors import TooSmall

SIZES = [4096, 12288, 40960, 262144]


def extents(runs: Iterable[tuple[int, int]]) -> set[int]:
    return {extent for base, order in runs for extent in range(base, base + (1 << order))}


@given(st.integers(1, 70), st.lists(st.tuples(st.booleans(), st.integers(0, 4)), max_size=60))
def test_runs_are_apart_and_join_again(count: int, steps: list[tuple[bool, int]]) -> None:
    space = BuddyAllocator(count)
    taken: list[tuple[int, int]] = []
    for take, order in steps:
        if take or not taken:
            base = space.take(order) if order < space.orders else None
            if base is not None:
                assert base % (1 << order) == 0
                assert not extents(taken) & extents([(base, order)])
                taken.append((base, order))
        else:
            space.give(*taken.pop(order % len(taken)))
    assert all(extent < count for extent in extents(taken))
    for run in taken:
        space.give(*run)
    whole = count.bit_length() - 1
    assert space.take(whole) is not None


@given(st.integers(2, 70), st.integers(0, 69), st.integers(0, 4))
def test_a_run_is_taken_where_it_was(count: int, place: int, order: int) -> None:
    space = BuddyAllocator(count)
    base = place % count >> order << order
    fits = base + (1 << order) <= count
    assert space.take_at(base, order) == fits
    assert not space.take_at(base, order)
    rest = [space.take(0) for _ in range(count - (1 << order if fits else 0))]
    assert None not in rest
    assert space.take(0) is None


@given(st.integers(1, 40), st.integers(0, 40))
def test_beyond_the_limit_nothing_is_handed_out(count: int, limit: int) -> None:
    space = BuddyAllocator(count)
    taken = [base for _ in range(count // 2) if (base := space.take(0)) is not None]
    space.limit = min(count, limit)
    for base in taken:
        space.give(base, 0)
    assert all_of(space) == list(range(min(count, limit)))
    space.limit = count
    assert all_of(space) == list(range(min(count, limit), count))


def all_of(space: BuddyAllocator) -> list[int]:
    """All free extents, which are taken."""
    left = []
    while (base := space.take(0)) is not None:
        left.append(base)
    return sorted(left)


@given(st.lists(st.tuples(st.booleans(), st.sampled_from(SIZES)), max_size=80))
def test_slots_of_all_sizes_share_a_tier(steps: list[tuple[bool, int]]) -> None:
    space = SlabAllocator(1 << 20)
    live: dict[int, int] = {}
    for take, size in steps:
        if take or not live:
            offset = space.take(size)
            if offset is not None:
                live[offset] = size
        else:
            offset = sorted(live)[size % len(live)]
            del live[offset]
            space.give(offset)
        end = 0
        for offset, length in sorted(live.items()):
            assert offset >= end
            end = offset + length
        assert end <= space.capacity
        assert space.used == sum(live.values())
    for offset in live:
        space.give(offset)
    for size in SIZES:
        assert len(fill(space, size)) * size > 0.7 * space.capacity


@given(
    st.lists(st.sampled_from(SIZES), max_size=60),
    st.integers(0, 1 << 20),
    st.lists(st.sampled_from(SIZES), max_size=20),
    st.randoms(),
)
def test_a_smaller_tier_names_what_must_go_and_can_grow_again(
    first: list[int], capacity: int, later: list[int], random: Random
) -> None:
    space = SlabAllocator(1 << 20)
    live = {offset for size in first if (offset := space.take(size)) is not None}
    beyond = space.resize(capacity)
    assert {o for o in live if o >= capacity} <= beyond <= live
    staying = live - beyond
    gone = sorted(beyond)
    random.shuffle(gone)
    for size in later:
        if gone:
            space.give(gone.pop())
        try:
            offset = space.take(size)
        except TooSmall:
            continue
        if offset is not None:
            assert offset + size <= capacity
            assert offset not in staying
            staying.add(offset)
    assert not staying & set(gone)
    assert gone or space.end <= capacity
    space.resize(1 << 20)
    for offset in staying.union(gone):
        space.give(offset)
    assert (space.used, space.end) == (0, 0)
    for size in SIZES:
        assert len(fill(space, size)) * size > 0.7 * space.capacity


def fill(space: SlabAllocator, size: int) -> list[int]:
    """How many slots there are, which are free again."""
    taken = []
    while (offset := space.take(size)) is not None:
        taken.append(offset)
    for offset in taken:
        space.give(offset)
    return taken


def test_a_restart_claims_the_same_slots() -> None:
    space, again = SlabAllocator(1 << 20), SlabAllocator(1 << 20)
    slots = [
        (size, offset)
        for size in SIZES
        for _ in range(3)
        if (offset := space.take(size)) is not None
    ]
    assert len(slots) == 12
    for size, offset in slots:
        assert again.claim(size, offset)
        assert not again.claim(size, offset)
    assert again.used == space.used
    assert not again.claim(SIZES[0], 1)


def test_what_must_leave_for_another_size_is_named() -> None:
    space = SlabAllocator(1 << 20)
    small = []
    while (offset := space.take(4096)) is not None:
        small.append(offset)
    assert space.take(262144) is None
    window = space.window(262144, small[0])
    assert small[0] in window
    for offset in window:
        space.give(offset)
    assert space.take(262144) is not None


def test_a_block_that_does_not_fit_is_told_with_numbers() -> None:
    with pytest.raises(TooSmall) as caught:
        SlabAllocator(1 << 20).order(slot_bytes((1 << 20) + 1))
    assert (caught.value.capacity, caught.value.needed) == (1 << 20, (1 << 20) + 4096)


def test_large_blocks_waste_little() -> None:
    space = SlabAllocator(1 << 36)
    for block_bytes in (5_242_880, 5_300_000, 21_000_000, 11_000_000):
        size = slot_bytes(block_bytes)
        slab = space.extent << space.order(size)
        assert slab % size / slab <= 1 / 8
