"""The eviction pool against a model that searches all keys each time."""

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvmesh.retention.claims import UNCLAIMED, EvictionRank
from kvmesh.retention.eviction_pool import EvictionPool

STANDINGS = st.one_of(
    st.just(UNCLAIMED),
    st.builds(
        EvictionRank,
        st.sampled_from([-1, 0, 20, 35, 36, 100]),
        st.one_of(st.integers(1, 30).map(float), st.just(float("inf"))),
    ),
)


class PoolMachine(RuleBasedStateMachine):
    """A tree of keys, each idle or in use; times are small integers, so that many claims expire."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.parents: dict[int, int | None] = {}
        self.standings: dict[int, EvictionRank] = {}
        self.order: list[int] = []
        self.pool: EvictionPool[int] = EvictionPool(self._carries, self._renew)

    def _carries(self, key: int) -> bool:
        return key in self.parents.values()

    def _renew(self, key: int, now: float) -> EvictionRank:
        assert self.standings[key].until <= now
        return self._standing(key)

    def _standing(self, key: int) -> EvictionRank:
        standing = self.standings[key]
        return standing if standing.until > self.now else UNCLAIMED

    def _expected(self) -> int:
        leaves = [key for key in self.order if not self._carries(key)]
        return min(leaves, key=self._place)

    def _place(self, key: int) -> tuple[int, float, int]:
        return *self._standing(key), self.order.index(key)

    @rule(data=st.data(), standing=STANDINGS)
    def grow(self, data: st.DataObject, standing: EvictionRank) -> None:
        key = max(self.parents, default=0) + 1
        self.parents[key] = data.draw(st.sampled_from([None, *self.parents]))
        if standing.until <= self.now:
            standing = UNCLAIMED
        self._add(key, standing)

    def _add(self, key: int, standing: EvictionRank) -> None:
        self.standings[key] = standing
        self.order.append(key)
        self.pool.add(key, standing)

    @precondition(lambda self: self.order)
    @rule(data=st.data())
    def use_and_return(self, data: st.DataObject) -> None:
        """Use a key and all before it, then return them, the last block first."""
        key: int | None = data.draw(st.sampled_from(self.order))
        while key is not None:
            standing = self._standing(key)
            self.pool.discard(key)
            self.order.remove(key)
            assert key not in self.pool
            self._add(key, standing)
            key = self.parents[key]

    @rule(data=st.data())
    def touch(self, data: st.DataObject) -> None:
        """Touch keys without claims; some are not in the pool."""
        keys = data.draw(st.lists(st.sampled_from([0, *self.order]), unique=True))
        self.pool.touch(keys)
        for key in filter(None, keys):
            self.standings[key] = UNCLAIMED
            self.order.remove(key)
            self.order.append(key)

    @precondition(lambda self: self.order)
    @rule(data=st.data(), standing=STANDINGS)
    def revise(self, data: st.DataObject, standing: EvictionRank) -> None:
        key = data.draw(st.sampled_from(self.order))
        if standing.until > self.now or standing == UNCLAIMED:
            self.standings[key] = standing
            self.pool.update(key, standing)

    @rule(seconds=st.integers(1, 12))
    def wait(self, seconds: int) -> None:
        self.now += seconds

    @precondition(lambda self: self.order)
    @rule(count=st.integers(1, 5))
    def evict(self, count: int) -> None:
        """All keys in the pool can be evicted, in the order of the model."""
        for _ in range(min(count, len(self.order))):
            expected = self._expected()
            key = self.pool.next_victim(self.now)
            assert key == expected
            self.pool.discard(key)
            self.order.remove(key)
            del self.standings[key]
            parent = self.parents.pop(key)
            if parent is not None and not self._carries(parent):
                self.pool.unblock(parent)

    @invariant()
    def contents_are_equal(self) -> None:
        assert len(self.pool) == len(self.order)
        assert all(key in self.pool for key in self.order)


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def unclaimed_pool() -> EvictionPool[bytes]:
    return EvictionPool(lambda _: False, lambda _key, _now: UNCLAIMED)


@given(st.lists(st.binary(min_size=1, max_size=3), unique=True, min_size=1))
def test_unclaimed_keys_are_evicted_by_recency(keys: list[bytes]) -> None:
    pool = unclaimed_pool()
    for key in keys:
        pool.add(key)
    gone = []
    while len(pool):
        gone.append(pool.next_victim(1.0))
        pool.discard(gone[-1])
    assert gone == keys


def test_eviction_order_of_levels() -> None:
    pool = unclaimed_pool()
    inf = float("inf")
    pool.add(b"kept", EvictionRank(80, inf))
    pool.add(b"short", EvictionRank(35, 10.0))
    pool.add(b"plain")
    pool.add(b"low", EvictionRank(10, inf))
    pool.add(b"thinking", EvictionRank(-1, inf))
    gone = []
    while len(pool):
        gone.append(pool.next_victim(1.0))
        pool.discard(gone[-1])
    assert gone == [b"thinking", b"low", b"plain", b"short", b"kept"]


def test_memory_is_proportional_to_the_keys() -> None:
    pool = unclaimed_pool()
    for i in range(10_000):
        pool.add(b"a", EvictionRank(50, 100.0 + i))
        pool.discard(b"a")
    assert len(pool._heap) + len(pool._expiries) < 200
