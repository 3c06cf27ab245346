"""Rendering of decisions and outcomes by `kvmesh explain`."""

import asyncio
import io
import math
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import msgspec
import pytest
from msgspec.structs import replace
from rich.console import Console

from kvmesh.bus.messages import (
    CacheAccount,
    CacheLoss,
    Candidate,
    ComputedAhead,
    Decision,
    ExpectedReturn,
    Hints,
    Outcome,
    PrefixWait,
    ReturnClass,
    RouteEvent,
)
from kvmesh.bus.subjects import Subjects
from kvmesh.cli.explain import find_events, show
from kvmesh.cli.outcomes.show_session import render
from kvmesh.observer.decision_text import best_rejected
from kvmesh.observer.session_turns import SessionTurns
from kvmesh.returns.rates import pack_rates


def candidate(worker: str, cost: float, overlap: int = 0) -> Candidate:
    return Candidate(
        instance=f"{worker}-1", worker=worker, rank=0, overlap=[overlap, 0, 3, 0], prefill=1.0,
        decode=12.0, requests=2, cost=cost,
    )  # fmt: skip


DECISION = Decision(
    request="chatcmpl-1", model="m", time=0.0, router="r", policy="kv",
    chosen=candidate("a", 10.0, 8), candidates=[candidate("a", 10.0, 8), candidate("b", 18.5)],
    tokens=170, sequence_hashes=b"\0" * 80, max_tokens=5, block_size=16, eligible=7, wait_s=1.25,
    index_s=0.0004, note="session affinity",
)  # fmt: skip
OUTCOME = Outcome(
    request="chatcmpl-1", instance="a-1", time=1.0, cached_tokens=128, output_tokens=1234,
    ttft_s=0.05, total_s=3.0, finish="stop",
)  # fmt: skip


def text(*events: RouteEvent) -> str:
    out = io.StringIO()
    show(events, Console(file=out, width=160, highlight=False))
    return out.getvalue()


@pytest.mark.parametrize(
    "part",
    [
        "chatcmpl-1: 170 tokens of m, 10 full blocks",
        "to a rank 0 (a-1) by kv",
        "waited 1.25 s in the queue, 0.4 ms for the index",
        "note: session affinity",
        "8.5 cheaper than the best alternative, b rank 0",
        "disk blocks",
        "and 5 more",
        "stop on a-1",
        "first token after 50.0 ms, all 1,234 after 3.00 s",
        "cached 128 prompt tokens, expected 176",
    ],
)
def test_the_text_has_the_essentials(part: str) -> None:
    assert part in text(DECISION, OUTCOME)


def test_what_was_computed_ahead_is_shown_with_its_use() -> None:
    ahead = ComputedAhead(prefetch="sp_1", after="chatcmpl-0", first=512, tokens=640, used=608)
    shown = text(DECISION, replace(OUTCOME, ahead=ahead))
    assert "640 tokens (512 to 1,152) were to be computed ahead after chatcmpl-0" in shown
    assert "chatcmpl-0: 608 of them used\n" in shown
    useless = text(DECISION, replace(OUTCOME, ahead=replace(ahead, used=0, differs=True)))
    assert "chatcmpl-0: none used, as this prompt differs from the predicted one\n" in useless


@pytest.mark.parametrize(
    ("end", "words"),
    [
        ("computed", "which computed the same 64 first tokens on a rank 0"),
        ("late", "which took longer than another worker would have to compute the same 64 first"),
        ("lost", "which ended before it had computed the same 64 first tokens on a rank 0"),
        ("unheard", "(unheard) which computed the same 64 first tokens on a rank 0"),
    ],
)
def test_a_wait_for_a_prefix_names_who_computed_it(end: str, words: str) -> None:
    wait = PrefixWait(
        request="chatcmpl-0", instance="a-1", worker="a", rank=0, blocks=4, seconds=0.8, end=end
    )
    shown = text(replace(DECISION, prefix_waits=[wait]))
    assert f"of that 800.0 ms for request chatcmpl-0, {words}" in shown


EXPECTED = ExpectedReturn(
    after="chatcmpl-0", instance="b-1", rank=0, ended=0.0, pause_s=7.25, since=0.0, by="class",
    rates=pack_rates([0.0, 0.0, 0.0, 0.0, 0.1] + [0.01] * 11), waits=["tool", "Bash", "pytest"],
)  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        (
            {},
            [
                "continues chatcmpl-0, 7.25 s after its end; its session waited for Bash pytest",
                "expected back: 33% in 10 s, 60% in 1 min, 100% in 10 min, half in 38.36 s;",
                "forecast: as learned, then withdrawn",
            ],
        ),
        ({"instance": "a-1"}, ["forecast: as learned\n"]),
        ({"by": "", "waits": []}, ["waited for something unknown", "forecast: none"]),
        ({"by": "tool", "since": 1.5}, ["back (from 1.50 s after that end on)", "end of its tool"]),
        (
            {"by": "oracle", "rates": b"?"},
            ["expected back: not known; forecast: oracle"],
        ),
    ],
)
def test_the_return_that_was_expected_is_shown_with_what_came(
    changes: dict[str, Any], parts: list[str]
) -> None:
    shown = text(replace(DECISION, expected=replace(EXPECTED, **changes)))
    assert [part for part in parts if part not in shown] == []


