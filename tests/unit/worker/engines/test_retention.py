"""Retention, release and pins: the contract of every engine with `Retaining`."""

from array import array
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from support.engines import ENGINES, SALT, StartedEngine, prompt, running, sequence

from kvmesh.bus.messages import Clear, Pin, Release, Retain, Unpin
from kvmesh.worker.capabilities import Retaining, execute_command

TENANT_BLOCKS = 32


@pytest_asyncio.fixture(params=ENGINES)
async def started(request: pytest.FixtureRequest) -> AsyncIterator[StartedEngine]:
    async with running(request.param) as engine:
        yield engine


async def run(
    started: StartedEngine, name: str, tokens: bytes, **fields: object
) -> list[str] | None:
    """Run one request to its end; returns the outcomes of its directives."""
    started.submit(name, tokens, max_tokens=1, **fields)
    await started.ended(name)
    return next(d.retention for d in started.sink.deltas[name] if d.cached is not None)


async def fill_engine(started: StartedEngine, requests: int = 7, first: int = 1000) -> None:
    """Fill the engine's 64 blocks with other prompts, more than once."""
    for i in range(first, first + requests):
        await run(started, f"press{i}", prompt(160, first=i))


def held_blocks(started: StartedEngine, tokens: bytes) -> int:
    """Leading blocks of a prompt in the engine according to its events."""
    present = started.sink.held[0]
    return [block in present for block in (*sequence(tokens), -1)].index(False)


def counts(started: StartedEngine) -> dict[str, int]:
    assert isinstance(started.engine, Retaining)
    return started.engine.retention()[0].outcomes


def joined(*parts: bytes) -> bytes:
    return b"".join(parts)


async def test_retained_blocks_outlive_later_ones(started: StartedEngine) -> None:
    kept, plain = prompt(80), prompt(80, first=500)
    retain = Retain(0, None, 90, explicit=True)
    assert await run(started, "kept", kept, retention=[retain]) == ["honoured"]
    assert await run(started, "plain", plain) is None
    await fill_engine(started)
    assert (held_blocks(started, kept), held_blocks(started, plain)) == (5, 0)
    assert counts(started) == {"honoured": 1, "clipped": 0, "expired": 0, "evicted": 0}


async def test_only_the_range_of_a_directive_is_retained(started: StartedEngine) -> None:
    tokens = prompt(160)
    ranges = [Retain(0, None, 0, explicit=True), Retain(0, 64, 90, explicit=True)]
    assert await run(started, "a", tokens, retention=ranges) == ["honoured", "honoured"]
    await run(started, "later", prompt(160, first=700))
    await fill_engine(started, requests=5)
    assert held_blocks(started, tokens) == 4


async def test_a_promise_is_soft(started: StartedEngine) -> None:
    """Retained blocks are evicted when no others are left; no request is refused for them."""
    kept = prompt(400)
    await run(started, "kept", kept, retention=[Retain(0, None, 100, explicit=True)])
    for i in range(4):
        started.submit(f"big{i}", prompt(480, first=2000 + i), max_tokens=20)
    await started.ended(*(f"big{i}" for i in range(4)))
    assert held_blocks(started, kept) < 25
    assert counts(started)["evicted"] == 1


async def test_over_budget_a_directive_is_clipped(started: StartedEngine) -> None:
    retain = Retain(0, None, 90, explicit=True)
    first, second = prompt(400), prompt(400, first=600)
    assert await run(started, "a", first, retention=[retain]) == ["honoured"]
    assert await run(started, "b", second, retention=[retain]) == ["clipped"]
    await fill_engine(started)
    assert (held_blocks(started, first), held_blocks(started, second)) == (25, TENANT_BLOCKS - 25)


async def test_urgent_requests_leave_others_room_to_be_cached(started: StartedEngine) -> None:
    for i in range(8):
        tokens = prompt(160, first=3000 + i)
        await run(started, f"urgent{i}", tokens, priority=65, tenant=f"evil/{i}")
    mine, others = prompt(80), prompt(80, first=500)
    await run(started, "mine", mine, tenant="victim")
    await run(started, "other", others, tenant="else")
    await run(started, "more", prompt(160, first=4000), priority=65, tenant="evil")
    assert (held_blocks(started, mine), held_blocks(started, others)) == (5, 5)
    assert isinstance(started.engine, Retaining)
    assert started.engine.retention()[0].charged_blocks == TENANT_BLOCKS


