"""Lower tiers of the mock: onboarding, retention and transfer times."""

from array import array
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from support.engines import SALT, StartedEngine, make_prefetch, prompt, sequence, start_mock
from support.wait import eventually

from kvmesh.bus.messages import Clear, Pin, Release, Retain, Unpin
from kvmesh.worker.capabilities import TierCounts, Tiered

HOST, DISK = 1, 2


@pytest_asyncio.fixture
async def started() -> AsyncIterator[StartedEngine]:
    """64 blocks of memory over 96 of the host and 256 on the disk."""
    made = await start_mock(host_blocks=96, disk_blocks=256, speedup=100)
    yield made
    await made.engine.close()


async def fill_engine(started: StartedEngine, requests: int, first: int = 1000) -> None:
    """Fill the engine with 12 other blocks per request."""
    for i in range(first, first + requests):
        await started.run(f"press{i}", prompt(192, first=i), max_tokens=1)


async def test_tenants_whose_salts_collide_share_no_tier(started: StartedEngine) -> None:
    tokens = prompt(64)
    await started.run("a", tokens, max_tokens=1, tenant="a" * 32)
    await fill_engine(started, 6)
    assert blocks_by_tier(started, tokens)[0] < 4
    await started.run("b", tokens, max_tokens=1, tenant="b" * 32)
    assert [sum(delta.cached or []) for delta in started.sink.deltas["b"]] == [0]
    assert (await started.execute(make_prefetch(tokens, tenant="c" * 32))).ok
    await started.run("again", tokens, max_tokens=1, tenant="a" * 32)
    assert sum(started.sink.deltas["again"][0].cached or []) == 3 * started.size


def blocks_by_tier(started: StartedEngine, tokens: bytes) -> list[int]:
    """Leading blocks of a prompt in each tier according to the events."""
    sink, blocks = started.sink, (*sequence(tokens), -1)
    tiers = (sink.held.get(0, set()), *(sink.below.get(tier, set()) for tier in (HOST, DISK)))
    return [[block in held for block in blocks].index(False) for held in tiers]


def loaded(started: StartedEngine) -> list[int]:
    assert isinstance(started.engine, Tiered)
    counts = started.engine.tier_counts()
    assert counts is not None
    return counts.loaded


async def test_blocks_of_an_ephemeral_request_stay_in_the_engine(started: StartedEngine) -> None:
    await started.run("a", prompt(100), max_tokens=1, ephemeral=True)
    assert blocks_by_tier(started, prompt(100)) == [6, 0, 0]


async def test_tier_counts_report_the_moved_blocks(started: StartedEngine) -> None:
    assert started.info.capacity.tier_blocks == [96, 256]
    await started.run("a", prompt(100), max_tokens=1)
    assert blocks_by_tier(started, prompt(100)) == [6, 6, 6]
    assert isinstance(started.engine, Tiered)
    assert started.engine.tier_counts() == TierCounts(loaded=[0, 0, 0, 0], written=12)


@pytest.mark.parametrize(("others", "tier"), [(6, HOST), (10, DISK)])
async def test_evicted_blocks_are_onboarded(started: StartedEngine, others: int, tier: int) -> None:
    tokens = prompt(100)
    await started.run("a", tokens, max_tokens=1)
    await fill_engine(started, others)
    assert blocks_by_tier(started, tokens)[:tier] == [0] * tier
    await started.run("b", tokens, max_tokens=1)
    assert started.sink.deltas["b"][0].cached == [*[0] * tier, 96]
    assert loaded(started)[tier] == 6


