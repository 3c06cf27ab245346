"""The eviction pool against a model that searches all keys each time."""

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvmesh.retention.claims import UNCLAIMED, EvictionRank
from kvmesh.retention.eviction_pool import EvictionPool
from kvmesh.retention.return_value import Expectation, TypicalReturn
from kvmesh.retention.valued_keys import ReturnOrder
from kvmesh.returns.rates import BINS
from kvmesh.returns.value import values_by_age

STANDINGS = st.one_of(
    st.just(UNCLAIMED),
    st.builds(
        EvictionRank,
        st.sampled_from([-1, 0, 20, 35, 36, 100]),
        st.one_of(st.integers(1, 30).map(float), st.just(float("inf"))),
    ),
)


RATES = st.lists(st.sampled_from([0.0, 0.01, 0.1, 0.5, 2.0]), min_size=BINS, max_size=BINS)


class PoolMachine(RuleBasedStateMachine):
    """A tree of keys, each idle or in use; times are small integers, so that many claims expire.

    Of some keys a return is expected, by up to three forecasts.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.parents: dict[int, int | None] = {}
        self.standings: dict[int, EvictionRank] = {}
        self.order: list[int] = []
        self.pool: EvictionPool[int] = EvictionPool(self._carries, self._renew)
        self.typical = TypicalReturn()
        self.expected: dict[int, tuple[Expectation, ...]] = {}
        self.used: dict[int, float] = {}
        self.ordered = False

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

    def _place(self, key: int) -> tuple[int, float, float, int]:
        standing, value = self._standing(key), 0.0
        if standing == UNCLAIMED:
            expected = self.expected.get(key)
            if expected:
                value = sum(one.at(self.now)[0] for one in expected)
            else:
                value = self.typical.value(self.now - self.used[key])
        return *standing, value, self.order.index(key)

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
        self.used[key] = self.now
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
            self.used[key] = self.now
            self.order.remove(key)
            self.order.append(key)

    @rule()
    def order_by_returns(self) -> None:
        order = ReturnOrder[int](
            self.typical, lambda key: self.expected.get(key, ()), lambda key: self.used[key]
        )
        self.pool.order_by_returns(order)
        self.ordered = True

    @precondition(lambda self: self.ordered and self.order)
    @rule(data=st.data(), rates=RATES, ago=st.integers(-3, 20), replaces=st.booleans())
    def expect(self, data: st.DataObject, rates: list[float], ago: int, replaces: bool) -> None:
        """Expect a key and those before it, some of them with the typical value of others."""
        key: int | None = data.draw(st.sampled_from(self.order))
        expectation = Expectation(self.now - ago, values_by_age(rates))
        self.typical.learn(rates)
        while key is not None:
            known = () if replaces else self.expected.get(key, ())[-2:]
            self.expected[key] = (*known, expectation)
            self.pool.reconsider(key)
            key = self.parents[key]

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
            self.expected.pop(key, None)
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


def test_without_forecasts_nothing_is_asked_of_the_order() -> None:
    """The pool that no forecast has reached costs what it did."""

    def unused(_: bytes) -> float:
        raise AssertionError

    pool = unclaimed_pool()
    pool.order_by_returns(ReturnOrder[bytes](TypicalReturn(), lambda _: (), unused))
    for key in (b"a", b"b"):
        pool.add(key)
    assert pool.next_victim(1.0) == b"a"
    pool.discard(b"a")
    assert pool.next_victim(1.0) == b"b"


def test_the_value_of_a_key_changes_while_it_waits() -> None:
    """A prompt that returns at once or never is worth less than a slow one after a minute."""
    fast, slow = [1.0] * 6 + [0.0] * 10, [0.02] * BINS
    expected = {
        b"fast": [Expectation(0.0, values_by_age(fast))],
        b"slow": [Expectation(0.0, values_by_age(slow))],
    }
    pool = unclaimed_pool()
    pool.order_by_returns(ReturnOrder[bytes](TypicalReturn(), expected.__getitem__, lambda _: 0.0))
    for key in expected:
        pool.add(key)
    assert pool.next_victim(1.0) == b"slow"
    assert pool.next_victim(60.0) == b"fast"


def test_the_value_of_a_key_is_in_what_a_return_saves() -> None:
    often, seldom = Expectation(0.0, (0.3,) * BINS), Expectation(0.0, (0.1,) * BINS)
    expected: dict[bytes, list[Expectation]] = {b"cheap": [often], b"dear": [seldom], b"new": []}
    saving = {b"cheap": 1.0, b"dear": 10.0, b"new": 5.0}
    typical = TypicalReturn()
    typical.learn([0.1] * BINS)
    pool = unclaimed_pool()
    pool.order_by_returns(
        ReturnOrder[bytes](typical, expected.__getitem__, lambda _: 0.0, saving.__getitem__)
    )
    for key in expected:
        pool.add(key)
    evicted = []
    while pool:
        evicted.append((key := pool.next_victim(1.0), round(pool.value(key, 1.0), 3)))
        pool.discard(key)
    assert evicted == [(b"cheap", 0.3), (b"new", 0.5), (b"dear", 1.0)]


def test_a_new_saving_counts_once_it_is_reconsidered() -> None:
    saving = {b"a": 2.0, b"b": 1.0}
    same = [Expectation(0.0, (0.1,) * BINS)]
    pool = unclaimed_pool()
    pool.order_by_returns(
        ReturnOrder[bytes](TypicalReturn(), lambda _: same, lambda _: 0.0, saving.__getitem__)
    )
    pool.add(b"a")
    pool.add(b"b")
    assert pool.next_victim(1.0) == b"b"
    saving[b"a"] = 0.5
    pool.reconsider(b"a")
    assert pool.next_victim(1.0) == b"a"


def test_queues_of_values_are_proportional_to_the_keys() -> None:
    expected = [Expectation(0.0, tuple(float(BINS - k) for k in range(BINS)))]
    pool = unclaimed_pool()
    pool.order_by_returns(ReturnOrder[bytes](TypicalReturn(), lambda _: expected, lambda _: 0.0))
    for _ in range(5_000):
        pool.add(b"a")
        pool.discard(b"a")
    pool.add(b"a")
    for second in range(9_000):
        assert pool.next_victim(float(second)) == b"a"
    valued = pool._valued
    assert len(valued._queue) + len(valued._calendar) < 200


def test_memory_is_proportional_to_the_keys() -> None:
    pool = unclaimed_pool()
    for i in range(10_000):
        pool.add(b"a", EvictionRank(50, 100.0 + i))
        pool.discard(b"a")
    assert len(pool._heap) + len(pool._expiries) < 200
