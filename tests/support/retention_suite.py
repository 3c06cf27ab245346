"""Retention, release and pins: the contract of every engine with `Retaining`.

Lengths are in blocks, since engines support different block sizes.
"""

import asyncio
from array import array
from functools import partial

from kvmesh.bus.messages import Clear, Pin, Release, Retain, Unpin
from kvmesh.worker.capabilities import Retaining
from support.engines import StartedEngine
from support.wait import eventually

TENANT_BLOCKS = 32
MAIN, CLEARED, TITLE = 7 << 32 | 1, 7 << 32 | 2, 8 << 32 | 1  # CLEARED is of MAIN's agent


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
        await run(started, f"press{i}", started.prompt(10, i))


def held_blocks(started: StartedEngine, tokens: bytes) -> int:
    """Leading blocks of a prompt in the engine according to its events."""
    present = started.held_hashes
    return [block in present for block in (*started.sequence(tokens), -1)].index(False)


async def started_holds(started: StartedEngine, blocks: dict[bytes, int]) -> None:
    """Wait until the engine holds as many leading blocks of each prompt, by its events."""
    await eventually(
        lambda: {tokens: held_blocks(started, tokens) for tokens in blocks} == blocks,
        what=f"blocks {list(blocks.values())}",
    )


def counts(started: StartedEngine) -> dict[str, int]:
    """Outcomes of directives in this test."""
    assert isinstance(started.engine, Retaining)
    outcomes = started.engine.retention()[0].outcomes
    return {name: outcomes[name] - started.earlier.get(name, 0) for name in outcomes}


def charged_blocks(started: StartedEngine) -> int:
    """Blocks that tenants are charged for."""
    assert isinstance(started.engine, Retaining)
    return sum(state.charged_blocks for state in started.engine.retention())


async def emptied(shared: StartedEngine) -> StartedEngine:
    """An engine of several tests, with an empty cache, a fresh record and other prompts.

    It remembers what released sessions began with, which is then no tail of a later session.
    """
    await asyncio.wait_for(shared.engine.drain(), 60)
    assert isinstance(shared.engine, Retaining)
    await shared.engine.release(["A", "B", "s"])
    await shared.engine.unpin("p")
    assert (await shared.execute(Clear())).ok
    await eventually(lambda: not shared.held_hashes, what="the cache is empty")
    (state,) = shared.engine.retention()
    assert state.charged_blocks == 0
    shared.earlier = state.outcomes
    shared.sink.deltas.clear()
    shared.sink.order.clear()
    shared.step += 2
    return shared


def joined(*parts: bytes) -> bytes:
    return b"".join(parts)