@pytest.mark.parametrize(("others", "tier"), [(6, HOST), (10, DISK)])
async def test_a_prefetch_brings_blocks_up_before_anybody_asks(
    started: StartedEngine, others: int, tier: int
) -> None:
    tokens = prompt(100)
    await started.run("a", tokens, max_tokens=1)
    await fill_engine(started, others)
    requests = started.load().requests
    assert (await started.execute(make_prefetch(tokens))).ok
    await eventually(lambda: blocks_by_tier(started, tokens)[0] == 6, timeout=30, what="it is here")
    await eventually(lambda: not started.load().active_blocks, timeout=30, what="it has ended")
    assert loaded(started)[tier] == 6
    assert started.load().requests == requests
    await started.run("b", tokens, max_tokens=1)
    assert started.sink.deltas["b"][0].cached == [96]


async def test_a_request_ends_the_prefetch_of_its_prompt_and_loads_by_itself() -> None:
    made = await start_mock(host_blocks=512, host_bytes_per_s=1.0)
    tokens = prompt(100)
    await made.run("a", tokens, max_tokens=1)
    await fill_engine(made, 6)
    assert (await made.execute(make_prefetch(tokens))).ok
    await eventually(lambda: loaded(made)[HOST], timeout=30, what="blocks are on their way")
    made.submit("b", tokens, max_tokens=1)
    assert not made.engine.abort("p")
    await eventually(lambda: loaded(made)[HOST] == 12, timeout=30, what="it asks for them itself")
    assert made.load().active_blocks == 6
    assert made.engine.abort("b")
    assert made.load().active_blocks == 0
    await made.engine.close()


async def test_a_prefetch_past_its_deadline_is_given_up() -> None:
    made = await start_mock(host_blocks=512, host_bytes_per_s=1.0)
    tokens = prompt(100)
    await made.run("a", tokens, max_tokens=1)
    await fill_engine(made, 6)
    assert (await made.execute(make_prefetch(tokens, deadline_s=1.0))).ok
    await eventually(lambda: loaded(made)[HOST], timeout=30, what="blocks are on their way")
    await eventually(lambda: not made.load().active_blocks, timeout=30, what="it has ended")
    assert not made.engine.abort("p")
    assert blocks_by_tier(made, tokens) == [0, 6, 0]
    await made.engine.close()


async def test_clear_reaches_the_tiers_that_are_meant(started: StartedEngine) -> None:
    await started.run("a", prompt(64), max_tokens=1)
    await started.run("b", prompt(64), max_tokens=1, salt=SALT + 1)
    assert (await started.execute(Clear(salt=SALT, tiers=[HOST]))).blocks == 4
    assert blocks_by_tier(started, prompt(64)) == [4, 0, 4]
    assert (await started.execute(Clear(tiers=[DISK, 3]))).blocks == 8
    assert blocks_by_tier(started, prompt(64)) == [4, 0, 0]
    assert (await started.execute(Clear())).blocks == 8, "those in two tiers count once"
    assert not started.sink.held[0] | started.sink.below[HOST] | started.sink.below[DISK]


async def test_release_drops_unshared_blocks_from_all_tiers(started: StartedEngine) -> None:
    shared = prompt(64)
    one, two = shared + prompt(64, first=100), shared + prompt(48, first=200)
    await started.run("a", one, max_tokens=1, session="A")
    await started.run("b", two, max_tokens=1, session="B")
    await fill_engine(started, 6)
    assert blocks_by_tier(started, one) == [0, 8, 8]
    assert (await started.execute(Release(sessions=["A"]))).blocks == 4
    assert (blocks_by_tier(started, one), blocks_by_tier(started, two)) == ([0, 4, 4], [0, 7, 7])


async def test_superseded_tails_are_dropped_from_all_tiers(started: StartedEngine) -> None:
    head = prompt(48)
    old, new = head + prompt(96, first=100), head + prompt(32, first=200)
    await started.run("old", old, max_tokens=1, session="A", conversation=4 << 32)
    assert blocks_by_tier(started, old) == [9, 9, 9]
    await started.run("new", new, max_tokens=1, session="A", conversation=4 << 32)
    assert (blocks_by_tier(started, old), blocks_by_tier(started, new)) == ([9, 9, 9], [5, 5, 5])
    new += prompt(16, first=300)
    await started.run("next", new, max_tokens=1, session="A", conversation=4 << 32)
    assert (blocks_by_tier(started, old), blocks_by_tier(started, new)) == ([3, 3, 3], [6, 6, 6])