def test_a_session_shows_what_was_expected_after_each_turn() -> None:
    turns = SessionTurns("s", 3)
    hints = Hints(session="t\x1fs")
    for number in range(5):
        after = replace(EXPECTED, after=f"r{number - 1}", instance="a-1" if number < 4 else "b-1")
        turns.follow(replace(DECISION, request=f"r{number}", hints=hints, expected=after))
        turns.follow(
            replace(OUTCOME, request=f"r{number}", session="t\x1fs", time=10.0 * number + 3)
        )
    turns.follow(replace(DECISION, hints=Hints(session="other"), expected=EXPECTED))
    assert list(turns.continued) == ["r1", "r2", "r3"]
    out = io.StringIO()
    learned = ReturnClass(
        model="m", waits=[], prompts=9.0, returned=5.0, expected=5.0, rates=pack_rates([0.001] * 16)
    )
    turns.turns[-1] = replace(turns.turns[-1], model="m")
    table = render(turns.turns, [learned], turns.continued)
    Console(file=out, width=260, highlight=False).print(table)
    second, third, last = (" ".join(line.split()) for line in out.getvalue().splitlines()[1:])
    assert second.endswith("7.00 s 33 % 60 % 100 % 38.36 s as learned")
    assert third.endswith("38.36 s as learned, then withdrawn")
    assert last.endswith(" – ~1 % ~6 % ~44 % ~709.78 s –")


def test_unused_tiers_are_omitted() -> None:
    assert "host blocks" not in text(DECISION)


def test_a_choice_against_the_cost_is_stated() -> None:
    expensive = msgspec.structs.replace(DECISION, chosen=DECISION.candidates[1])
    assert "8.5 more expensive than the best alternative, a rank 0" in text(expensive)
    alone = msgspec.structs.replace(DECISION, candidates=[])
    assert best_rejected(alone) is None
    assert "▸" in text(alone)


def test_an_outcome_without_a_decision_or_token_is_shown() -> None:
    lost = msgspec.structs.replace(OUTCOME, ttft_s=None, finish="error")
    assert "no token, all" in text(lost)


def test_the_caller_is_shown_as_people_name_it() -> None:
    hints = Hints(session="tag\x1fs-1", tenant="gold", fair_class="x", priority=2)
    assert "  session s-1, class gold/x, priority 2\n" in text(replace(DECISION, hints=hints))
    sent = replace(OUTCOME, tenant="team-a", key="ci", client="mine", device_s=0.25)
    assert "  tenant team-a, key ci, client's id mine, 250.0 ms of device time" in text(sent)
    assert "tenant" not in text(DECISION, OUTCOME)


@pytest.mark.parametrize("time", [math.nan, math.inf, -1e300, 1e18])
def test_a_removal_at_an_impossible_time_is_shown_without_it(time: float) -> None:
    loss = CacheLoss(first=0, tokens=9, reason="evicted", worker="w", tier=0, time=time)
    cache = CacheAccount(prompt_tokens=170, losses=[loss], new=161)
    assert "(w, engine memory)" in text(DECISION, replace(OUTCOME, cache=cache))


def test_names_with_control_characters_are_escaped() -> None:
    outcome = replace(OUTCOME, tenant="\x1b[31mred\nx")
    assert "tenant \\x1b[31mred\\nx" in text(DECISION, outcome)


class StoredRoutes:
    """A reader of one stream of stored messages, which counts how often it is read."""

    stored: ClassVar[list[RouteEvent]] = []
    reads = 0

    def __init__(self, *arguments: Any) -> None:
        self._handler = arguments[3]
        self.caught_up = asyncio.Event()

    async def open(self) -> None:
        type(self).reads += 1
        for event in self.stored:
            self._handler(cast(Any, SimpleNamespace(data=msgspec.msgpack.encode(event))))
        self.caught_up.set()

    async def close(self) -> None:
        return


def test_requests_that_name_each_other_are_not_followed_without_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = [f"{depth}-{n}" for depth in range(4) for n in range(9)]
    outcomes = [replace(OUTCOME, request="root", client="chosen")]
    for depth in range(1, 4):
        parents = ["root"] if depth == 1 else [n for n in names if n[0] == str(depth - 1)]
        children = [n for n in names if n[0] == str(depth)]
        outcomes += [replace(OUTCOME, request=c, client=p) for c in children for p in parents]
    monkeypatch.setattr(StoredRoutes, "stored", outcomes)
    monkeypatch.setattr(StoredRoutes, "reads", 0)
    monkeypatch.setattr("kvmesh.observer.route_stream.StreamReader", StoredRoutes)
    bus = cast(Any, SimpleNamespace(subjects=Subjects("mesh")))
    (found,) = asyncio.run(find_events(bus, "chosen", None))
    assert (found.request, StoredRoutes.reads) == ("root", 2)
    (found,) = asyncio.run(find_events(bus, "root", None))  # and not those that take its name
    assert (found.request, StoredRoutes.reads) == ("root", 3)


def test_the_conversation_and_the_origin_of_a_fork_are_named() -> None:
    cache = CacheAccount(prompt_tokens=9, previous="chatcmpl-0")
    outcome = replace(OUTCOME, conversation="3fa2b1c0", agent="qwen-code", cache=cache)
    decision = replace(DECISION, hints=Hints(session="s", forked_from="tag\x1forigin"))
    shown = text(decision, outcome)
    assert "conversation 3fa2b1c0 of qwen-code, continues chatcmpl-0" in shown
    assert "session s, forked from origin" in shown


def test_turns_of_several_conversations_are_told_apart() -> None:
    turns = [replace(OUTCOME, conversation=name) for name in ("3fa2b1c0", "99999999")]
    for count, shown in ((1, False), (2, True)):
        headings = [column.heading for column in render(turns[:count]).columns]
        assert ("conversation" in headings) == shown