class RetentionSuite:
    """An engine of 64 blocks, 4 sequences at once, and a context of 32 blocks."""

    async def test_retained_blocks_outlive_later_ones(self, started: StartedEngine) -> None:
        kept, plain = started.prompt(5), started.prompt(5, 500)
        retain = Retain(0, None, 90, explicit=True)
        assert await run(started, "kept", kept, retention=[retain]) == ["honoured"]
        assert await run(started, "plain", plain) is None
        await fill_engine(started)
        await started_holds(started, {kept: 5, plain: 0})
        expected = {"honoured": 1, "clipped": 0, "expired": 0, "evicted": 0}
        await eventually(lambda: counts(started) == expected)

    async def test_only_the_range_of_a_directive_is_retained(self, started: StartedEngine) -> None:
        size = started.size
        tokens = started.prompt(10)
        ranges = [Retain(0, None, 0, explicit=True), Retain(0, 4 * size, 90, explicit=True)]
        assert await run(started, "a", tokens, retention=ranges) == ["honoured", "honoured"]
        await run(started, "later", started.prompt(10, 700))
        await fill_engine(started, requests=5)
        await started_holds(started, {tokens: 4})

    async def test_a_promise_is_soft(self, started: StartedEngine) -> None:
        """Retained blocks are evicted when no others are left; no request is refused for them."""
        kept = started.prompt(25)
        await run(started, "kept", kept, retention=[Retain(0, None, 100, explicit=True)])
        for i in range(4):
            tokens = started.prompt(28, 2000 + i)
            started.submit(f"big{i}", tokens, max_tokens=int(3.5 * started.size))
        await started.ended(*(f"big{i}" for i in range(4)))
        await eventually(
            lambda: held_blocks(started, kept) < 25, what="retained blocks are evicted"
        )
        await eventually(lambda: counts(started)["evicted"] == 1, what="the outcome")

    async def test_over_budget_a_directive_is_clipped(self, started: StartedEngine) -> None:
        retain = Retain(0, None, 90, explicit=True)
        first, second = started.prompt(25), started.prompt(25, 600)
        assert await run(started, "a", first, retention=[retain]) == ["honoured"]
        assert await run(started, "b", second, retention=[retain]) == ["clipped"]
        await fill_engine(started)
        await started_holds(started, {first: 25, second: TENANT_BLOCKS - 25})

    async def test_urgent_requests_leave_others_room_to_be_cached(
        self, started: StartedEngine
    ) -> None:
        for i in range(8):
            tokens = started.prompt(10, 3000 + i)
            await run(started, f"urgent{i}", tokens, priority=65, tenant=f"evil/{i}")
        mine, others = started.prompt(5), started.prompt(5, 500)
        await run(started, "mine", mine, tenant="victim")
        await run(started, "other", others, tenant="else")
        await run(started, "more", started.prompt(10, 4000), priority=65, tenant="evil")
        await started_holds(started, {mine: 5, others: 5})
        await eventually(lambda: charged_blocks(started) == TENANT_BLOCKS)

    async def test_the_outcome_of_the_answer_s_directive_comes_at_its_end(
        self,
        started: StartedEngine,
    ) -> None:
        size = started.size
        decode = Retain(0, None, 90, kind="decode", explicit=True)
        plain = Retain(0, None, 90, kind="decode")
        started.submit("short", started.prompt(2), max_tokens=4 * size + 1, decode=decode)
        await started.ended("short")
        started.submit("long", started.prompt(25, 600), max_tokens=6 * size + 4, decode=decode)
        await started.ended("long")
        started.submit("default", started.prompt(2, 3000), max_tokens=size + 1, decode=plain)
        await started.ended("default")
        reported = {
            name: [d.decode for d in deltas] for name, deltas in started.sink.deltas.items()
        }
        assert {name: outcome[-1] for name, outcome in reported.items()} == {
            "short": "honoured",
            "long": "clipped",
            "default": None,
        }
        assert not any(outcome for deltas in reported.values() for outcome in deltas[:-1])
        await eventually(
            lambda: (counts(started)["honoured"], counts(started)["clipped"]) == (1, 1)
        )

    async def test_the_latest_directive_counts(self, started: StartedEngine) -> None:
        tokens = started.prompt(5)
        await run(started, "a", tokens, session="s", retention=[Retain(0, None, 90, explicit=True)])
        await run(started, "b", tokens, session="s", retention=[Retain(0, None, 35, explicit=True)])
        await fill_engine(started)
        await started_holds(started, {tokens: 0})

    async def test_thinking_goes_first_unless_something_follows_it(
        self, started: StartedEngine
    ) -> None:
        size = started.size
        thought, used = started.prompt(10), started.prompt(10, 300)
        await run(started, "used", used, retention=[Retain(4 * size, 8 * size, kind="thinking")])
        await run(started, "thought", thought, retention=[Retain(4 * size, None, kind="thinking")])
        for i in range(5):
            await run(started, f"fill{i}", started.prompt(10, 1000 + i))
        await started_holds(started, {used: 10, thought: 4})

    async def test_release_drops_the_private_tail_only(self, started: StartedEngine) -> None:
        shared = started.prompt(4)
        one, two = joined(shared, started.prompt(4, 100)), joined(shared, started.prompt(3, 200))
        await run(started, "a", one, session="A")
        await run(started, "b", two, session="B")
        reply = await started.execute(Release(sessions=["A"]))
        assert (reply.ok, reply.blocks) == (True, 4)
        await started_holds(started, {one: 4, two: 7})
        removed = started.sink.removed
        assert (await started.execute(Release(sessions=["A", "unknown"]))).blocks == 0
        assert started.sink.removed == removed
        await run(started, "b2", two, session="B")
        assert started.sink.cached("b2") == 6 * started.size

    async def test_blocks_of_a_running_request_are_not_dropped(
        self, started: StartedEngine
    ) -> None:
        """The request may end before the release where others load the machine: some tries."""
        for number in range(5):
            tokens, shared = (started.prompt(blocks, 100 * number) for blocks in (8, 6))
            await run(started, f"a{number}", tokens, session="A")
            runs = f"runs{number}"
            started.submit(runs, joined(shared, started.prompt(1, 9)), max_tokens=300)
            await started.wait_for_tokens(runs)
            reply = await started.execute(Release(sessions=["A"]))
            if was_running := started.engine.abort(runs):
                break
        assert was_running
        assert reply.blocks == 2
        await started_holds(started, {tokens: 6})

    async def test_a_new_prompt_leaves_the_old_tail(self, started: StartedEngine) -> None:
        head = started.prompt(3)
        old = joined(head, started.prompt(6, 100))
        await run(started, "old", old, session="A", conversation=MAIN)
        await started_holds(started, {old: 9})
        compacted = joined(head, started.prompt(2, 200))
        await run(started, "new", compacted, session="A", conversation=MAIN)
        await started_holds(started, {old: 9, compacted: 5})
        later = joined(compacted, started.prompt(2, 300))
        await run(started, "next", later, session="A", conversation=MAIN)
        await started_holds(started, {old: 3, later: 7})

    async def test_prompts_of_no_certain_conversation_drop_nothing(
        self, started: StartedEngine
    ) -> None:
        """Raw prompts, and those of a session that the frontend has named."""
        head = started.prompt(3)
        main, side = joined(head, started.prompt(6, 100)), joined(head, started.prompt(2, 200))
        await run(started, "main", main, session="A")
        for number in range(3):
            await run(started, f"side{number}", side, session="A")
            side = joined(side, started.prompt(1, 300 + number))
        await started_holds(started, {main: 9})

    async def test_what_a_session_may_have_left_goes_first(self, started: StartedEngine) -> None:
        started.sink.reasons.clear()
        plain, head = started.prompt(10, 700), started.prompt(3)
        old, new = joined(head, started.prompt(6, 100)), joined(head, started.prompt(2, 200))
        await run(started, "plain", plain)
        await run(started, "old", old, session="A", conversation=MAIN)
        await run(started, "new", new, session="A", conversation=MAIN)
        await fill_engine(started, requests=4)
        await run(started, "more", started.prompt(7, 2000))
        await eventually(lambda: held_blocks(started, old) < 9, what="doubtful blocks are evicted")
        assert {reason for reason, _ in started.sink.reasons} == {"superseded"}
        await started_holds(started, {plain: 10, new: 5})

    async def test_a_session_that_returns_to_what_it_left_loses_nothing(
        self, started: StartedEngine
    ) -> None:
        head = started.prompt(3)
        tails = [started.prompt(6, 100), started.prompt(2, 200), started.prompt(4, 2200)]
        prompts = [joined(head, tail) for tail in tails]
        for number, tokens in enumerate(prompts[:2]):
            await run(started, f"a{number}", tokens, session="A", conversation=MAIN)
        for turn in range(2):
            for number, tokens in enumerate(prompts):
                prompts[number] = joined(tokens, started.prompt(1, 2500 + 10 * turn))
                name = f"b{turn}{number}"
                await run(started, name, prompts[number], session="A", conversation=MAIN)
                known = 3 if (turn, number) == (0, 2) else len(tokens) // 4 // started.size
                assert started.sink.cached(name) == known * started.size
        await started_holds(started, {prompts[0]: 11, prompts[1]: 7, prompts[2]: 9})

    async def test_side_requests_leave_a_session_s_conversation_alone(
        self, started: StartedEngine
    ) -> None:
        """Titles, hooks and subagents under the session of the main conversation."""
        head = started.prompt(2)
        main, side = joined(head, started.prompt(14, 100)), joined(head, started.prompt(2, 2000))
        for turn in range(3):
            name = f"main{turn}"
            await run(started, name, main, session="A", conversation=MAIN)
            known = 0 if not turn else 14 + 2 * turn
            assert started.sink.cached(name) == known * started.size
            for key in (TITLE, TITLE, 0):
                side = joined(side, started.prompt(1, 2100 + 50 * turn))
                await run(
                    started, f"side{turn}{len(side)}{key}", side, session="A", conversation=key
                )
            main = joined(main, started.prompt(2, 3000 + 100 * turn))
        await fill_engine(started, requests=1)
        await started_holds(started, {main: 20})

    async def test_a_compaction_leaves_the_conversation_until_the_next_turn(
        self, started: StartedEngine
    ) -> None:
        """The agent has it summarized without tools, and goes on from the summary."""
        head = started.prompt(3)
        main = joined(head, started.prompt(10, 100))
        await run(started, "main", main, session="A", conversation=MAIN)
        summarize = joined(started.prompt(1), started.prompt(12, 600))
        await run(started, "summarize", summarize, session="A", conversation=TITLE)
        await started_holds(started, {main: 13, summarize: 13})
        summary = joined(head, started.prompt(4, 2000))
        await run(started, "summary", summary, session="A", conversation=MAIN)
        await started_holds(started, {main: 13, summary: 7})
        summary = joined(summary, started.prompt(2, 2500))
        await run(started, "next", summary, session="A", conversation=MAIN)
        await started_holds(started, {main: 3, summarize: 13, summary: 9})

    async def test_conversations_of_one_agent_are_not_dropped_for_each_other(
        self, started: StartedEngine
    ) -> None:
        """A session that clears its history, forks it, or runs two tasks at once."""
        started.sink.reasons.clear()
        head, plain = started.prompt(3), started.prompt(10, 700)
        first, second = joined(head, started.prompt(7, 100)), joined(head, started.prompt(3, 2000))
        await run(started, "plain", plain)
        await run(started, "first", first, session="A", conversation=MAIN)
        for turn in range(3):
            second = joined(second, started.prompt(1, 2500 + 50 * turn))
            await run(started, f"second{turn}", second, session="A", conversation=CLEARED)
        await started_holds(started, {first: 10, second: 9})
        await fill_engine(started, requests=4)
        reasons = started.sink.reasons
        await eventually(lambda: {reason for reason, _ in reasons} == {"superseded"})
        await started_holds(started, {plain: 10, second: 9})
        assert held_blocks(started, first) >= 3
        for turn in range(2):
            first = joined(first, started.prompt(1, 2700 + 50 * turn))
            await run(started, f"again{turn}", first, session="A", conversation=MAIN)
        started.sink.reasons.clear()
        await fill_engine(started, requests=3, first=3000)
        assert "superseded" not in {reason for reason, _ in started.sink.reasons}
        await started_holds(started, {first: 12})

    async def test_an_ephemeral_request_says_nothing_about_the_conversation(
        self, started: StartedEngine
    ) -> None:
        head = started.prompt(3)
        main = joined(head, started.prompt(10, 100))
        await run(started, "main", main, session="A", conversation=MAIN)
        aside = joined(head, started.prompt(2, 2000))
        for turn in range(3):
            aside = joined(aside, started.prompt(1, 2500 + 50 * turn))
            name = f"aside{turn}"
            await run(started, name, aside, session="A", conversation=MAIN, ephemeral=True)
        await started_holds(started, {main: 13, aside: 8})
        main = joined(main, started.prompt(1, 2700))
        await run(started, "again", main, session="A", conversation=MAIN)
        assert started.sink.cached("again") == 13 * started.size
        edited = joined(head, started.prompt(4, 3000))
        await run(started, "edited", edited, session="A", conversation=MAIN)
        edited = joined(edited, started.prompt(1, 2700))
        await run(started, "next", edited, session="A", conversation=MAIN)
        await started_holds(started, {main: 3, aside: 3, edited: 8})

    async def test_release_drops_all_conversations_of_a_session_and_none_of_others(
        self, started: StartedEngine
    ) -> None:
        head = started.prompt(3)
        main, left = joined(head, started.prompt(4, 100)), joined(head, started.prompt(5, 2000))
        title, child = started.prompt(4, 600), joined(main, started.prompt(3, 2500))
        await run(started, "left", left, session="A", conversation=MAIN)
        await run(started, "main", main, session="A", conversation=MAIN)
        await run(started, "title", title, session="A", conversation=TITLE)
        await run(started, "child", child, session="B", conversation=MAIN)
        await started_holds(started, {left: 8, main: 7, title: 4, child: 10})
        assert (await started.execute(Release(sessions=["A"]))).blocks == 5 + 4
        await started_holds(started, {left: 3, title: 0, child: 10})

    async def _expires(self, started: StartedEngine) -> bool:
        """True once a directive has expired; an engine without requests may not report it."""
        await run(started, f"tick{len(started.sink.order)}", started.prompt(0.5, 9000))
        return counts(started)["expired"] == 1

    async def test_each_removed_block_has_a_reason(self, started: StartedEngine) -> None:
        def removed(reason: str) -> int:
            named = started.sink.reasons.items()
            return sum(blocks for (known, _), blocks in named if known == reason)

        started.sink.reasons.clear()
        head, brief = started.prompt(3, 3900), [Retain(0, None, 90, 0.1, explicit=True)]
        await run(
            started, "old", joined(head, started.prompt(6, 100)), session="A", conversation=MAIN
        )
        new = joined(head, started.prompt(2, 200))
        await run(started, "new", new, session="A", conversation=MAIN)
        assert removed("superseded") == 0
        await run(
            started, "next", joined(new, started.prompt(1, 4200)), session="A", conversation=MAIN
        )
        await eventually(lambda: removed("superseded") == 6, what="superseded blocks")
        assert started.sink.reasons["superseded", "next"] == 6
        await started.execute(Release(sessions=["A"]))
        await eventually(lambda: removed("released") == 6, what="released blocks")
        await run(started, "brief", started.prompt(5, 300), retention=brief)
        await eventually(partial(self._expires, started), what="the end of a retention")
        kept = [Retain(0, None, 90, explicit=True)]
        await run(started, "kept", started.prompt(25, 400), retention=kept)
        await run(started, "clipped", started.prompt(20, 600), retention=kept)
        await fill_engine(started, requests=12)
        assert removed("expired") == 5
        assert removed("clipped") == 20 + 25 - TENANT_BLOCKS
        needed = {request for reason, request in started.sink.reasons if reason == "evicted"}
        assert any(request is not None and "press" in request for request in needed)
        await started.execute(Clear())
        await eventually(lambda: removed("cleared") > 0, what="cleared blocks")

    async def test_a_pin_is_a_preference_until_it_is_removed(self, started: StartedEngine) -> None:
        tokens = started.prompt(6)
        await run(started, "a", tokens)
        pin = Pin(
            id="p", sequence_hashes=array("Q", started.sequence(tokens)[:5]).tobytes(), ttl_s=60.0
        )
        assert (await started.execute(pin)).blocks == 5
        assert (await started.execute(pin)).blocks == 5
        await fill_engine(started)
        await started_holds(started, {tokens: 5})
        assert (await started.execute(Unpin("p"))).blocks == 5
        assert (await started.execute(Unpin("p"))).ok
        await fill_engine(started, first=2000)
        await started_holds(started, {tokens: 0})

    async def test_a_pin_waits_for_its_blocks(self, started: StartedEngine) -> None:
        tokens = started.prompt(6)
        pin = Pin(
            id="p", sequence_hashes=array("Q", started.sequence(tokens)).tobytes(), ttl_s=60.0
        )
        assert (await started.execute(pin)).blocks == 0
        await run(started, "a", tokens)
        await fill_engine(started)
        await started_holds(started, {tokens: 6})

    async def test_one_namespace_is_cleared(self, started: StartedEngine) -> None:
        await run(started, "a", started.prompt(4))
        await run(started, "b", started.prompt(4), salt=started.salt + 1)
        others = set(started.sequence(started.prompt(4), started.salt + 1))
        assert (await started.execute(Clear(tiers=[3]))).blocks == 0
        assert (await started.execute(Clear(salt=started.salt))).blocks == 4
        await eventually(lambda: started.held_hashes == others)
        assert (await started.execute(Clear())).blocks == 4
        await eventually(lambda: not started.held_hashes)
