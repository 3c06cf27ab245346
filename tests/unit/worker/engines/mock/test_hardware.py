"""Simulated hardware of the mock: tiers, transfers, injected faults."""

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.bus.messages import Cleared, KvEvent, Removed
from kvmesh.worker.enginecore.scheduler import SchedulerLimits
from kvmesh.worker.enginecore.sequence import Request, Sequence, hash_prompt
from kvmesh.worker.enginecore.simulated_tiers import HOST, Link, LowerTier, TierOptions
from kvmesh.worker.engines.mock.core import CoreOptions, MockCore
from kvmesh.worker.engines.mock.faults import Faults, InjectedCrash
from kvmesh.worker.engines.mock.prefetch import PrefixLoad


def test_transfers_share_a_link() -> None:
    link = Link(100.0)
    assert [link.reserve(0.0, 50), link.reserve(0.1, 50), link.reserve(9.0, 50)] == [0.5, 1.0, 9.5]


class Counting:
    def slice(self, start: int, stop: int) -> list[int]:
        return list(range(1000 + start, 1000 + stop))


def request(name: str, first: int, length: int = 40, target: int = 1, remote: int = 0) -> Request:
    tokens = array("I", range(first, first + length)).tobytes()
    local, sequence, tail = hash_prompt(tokens, 4, 3)
    return Request(
        id=name,
        length=length,
        local_hashes=local,
        sequence_hashes=sequence,
        tail=tail,
        source=Counting(),
        target=target,
        salt=3,
        remote_tokens=remote,
    )


def core(host_blocks: int = 0, token: int = 1000) -> MockCore:
    tiers = TierOptions(
        host_blocks=host_blocks,
        bytes_per_token=token,
        host_bytes_per_s=1e5,
        remote_bytes_per_s=1e6,
    )
    limits = SchedulerLimits(block_size=4, max_batched_tokens=64)
    return MockCore(CoreOptions(blocks=16, limits=limits, tiers=tiers))


def finish(engine: MockCore, now: float = 0.0) -> tuple[float, list[int] | None, list[KvEvent]]:
    """Run until the core is idle; returns the time, the last `cached`, and all events."""
    cached, events = None, []
    while engine.busy:
        result = engine.step(now)
        now += result.duration
        events += result.events
        for output in result.outputs:
            cached = output.cached if output.cached is not None else cached
    return now, cached, events


def test_remote_kv_is_awaited_instead_of_computed() -> None:
    engine = core()
    engine.submit(request("a", 0, remote=40))
    first = engine.step(0.0)
    assert (first.steps, first.outputs) == (0, [])
    assert first.duration == pytest.approx(36 * 1000 / 1e6)
    end, cached, _ = finish(engine, first.duration)
    assert cached == [0, 0, 0, 36]
    assert end < 0.036 + 0.017
    engine.submit(request("b", 0, remote=40))
    assert engine.step(end).steps == 1


def test_others_go_on_while_kv_arrives() -> None:
    engine = core()
    engine.submit(request("a", 0, length=20, target=30))
    engine.step(0.0)
    engine.submit(request("b", 500, length=20, remote=20))
    seen = [[o.request for o in engine.step(0.001).outputs] for _ in range(3)]
    assert seen == [["a"], ["a"], ["a"]]
    assert {o.request for o in engine.step(1.0).outputs} == {"a", "b"}


def test_a_request_can_be_aborted_while_its_kv_arrives() -> None:
    engine = core()
    engine.submit(request("a", 0, remote=40))
    engine.step(0.0)
    assert engine.abort("a")
    assert engine.blocks.active == 0
    assert not engine.busy


def test_evicted_blocks_are_onboarded_from_the_host() -> None:
    engine = core(host_blocks=64)
    engine.submit(request("a", 0))
    now, _, events = finish(engine)
    for i in range(1, 4):
        engine.submit(request(f"x{i}", 1000 * i))
        now, _, more = finish(engine, now)
        events += more
    engine.submit(request("again", 0))
    begun = now
    now, cached, more = finish(engine, now)
    assert cached == [0, 36]
    assert now - begun > 36 * 1000 / 1e5
    held = replay([*events, *more])
    assert held[0] == engine.blocks.contents
    assert held[1] == engine.tiers.lower[0].contents
    assert replay(engine.dump()) == held