async def test_the_outcome_of_the_answer_s_directive_comes_at_its_end(
    started: StartedEngine,
) -> None:
    decode = Retain(0, None, 90, kind="decode", explicit=True)
    plain = Retain(0, None, 90, kind="decode")
    started.submit("short", prompt(32), max_tokens=65, decode=decode)
    await started.ended("short")
    started.submit("long", prompt(400, first=600), max_tokens=100, decode=decode)
    await started.ended("long")
    started.submit("default", prompt(32, first=3000), max_tokens=17, decode=plain)
    await started.ended("default")
    reported = {name: [d.decode for d in deltas] for name, deltas in started.sink.deltas.items()}
    assert {name: outcome[-1] for name, outcome in reported.items()} == {
        "short": "honoured",
        "long": "clipped",
        "default": None,
    }
    assert not any(outcome for deltas in reported.values() for outcome in deltas[:-1])
    assert (counts(started)["honoured"], counts(started)["clipped"]) == (1, 1)


async def test_the_latest_directive_counts(started: StartedEngine) -> None:
    tokens = prompt(80)
    await run(started, "a", tokens, session="s", retention=[Retain(0, None, 90, explicit=True)])
    await run(started, "b", tokens, session="s", retention=[Retain(0, None, 35, explicit=True)])
    await fill_engine(started)
    assert held_blocks(started, tokens) == 0


async def test_thinking_goes_first_unless_something_follows_it(started: StartedEngine) -> None:
    thought, used = prompt(160), prompt(160, first=300)
    await run(started, "used", used, retention=[Retain(64, 128, kind="thinking")])
    await run(started, "thought", thought, retention=[Retain(64, None, kind="thinking")])
    for i in range(5):
        await run(started, f"fill{i}", prompt(160, first=1000 + i))
    assert (held_blocks(started, used), held_blocks(started, thought)) == (10, 4)


async def test_release_drops_the_private_tail_only(started: StartedEngine) -> None:
    shared = prompt(64)
    one, two = joined(shared, prompt(64, first=100)), joined(shared, prompt(48, first=200))
    await run(started, "a", one, session="A")
    await run(started, "b", two, session="B")
    reply = execute_command(started.engine, "e", Release(sessions=["A"]))
    assert (reply.ok, reply.blocks) == (True, 4)
    assert (held_blocks(started, one), held_blocks(started, two)) == (4, 7)
    removed = started.sink.removed
    assert execute_command(started.engine, "e", Release(sessions=["A", "unknown"])).blocks == 0
    assert started.sink.removed == removed
    await run(started, "b2", two, session="B")
    assert started.sink.cached("b2") == 96


async def test_blocks_of_a_running_request_are_not_dropped(started: StartedEngine) -> None:
    tokens = prompt(128)
    await run(started, "a", tokens, session="A")
    started.submit("runs", joined(prompt(96), prompt(16, first=9)), max_tokens=300)
    await started.wait_for_tokens("runs")
    assert execute_command(started.engine, "e", Release(sessions=["A"])).blocks == 2
    assert held_blocks(started, tokens) == 6
    assert started.engine.abort("runs")


async def test_a_new_prompt_leaves_the_old_tail(started: StartedEngine) -> None:
    head = prompt(48)
    old = joined(head, prompt(96, first=100))
    await run(started, "old", old, session="A")
    assert held_blocks(started, old) == 9
    compacted = joined(head, prompt(32, first=200))
    await run(started, "new", compacted, session="A")
    assert (held_blocks(started, old), held_blocks(started, compacted)) == (3, 5)


async def test_a_pin_is_a_preference_until_it_is_removed(started: StartedEngine) -> None:
    tokens = prompt(96)
    await run(started, "a", tokens)
    pin = Pin(id="p", sequence_hashes=array("Q", sequence(tokens)[:5]).tobytes(), ttl_s=60.0)
    assert execute_command(started.engine, "e", pin).blocks == 5
    assert execute_command(started.engine, "e", pin).blocks == 5
    await fill_engine(started)
    assert held_blocks(started, tokens) == 5
    assert execute_command(started.engine, "e", Unpin("p")).blocks == 5
    assert execute_command(started.engine, "e", Unpin("p")).ok
    await fill_engine(started, first=2000)
    assert held_blocks(started, tokens) == 0


async def test_a_pin_waits_for_its_blocks(started: StartedEngine) -> None:
    tokens = prompt(96)
    pin = Pin(id="p", sequence_hashes=array("Q", sequence(tokens)).tobytes(), ttl_s=60.0)
    assert execute_command(started.engine, "e", pin).blocks == 0
    await run(started, "a", tokens)
    await fill_engine(started)
    assert held_blocks(started, tokens) == 6


async def test_one_namespace_is_cleared(started: StartedEngine) -> None:
    await run(started, "a", prompt(64))
    await run(started, "b", prompt(64), salt=SALT + 1)
    others = set(sequence(prompt(64), SALT + 1))
    assert execute_command(started.engine, "e", Clear(tiers=[3])).blocks == 0
    assert execute_command(started.engine, "e", Clear(salt=SALT)).blocks == 4
    assert started.sink.held[0] == others
    assert execute_command(started.engine, "e", Clear()).blocks == 4
    assert not started.sink.held[0]
