"""The block manager: capacity, references, and correct events."""

from array import array

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from support.plain_blocks import PlainBlocks, changes

from kvmesh.bus.messages import Removed, Stored
from kvmesh.hashing import sequence_hashes
from kvmesh.worker.enginecore import block_manager as blocks_module
from kvmesh.worker.enginecore.block_manager import BlockManager
from kvmesh.worker.enginecore.retention_options import RetentionOptions

CAPACITY = 12
SALT = 9


def packed(values: list[int] | tuple[int, ...]) -> "array[int]":
    return array("Q", values)


def hashes(*local: int) -> list[int]:
    return list(array("Q", sequence_hashes(packed(local).tobytes())))


class Prefix:
    """A sequence's references, as the scheduler holds them: `held` of its blocks."""

    def __init__(self, local: tuple[int, ...], priority: int = 0) -> None:
        self.local = local
        self.blocks = hashes(*local)
        self.priority = priority
        self.held = 0


LOCALS = st.lists(st.integers(0, 2), min_size=1, max_size=6).map(tuple)
PRIORITIES = st.sampled_from([0, 0, 0, 1, 2])


class BlockMachine(RuleBasedStateMachine):
    """Random prefixes from a small alphabet, so that they share, part and collide often.

    Every call goes to the reference as well: both must make the same changes in the same order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.manager = BlockManager(CAPACITY, RetentionOptions(budget=1.0))
        self.plain = PlainBlocks(CAPACITY)
        self.users: list[Prefix] = []
        self.private = 0

    def allocate(self, count: int) -> bool:
        done = self.manager.allocate(count)
        assert self.plain.allocate(count) == done
        return done

    def promote(self, prefix: Prefix, count: int) -> None:
        new = slice(prefix.held, prefix.held + count)
        parent = prefix.blocks[prefix.held - 1] if prefix.held else None
        blocks = prefix.blocks[new]
        self.manager.promote(parent, SALT, packed(blocks), packed(prefix.local[new]))
        self.plain.promote(parent, blocks)
        prefix.held += count

    @rule(local=LOCALS, priority=PRIORITIES, part=st.integers(0, 6))
    def begin(self, local: tuple[int, ...], priority: int, part: int) -> None:
        """Lock the held prefix, and compute the rest in one or two pieces."""
        prefix = Prefix(local, priority)
        way = self.manager.match_prefix(packed(prefix.blocks))
        hits, inactive = way.matched, way.inactive
        assert (hits, inactive) == self.plain.match(prefix.blocks)
        missing = len(local) - hits
        if missing + inactive > self.manager.available:
            return
        assert self.manager.lock_prefix(packed(prefix.blocks)) == hits
        self.plain.use(prefix.blocks[:hits])
        prefix.held = hits
        assert self.allocate(missing)
        self.users.append(prefix)
        for count in (min(part, missing), missing - min(part, missing)):
            self.promote(prefix, count)

    @rule(first=LOCALS, second=LOCALS, priority=PRIORITIES)
    def race(self, first: tuple[int, ...], second: tuple[int, ...], priority: int) -> None:
        """Two sequences that miss together and may compute the same blocks."""
        pair = [Prefix(first, priority), Prefix(second)]
        if len(first) + len(second) > self.manager.available:
            return
        for prefix in pair:
            assert self.allocate(len(prefix.local))
        for prefix in pair:
            self.promote(prefix, len(prefix.local))
        self.users.extend(pair)

    @precondition(lambda self: self.users)
    @rule(data=st.data(), more=LOCALS)
    def extend(self, data: st.DataObject, more: tuple[int, ...]) -> None:
        """Extend a sequence by full blocks."""
        prefix = self.users[data.draw(st.integers(0, len(self.users) - 1))]
        if self.allocate(len(more)):
            prefix.local += more
            prefix.blocks = hashes(*prefix.local)
            self.promote(prefix, len(more))

    @precondition(lambda self: self.users)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        prefix = self.users.pop(data.draw(st.integers(0, len(self.users) - 1)))
        self.manager.unlock(packed(prefix.blocks), prefix.priority)
        self.plain.deref(prefix.blocks, prefix.priority)

    @rule(count=st.integers(1, CAPACITY + 2))
    def take_private(self, count: int) -> None:
        if self.allocate(count):
            self.private += count

    @precondition(lambda self: self.private)
    @rule()
    def destroy_private(self) -> None:
        self.manager.free_private(self.private)
        self.plain.private -= self.private
        self.private = 0

    @rule()
    def clear(self) -> None:
        """Clear; the order of removals is free."""
        count = len(self.plain.idle)
        assert self.manager.clear() == count
        self.plain.evict(count)
        assert set(changes(self.manager.take_events())) == set(self.plain.changes)
        self.plain.changes.clear()

    @invariant()
    def changes_equal_the_reference(self) -> None:
        assert changes(self.manager.take_events()) == self.plain.changes
        self.plain.changes.clear()
        assert self.manager.contents == self.plain.contents
        assert self.manager.active == self.plain.active <= CAPACITY
        assert self.manager.cached == len(self.plain.idle) <= CAPACITY - self.plain.active

    @invariant()
    def a_dump_lists_all_blocks_parents_first(self) -> None:
        seen: set[int | None] = {None}
        for _, block, parent in changes(self.manager.dump()):
            assert parent in seen
            seen.add(block)
        assert seen - {None} == self.manager.contents

    @invariant()
    def held_children_are_found(self) -> None:
        for prefix in self.users:
            for local in range(3):
                block = hashes(*prefix.local, local)[-1]
                here = block in self.plain.contents
                assert self.manager.holds_child(prefix.blocks[-1], block) == here


TestBlockMachine = BlockMachine.TestCase
TestBlockMachine.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)


def store(manager: BlockManager, *local: int) -> "array[int]":
    blocks = packed(hashes(*local))
    assert manager.allocate(len(local))
    manager.promote(None, 7, blocks, packed(local))
    return blocks


def test_only_new_blocks_are_published_and_shared_ones_counted_once() -> None:
    manager = BlockManager(8)
    first = store(manager, 1, 2, 3)
    (event,) = manager.take_events()
    assert event == Stored(0, None, first.tobytes(), packed([1, 2, 3]).tobytes(), 7)
    second = store(manager, 1, 2, 4)
    (event,) = manager.take_events()
    assert event == Stored(0, first[1], second[2:].tobytes(), packed([4]).tobytes())
    assert manager.active == 4


def test_the_least_recently_released_end_of_a_prefix_goes_first() -> None:
    manager = BlockManager(4)
    old, new = store(manager, 1, 2), store(manager, 3, 4)
    manager.unlock(old)
    manager.unlock(new)
    manager.take_events()
    assert manager.allocate(3, "r-1")
    evicted = packed([old[1], old[0], new[1]]).tobytes()
    assert manager.take_events() == [Removed(0, evicted, "evicted", "r-1")]
    assert not manager.allocate(2)
    assert manager.contents == {new[0]}


def test_a_higher_priority_outlives_a_later_release() -> None:
    manager = BlockManager(4)
    precious, plain = store(manager, 1, 2), store(manager, 3, 4)
    manager.unlock(precious, priority=5)
    manager.unlock(plain)
    assert manager.allocate(2)
    assert manager.contents == set(precious)


def test_a_dump_cuts_long_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks_module, "DUMP_BLOCKS", 3)
    manager = BlockManager(8)
    blocks = store(manager, *range(8))
    _, first, second, third = manager.dump()
    assert first == Stored(0, None, blocks[:3].tobytes(), packed([0, 1, 2]).tobytes(), 7)
    assert second == Stored(0, blocks[2], blocks[3:6].tobytes(), packed([3, 4, 5]).tobytes())
    assert third == Stored(0, blocks[5], blocks[6:].tobytes(), packed([6, 7]).tobytes())