def test_a_prefetch_loads_part_by_part_as_fast_as_the_link() -> None:
    engine = core(host_blocks=64, token=8 << 20)
    of = request("a", 0)
    engine.submit(of)
    now, _, _ = finish(engine)
    engine.blocks.clear()
    loading = PrefixLoad(
        engine, array("Q", of.sequence_hashes), array("Q", of.local_hashes), of.salt, ""
    )
    second = (8 << 20) * 4 / 1e5  # for a block; two are a part
    for part in range(1, 5):
        assert loading.start_next(now) == pytest.approx(now + 2 * second)
        now += 2 * second
        loading.finish_part(now)
        assert (loading.held, engine.blocks.active) == (2 * part, 2 * part)
    assert loading.start_next(now) is not None
    loading.close()
    assert (engine.blocks.active, engine.blocks.cached) == (0, 8), "the last part has not come"
    assert replay(engine.dump())[0] == set(array("Q", of.sequence_hashes)[:8])


def test_a_prefetch_takes_no_more_than_there_is_room_for() -> None:
    engine = core(host_blocks=64)
    of = request("a", 0)
    engine.submit(of)
    now, _, _ = finish(engine)
    engine.submit(request("b", 500, target=20))
    engine.step(now)
    loading = PrefixLoad(
        engine, array("Q", of.sequence_hashes), array("Q", of.local_hashes), of.salt, ""
    )
    while (ready_at := loading.start_next(now)) is not None:
        now = ready_at
        loading.finish_part(now)
    assert engine.blocks.available == 0
    loading.close()
    finish(engine, now)
    assert engine.blocks.active == 0


def replay(events: list[KvEvent]) -> dict[int, set[int]]:
    held: dict[int, set[int]] = {0: set(), 1: set()}
    for event in events:
        if isinstance(event, Cleared):
            held = {0: set(), 1: set()}
        elif isinstance(event, Removed):
            held[event.tier] -= set(array("Q", event.engine))
        else:
            assert event.parent is None or event.parent in held[event.tier]
            held[event.tier] |= set(array("Q", event.engine))
    return held


def left(prefix: list[int]) -> Sequence:
    """A sequence whose blocks, one token each, are all in memory."""
    tokens = array("I", prefix).tobytes()
    local, hashes, tail = hash_prompt(tokens, 1, 9)
    of = Request(
        id="a",
        length=len(prefix),
        local_hashes=local,
        sequence_hashes=hashes,
        tail=tail,
        source=Counting(),
        target=1,
        salt=9,
    )
    made = Sequence(of, 0, 1)
    made.full_blocks = len(prefix)
    return made


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=7), max_size=30))
def test_events_of_a_lower_tier_are_correct_and_its_size_is_bounded(
    prefixes: list[list[int]],
) -> None:
    tier = LowerTier(5, tier=HOST)
    events: list[KvEvent] = []
    for prefix in prefixes:
        sequence = left(prefix)
        tier.store(sequence, 0)
        events += tier.take_events()
        assert len(tier.contents) <= 5
        assert (tier.active, tier.cached) == (0, len(tier.contents))
        assert replay(events)[HOST] == tier.contents
        assert tier.match_prefix(sequence.sequence_hashes).matched == min(5, len(prefix))
    assert replay(tier.stored())[HOST] == tier.contents


def test_faults_come_when_they_are_due() -> None:
    none = Faults()
    none.check_crash(10**9)
    assert not none.hangs(10**9)
    assert not none.loses(7)
    assert none.slowdown(7) == 1.0
    faults = Faults(crash_step=3, hang_step=5, slow_step=7, slow_factor=4.0, lose_every=2)
    faults.check_crash(2)
    with pytest.raises(InjectedCrash, match="step 3"):
        faults.check_crash(3)
    assert [faults.hangs(4), faults.hangs(5)] == [False, True]
    assert [faults.slowdown(6), faults.slowdown(7)] == [1.0, 4.0]
    assert [faults.loses(n) for n in (1, 2, 3, 4)] == [False, True, False, True]