async def test_side_requests_leave_a_session_s_blocks_in_all_tiers(started: StartedEngine) -> None:
    head, main_key, side_key = prompt(48), 4 << 32, 5 << 32
    main, side = head + prompt(96, first=100), head + prompt(32, first=200)
    await started.run("main", main, max_tokens=1, session="A", conversation=main_key)
    for number in range(3):
        side += prompt(16, first=300 + number)
        name = f"side{number}"
        await started.run(name, side, max_tokens=1, session="A", conversation=side_key)
    edited = head + prompt(32, first=400)
    await started.run(
        "aside", edited, max_tokens=1, session="A", conversation=main_key, ephemeral=True
    )
    assert blocks_by_tier(started, main) == [9, 9, 9]
    main += prompt(16, first=900)
    await started.run("again", main, max_tokens=1, session="A", conversation=main_key)
    assert started.sink.cached("again") == 9 * 16
    assert (await started.execute(Release(sessions=["A"]))).blocks == 10 + 5 + 2
    assert blocks_by_tier(started, main) == [0, 0, 0]


async def test_doubtful_blocks_go_first_from_all_tiers(started: StartedEngine) -> None:
    head, plain = prompt(48), prompt(160, first=700)
    old, new = head + prompt(96, first=100), head + prompt(32, first=200)
    await started.run("plain", plain, max_tokens=1)
    await started.run("old", old, max_tokens=1, session="A", conversation=1)
    await started.run("new", new, max_tokens=1, session="A", conversation=1)
    await fill_engine(started, 6)
    assert blocks_by_tier(started, old)[HOST] == 9
    await started.run("more", prompt(96, first=2000), max_tokens=1)
    assert (blocks_by_tier(started, old), blocks_by_tier(started, plain)) == (
        [0, 6, 9],
        [0, 10, 10],
    )


async def test_a_pin_applies_to_lower_tiers_until_it_is_removed(started: StartedEngine) -> None:
    tokens = prompt(96)
    await started.run("a", tokens, max_tokens=1)
    await fill_engine(started, 6)
    pin = Pin(id="p", sequence_hashes=array("Q", sequence(tokens)).tobytes(), ttl_s=60.0)
    assert (await started.execute(pin)).blocks == 6, "none of them in the engine"
    await fill_engine(started, 12, first=2000)
    assert blocks_by_tier(started, tokens) == [0, 6, 6]
    assert (await started.execute(Unpin("p"))).blocks == 6
    await fill_engine(started, 12, first=3000)
    assert blocks_by_tier(started, tokens)[:2] == [0, 0]


async def test_claims_follow_blocks_to_lower_tiers_and_back(started: StartedEngine) -> None:
    tokens = prompt(96)
    retain = Retain(0, None, 90, explicit=True)
    await started.run("a", tokens, max_tokens=1, retention=[retain])
    assert (await started.execute(Clear(tiers=[0]))).blocks == 6
    await fill_engine(started, 12)
    assert blocks_by_tier(started, tokens) == [0, 6, 6], "others of the host's 96 have gone"
    await started.run("b", tokens, max_tokens=1)
    await fill_engine(started, 6, first=2000)
    assert blocks_by_tier(started, tokens)[0] == 5, (
        "the last one was computed, and nothing asked for it"
    )


async def test_events_of_a_step_precede_the_removal_of_its_blocks() -> None:
    made = await start_mock(host_blocks=96, speedup=0.02)  # a step takes most of a second
    made.submit("a", prompt(100), max_tokens=1)
    await eventually(lambda: made.load().steps == 1, timeout=30, what="the step is under way")
    assert (await made.execute(Clear())).blocks == 6
    await made.ended("a")
    assert blocks_by_tier(made, prompt(100)) == [0, 0, 0]
    await made.engine.close()
