"""Bounded structures stay within their bounds for any input."""

import asyncio
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.bus.messages import KvEvent, Prefetch, Removed, Stored, Work
from kvmesh.bus.streams.publisher import Backlog
from kvmesh.retention.outcomes import Directive
from kvmesh.retention.pins import Pinned, PinTable
from kvmesh.worker.adapters.prefetching import queue
from kvmesh.worker.adapters.prefetching.queue import PrefetchQueue

IDS = st.integers(0, 9).map(str)
TENANTS = st.sampled_from(["red", "blue", "green"])
SLOTS = 4


@given(st.lists(st.tuples(st.booleans(), IDS, TENANTS, st.integers(1, 50)), max_size=60))
def test_a_pin_table_is_bounded_and_returns_the_pins_it_replaces(
    steps: list[tuple[bool, str, str, int]],
) -> None:
    table: PinTable[int] = PinTable(max_pins=SLOTS)
    live: set[str] = set()
    for adds, name, tenant, deadline in steps:
        if adds:
            directive = Directive(tenant, 100, 9.0)
            over = table.put(Pinned(name, [int(name)], 100, float(deadline), directive))
            live = (live - {pin.id for pin in over}) | {name}
        else:
            assert (table.remove(name) is not None) == (name in live)
            live.discard(name)
        assert len(table) == len(live) <= SLOTS


class Loader:
    """An engine that never starts a prefetch."""

    def is_live(self, request: str, rank: int) -> bool:
        return False

    def estimate_seconds(self, item: Prefetch, hashes: "array[int]") -> float:
        return 0.0

    async def load(self, item: Prefetch, hashes: "array[int]", local: "array[int]") -> int:
        await asyncio.Event().wait()
        return 0

    async def compute(self, work: Work, held: int) -> None:
        raise AssertionError("nothing is loaded")


@given(st.lists(st.tuples(st.booleans(), IDS, TENANTS), max_size=40))
def test_no_more_prefetches_are_under_way_than_there_are_slots(
    steps: list[tuple[bool, str, str]],
) -> None:
    async def run() -> None:
        under_way = PrefetchQueue(Loader(), 1)
        refused = False
        for starts, name, tenant in steps:
            if starts:
                tokens = int(name).to_bytes(4, "little")
                item = Prefetch(id=name, tokens=tokens, salt=1, tenant=tenant, deadline_s=60.0)
                refused = bool(under_way.start(item))
            else:
                under_way.cancel(name)
            count = len(under_way._tasks)
            assert count <= SLOTS
            assert not (refused and starts) or count == SLOTS, "a slot was free"
            await asyncio.sleep(0)
        await under_way.close()
        assert not under_way._tasks

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(queue, "MAX_PREFETCHES", SLOTS)
        asyncio.run(run())


def stored(blocks: int) -> Stored:
    return Stored(0, None, bytes(8 * blocks), bytes(8 * blocks))


EVENTS = st.one_of(
    st.integers(1, 40).map(stored), st.integers(1, 40).map(lambda n: Removed(0, bytes(8 * n)))
)


@given(st.lists(st.one_of(EVENTS, st.integers(1, 2000)), max_size=60))
def test_a_backlog_counts_its_blocks_and_returns_them_in_order(
    steps: list[KvEvent | int],
) -> None:
    backlog = Backlog(1 << 20)
    put: list[KvEvent] = []
    taken: list[KvEvent] = []
    for step in steps:
        if isinstance(step, int):
            taken += backlog.pop(step)
        else:
            backlog.extend([step])
            put.append(step)
        assert (backlog.bytes == 0) == (len(taken) == len(put))
        assert backlog.bytes >= 0
    while some := backlog.pop(500):
        taken += some
    assert taken == put
    assert backlog.bytes == 0
