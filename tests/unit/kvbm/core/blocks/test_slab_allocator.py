"""Slab allocator: slots of several sizes in one tier are disjoint, bounded and reusable."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.kvbm.core.blocks.slab_allocator import SlabAllocator, slot_bytes
from kvmesh.kvbm.core.errors import TooSmall

SIZES = [4096, 12288, 40960, 262144]


@given(st.lists(st.tuples(st.booleans(), st.sampled_from(SIZES)), max_size=80))
def test_slots_of_all_sizes_share_a_tier(steps: list[tuple[bool, int]]) -> None:
    space = SlabAllocator(1 << 20)
    live: dict[int, int] = {}
    for allocate, size in steps:
        if allocate or not live:
            offset = space.allocate(size)
            if offset is not None:
                live[offset] = size
        else:
            offset = sorted(live)[size % len(live)]
            del live[offset]
            space.free(offset)
        end = 0
        for offset, length in sorted(live.items()):
            assert offset >= end
            end = offset + length
        assert end <= space.capacity
        assert space.used == sum(live.values())
    for offset in live:
        space.free(offset)
    for size in SIZES:
        assert len(fill(space, size)) * size > 0.7 * space.capacity


@given(
    st.lists(st.sampled_from(SIZES), max_size=60),
    st.integers(0, 1 << 20),
    st.lists(st.sampled_from(SIZES), max_size=20),
    st.randoms(),
)
def test_resize_returns_slots_beyond_the_end_and_can_grow_again(
    first: list[int], capacity: int, later: list[int], random: Random
) -> None:
    space = SlabAllocator(1 << 20)
    live = {offset for size in first if (offset := space.allocate(size)) is not None}
    beyond = space.resize(capacity)
    assert {o for o in live if o >= capacity} <= beyond <= live
    staying = live - beyond
    gone = sorted(beyond)
    random.shuffle(gone)
    for size in later:
        if gone:
            space.free(gone.pop())
        try:
            offset = space.allocate(size)
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
        space.free(offset)
    assert (space.used, space.end) == (0, 0)
    for size in SIZES:
        assert len(fill(space, size)) * size > 0.7 * space.capacity


def fill(space: SlabAllocator, size: int) -> list[int]:
    """Allocate all slots of a size and free them again."""
    taken = []
    while (offset := space.allocate(size)) is not None:
        taken.append(offset)
    for offset in taken:
        space.free(offset)
    return taken


def test_slots_can_be_allocated_at_their_old_offsets() -> None:
    space, again = SlabAllocator(1 << 20), SlabAllocator(1 << 20)
    slots = [
        (size, offset)
        for size in SIZES
        for _ in range(3)
        if (offset := space.allocate(size)) is not None
    ]
    assert len(slots) == 12
    for size, offset in slots:
        assert again.allocate_at(size, offset)
        assert not again.allocate_at(size, offset)
    assert again.used == space.used
    assert not again.allocate_at(SIZES[0], 1)


def test_a_window_names_the_slots_to_free_for_another_size() -> None:
    space = SlabAllocator(1 << 20)
    small = []
    while (offset := space.allocate(4096)) is not None:
        small.append(offset)
    assert space.allocate(262144) is None
    window = space.window(262144, small[0])
    assert small[0] in window
    for offset in window:
        space.free(offset)
    assert space.allocate(262144) is not None


def test_an_oversized_block_is_reported_with_its_size() -> None:
    with pytest.raises(TooSmall) as caught:
        SlabAllocator(1 << 20).order(slot_bytes((1 << 20) + 1))
    assert (caught.value.capacity, caught.value.needed) == (1 << 20, (1 << 20) + 4096)


def test_large_blocks_waste_little() -> None:
    space = SlabAllocator(1 << 36)
    for block_bytes in (5_242_880, 5_300_000, 21_000_000, 11_000_000):
        size = slot_bytes(block_bytes)
        slab = space.extent << space.order(size)
        assert slab % size / slab <= 1 / 8
