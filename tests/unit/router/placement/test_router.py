"""Decisions of the router core, computed by hand: cost, load, filters."""

from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.routing import BLOCK, overlaps, request, sequence, worker

from kvmesh.bus.messages import Decision, Hints, Load, Placement, SeqFree, SeqPrefilled, SeqProgress
from kvmesh.router.errors import InvalidRouteRequest, NoWorkers
from kvmesh.router.placement.router import RouterCore
from kvmesh.router.scoring.cost import SHORTAGE_COST
from kvmesh.router.scoring.overlaps import Overlaps
from kvmesh.settings.schema import RouterSettings

TEN = sequence(*range(10))


def core(*names: str, **config: object) -> RouterCore:
    """A core of workers by name; by default without predictions and weights."""
    plain: dict[str, object] = {"predicted_ttl_s": 0.0, "prefill_weight": 1.0}
    settings = RouterSettings(**{**plain, **config})  # type: ignore[arg-type]
    router = RouterCore("m", "r", settings, Random(7))
    for name in names:
        router.join(worker(name))
    return router


def place(router: RouterCore, name: str, blocks: bytes, to: str, now: float = 0.0) -> Decision:
    decision = router.decide(request(name, blocks, placement=Placement(instance=to)), None, now)
    router.commit(decision, now)
    return decision


def costs(decision: Decision) -> dict[str, float]:
    return {c.instance: c.cost for c in decision.candidates}


def test_overlap_lowers_the_cost_by_each_tiers_credit() -> None:
    router = core("a", "b", "c")
    held = overlaps({"a": (4,), "b": (2, 4), "c": (0, 0, 4, 4)})
    decision = router.decide(request("1", TEN), held, 0.0)
    # 10 to decode; to prefill 10 - 4, 10 - 2 - 0.75 · 4, 10 - 0.25 · 4 - 0.25 · 4
    assert costs(decision) == {"a": 16.0, "b": 15.0, "c": 18.0}
    assert decision.chosen.instance == "b"
    assert decision.chosen.overlap == [2, 4, 0, 0]


def test_blocks_that_load_as_slowly_as_they_are_computed_count_as_computed() -> None:
    router = core("a", "b")
    held = overlaps({"a": (2, 4, 1, 1), "b": (2, 4, 1, 1)})
    report(router, 0.0, 0, 0, load_ratio=1.0)
    decision = router.decide(request("1", TEN, placement=Placement(instance="a")), held, 0.0)
    assert decision.chosen.overlap == [2, 0, 0, 0]
    router.commit(decision, 0.0)
    assert seen(router) == (8.0, 10.0)
    assert router.decide(request("2", TEN), held, 0.0).chosen.overlap == [2, 4, 1, 1]


def test_active_prefill_and_blocks_count_until_freed() -> None:
    router = core("a", "b")
    place(router, "1", TEN, "a")
    probe = request("2", sequence(*range(50, 54)))
    assert costs(router.decide(probe, None, 0.0)) == {"a": 10 + 4 + 10 + 4, "b": 8.0}
    router.apply(SeqPrefilled("1"), 1.0)
    assert costs(router.decide(probe, None, 0.0)) == {"a": 4 + 10 + 4, "b": 8.0}
    router.apply(SeqFree("1"), 1.0)
    assert costs(router.decide(probe, None, 0.0)) == {"a": 8.0, "b": 8.0}


def test_the_time_for_which_requests_generate_is_learned_from_their_events() -> None:
    router = core("a")
    place(router, "1", sequence(*range(10)), "a")
    place(router, "2", sequence(*range(20, 30)), "a")
    place(router, "3", sequence(*range(40, 50)), "a")
    for now in (1.0, 2.0):  # the second one is a repetition
        router.apply(SeqPrefilled("1"), now)
    router.apply(SeqFree("2"), 3.0)  # ends before its first token
    assert router.table.decode_s == 0.0
    router.apply(SeqFree("1"), 5.0)
    router.apply(SeqFree("1"), 9.0)
    assert router.table.decode_s == 4.0
    router.apply(SeqPrefilled("3"), 10.0)
    router.apply(SeqFree("3"), 24.0)
    assert router.table.decode_s == pytest.approx(4.0 + 0.02 * 10.0)


def test_short_requests_that_free_little_do_not_make_waits_look_short() -> None:
    router = core("a")
    place(router, "agent", sequence(*range(500)), "a")
    router.apply(SeqPrefilled("agent"), 0.0)
    router.apply(SeqFree("agent"), 20.0)
    for n in range(1000):
        place(router, f"{n}", sequence(1000 + n), "a", 20.0)
        router.apply(SeqPrefilled(f"{n}"), 20.0)
        router.apply(SeqFree(f"{n}"), 20.0)
        if n % 20 == 19:  # one in twenty, of all blocks 96 %
            place(router, f"agent {n}", sequence(*range(500)), "a", 20.0)
            router.apply(SeqPrefilled(f"agent {n}"), 20.0)
            router.apply(SeqFree(f"agent {n}"), 40.0)
    assert router.table.decode_s == pytest.approx(20.0, rel=0.1)


def test_a_turn_waits_where_its_context_is_if_memory_is_soon_free() -> None:
    # Both have had as many prompts. "home" has 920 of its 1,024 blocks in use, for requests that
    # generate for 2 s each; "idle" would take 3 s for the context of 400 blocks.
    router = core("home", "idle", prefill_weight=None)
    turns = [sequence(*range(1000 * n, 1000 * n + 230)) for n in range(4)]
    place(router, "first", sequence(*range(5000, 5920)), "idle")
    router.apply(SeqPrefilled("first"), 0.0)
    router.apply(SeqFree("first"), 2.0)
    for n, turn in enumerate(turns):
        place(router, f"running {n}", turn, "home", 2.0)
        router.apply(SeqPrefilled(f"running {n}"), 2.0)
    router.speeds.prefill_rate = 400 * BLOCK / 3.0
    context = sequence(*range(9000, 9400))
    held = overlaps({"home": (400,)})
    decision = router.decide(request("next", context), held, 2.0)
    assert decision.chosen.instance == "home"
    assert decision.note == "waits about 0.8 s for memory"
    router.speeds.prefill_rate *= 100
    assert router.decide(request("next", context), held, 2.0).chosen.instance == "idle"


def test_blocks_that_active_requests_share_count_once() -> None:
    router = core("a", "b")
    place(router, "1", TEN, "a")
    place(router, "2", sequence(*range(6), 77, 78), "a")
    assert router.table.active_blocks[router.table.slot("a", 0)] == 12
    router.apply(SeqFree("1"), 0.0)
    assert router.table.active_blocks[router.table.slot("a", 0)] == 8
    router.apply(SeqPrefilled("2"), 0.0)
    # On a, 6 of 7 blocks are active already.
    assert costs(router.decide(request("3", sequence(*range(6), 9)), None, 0.0)) == {
        "a": 7 + 8 + 1.0,
        "b": 14.0,
    }


def test_output_growth_is_weighted_by_progress() -> None:
    router = core("a")
    decision = router.decide(request("1", TEN), None, 0.0)
    (add,) = router.commit(decision, 0.0)
    slot = router.table.slot("a", 0)
    router.apply(SeqProgress("1", 4 * BLOCK), 0.0)
    assert router.table.active_blocks[slot] == 14  # the expected length is unknown
    router.apply(SeqFree("1"), 0.0)
    router.apply(msgspec.structs.replace(add, osl=8 * BLOCK), 0.0)
    for generated, blocks in ((2, 1.5), (4, 2.0), (6, 1.5), (8, 0.0), (12, 0.0)):
        router.apply(SeqProgress("1", generated * BLOCK), 0.0)
        assert router.table.active_blocks[slot] == 10 + blocks


def test_a_partial_block_is_prefilled_and_held() -> None:
    router = core("a")
    decision = router.decide(request("1", TEN, tokens=10 * BLOCK + 4), None, 0.0)
    assert decision.chosen.cost == 10.25 + 11
    router.commit(decision, 0.0)
    slot = router.table.slot("a", 0)
    assert router.table.active_blocks[slot] == 11
    assert router.table.prefill_tokens[slot] == 164


def test_a_request_without_events_is_given_up() -> None:
    router = core("a", sequence_ttl_s=30.0)
    place(router, "1", TEN, "a", now=0.0)
    router.apply(SeqProgress("1", 1), 10.0)
    place(router, "2", TEN, "a", now=20.0)
    assert router.expire(39.0) == []
    assert router.expire(45.0) == ["1"]
    assert router.expire(50.0) == ["2"]
    slot = router.table.slot("a", 0)
    assert router.table.requests[slot] == router.table.active_blocks[slot] == 0


def report(
    router: RouterCore,
    now: float,
    blocks: int,
    tokens: int,
    running: int = 1,
    waiting: int = 0,
    total: int = 1024,
    load_ratio: float = 0.0,
) -> None:
    """A load report of engine a."""
    load = Load(
        instance="a", rank=0, running=running, waiting=waiting, active_blocks=blocks,
        cached_blocks=0,
        total_blocks=total, prefill_tokens=tokens, steps=0, prompt_tokens=0, cached_tokens=0,
        output_tokens=0, requests=3, load_ratio=load_ratio,
    )  # fmt: skip
    router.apply_load(load, now)


def test_the_capacity_is_that_of_the_engines_report() -> None:
    router = core("a", "b")
    place(router, "1", sequence(*range(100, 1070)), "a")
    probe = request("2", TEN)
    found = costs(router.decide(probe, None, 0.0))
    assert found["a"] > SHORTAGE_COST > found["b"]
    report(router, 0.0, 970, 970 * BLOCK, total=2048)
    assert costs(router.decide(probe, None, 0.0))["a"] == 970 + 10 + 970 + 10


def seen(router: RouterCore, now: float = 0.0) -> tuple[float, float]:
    """Prefill and decode blocks on a, without the one block of the probe."""
    decision = router.decide(request("probe", sequence(99)), None, now)
    (candidate,) = (c for c in decision.candidates if c.instance == "a")
    return candidate.prefill, candidate.decode - 1


def test_untracked_load_of_an_engine_is_added() -> None:
    router = core("a", "b")
    place(router, "1", TEN, "a")
    assert seen(router) == (10, 10)
    report(router, 0.0, blocks=25, tokens=400)
    assert seen(router) == (25, 25)
    router.apply(SeqFree("1"), 0.1)
    report(router, 0.1, blocks=15, tokens=240)
    assert seen(router) == (15, 15)


def test_requests_waiting_in_the_engine_still_count() -> None:
    router = core("a", "b")
    place(router, "1", TEN, "a")
    for tenth in range(50):
        report(router, tenth / 10, blocks=0, tokens=160, waiting=1)
    assert seen(router) == (10, 10)
    for tenth in range(50, 100):
        report(router, tenth / 10, blocks=0, tokens=0, waiting=1)
    assert seen(router) == (10, 10), "an engine that does not count prefill tokens"
    for tenth in range(100, 170):
        report(router, tenth / 10, blocks=10, tokens=64)
    assert seen(router) == (4, 10), "half computed"


def test_requests_in_flight_to_the_engine_still_count() -> None:
    router = core("a", "b")
    for now in range(20):  # each report comes before the last placement has arrived
        place(router, str(now), sequence(now, *range(9)), "a", now=now / 2)
        report(router, now / 2, blocks=10 * now, tokens=0)
        router.apply(SeqPrefilled(str(now)), now / 2)
        assert seen(router)[1] >= 10 * now


def test_requests_that_never_reach_the_engine_count_for_one_window() -> None:
    router = core("a", "b")
    place(router, "lost", TEN, "a")
    for tenth in range(30):
        report(router, tenth / 10, blocks=0, tokens=0)
        assert seen(router) == (10, 10)
    report(router, 3.0, blocks=0, tokens=0)
    assert seen(router) == (0, 0)
    place(router, "new", sequence(*range(50, 54)), "a", now=3.1)
    report(router, 3.2, blocks=0, tokens=0)
    assert seen(router) == (4, 4)
    report(router, 3.3, blocks=4, tokens=64)
    assert seen(router) == (4, 4)
    router.apply(SeqFree("lost"), 3.4)
    report(router, 3.5, blocks=4, tokens=64)
    assert seen(router) == (4, 4)


def test_requests_lost_by_an_idle_engine_are_dropped_after_a_grace() -> None:
    router = core("a", "b")
    place(router, "1", TEN, "a", now=0.0)
    place(router, "2", TEN, "a", now=10.0)
    place(router, "3", TEN, "b", now=0.0)
    counts = []
    for now in (14.0, 16.0, 26.0):
        report(router, now, blocks=0, tokens=0, running=0)
        counts.append([int(n) for n in router.table.requests[:2]])
    assert counts == [[2, 1], [1, 1], [0, 1]]


def test_repeated_and_unknown_events_change_nothing() -> None:
    router = core("a", "b")
    decision = router.decide(request("1", TEN), None, 0.0)
    (add,) = router.commit(decision, 0.0)
    before = router.table.active_blocks.copy()
    router.apply(add, 1.0)
    router.apply(SeqFree("nobody"), 1.0)
    router.apply(SeqProgress("nobody", 5), 1.0)
    assert (router.table.active_blocks == before).all()


def test_a_migrated_request_counts_on_its_new_rank() -> None:
    router = core("a", "b")
    place(router, "1", TEN, "a")
    place(router, "1", TEN, "b")
    table = router.table
    assert [table.requests[table.slot(name, 0)] for name in "ab"] == [0, 1]
    router.apply(SeqFree("1"), 0.0)
    assert [table.requests[table.slot(name, 0)] for name in "ab"] == [0, 0]


def test_load_on_a_worker_outlives_its_card_until_freed() -> None:
    router = core("a", "b")
    place(router, "1", TEN, "a")
    router.leave("a")
    assert router.decide(request("2", TEN), None, 0.0).chosen.instance == "b"
    router.join(worker("a"))
    assert router.table.requests[router.table.slot("a", 0)] == 1
    router.leave("a")
    router.apply(SeqFree("1"), 0.0)
    router.join(worker("c"))
    assert router.table.size == 2, "the slot of a is used again"


@pytest.mark.parametrize(
    ("placement", "expected"),
    [
        (Placement(), {"a", "b", "c"}),
        (Placement(exclude=["a"]), {"b", "c"}),
        (Placement(allow=["a", "b"], exclude=["a"]), {"b"}),
        (Placement(instance="c"), {"c"}),
        (Placement(labels={"zone": "1"}), {"a"}),
    ],
)
def test_constraints_bind_before_the_score(placement: Placement, expected: set[str]) -> None:
    router = core("b", "c")
    router.join(worker("a", labels={"zone": "1"}))
    router.join(worker("draining", draining=True))
    decision = router.decide(request("1", TEN, placement=placement), None, 0.0)
    assert set(costs(decision)) == expected


def test_a_rank_can_be_pinned_and_each_rank_is_a_candidate() -> None:
    router = core()
    router.join(worker("a", ranks=4))
    assert router.decide(request("1", TEN), None, 0.0).eligible == 4
    pinned = Placement(instance="a", rank=2)
    assert router.decide(request("1", TEN, placement=pinned), None, 0.0).chosen.rank == 2


def test_adapters_run_only_where_they_are_loaded() -> None:
    router = core("a")
    router.join(worker("b", adapters=["x"]))
    assert router.decide(request("1", TEN, adapter="x"), None, 0.0).chosen.instance == "b"
    with pytest.raises(NoWorkers, match="adapter 'y'"):
        router.decide(request("1", TEN, adapter="y"), None, 0.0)


@pytest.mark.parametrize(
    ("cards", "placement", "reason"),
    [
        ([], Placement(), "no worker serves"),
        ([worker("a", draining=True)], Placement(), "draining"),
        ([worker("a")], Placement(exclude=["a"]), "`exclude` leaves no worker"),
        ([worker("a-1")], Placement(instance="a-2"), "did you mean a-1?"),
        ([worker("a-1")], Placement(rank=9), "no worker has the rank 9; ranks are 0 to"),
        ([worker("a-1")], Placement(labels={"zone": "a"}), "no worker has the label zone=a"),
        ([worker("a-1")], Placement(allow=["b"]), "none of the instances that `allow` lists"),
        ([worker("a", draining=True), worker("b")], Placement(allow=["a"]), "is draining"),
    ],
)
def test_no_worker_is_refused_with_the_reason(
    cards: list[object], placement: Placement, reason: str
) -> None:
    router = core()
    for card in cards:
        router.join(card)  # type: ignore[arg-type]
    with pytest.raises(NoWorkers, match=reason) as raised:
        router.decide(request("1", TEN, placement=placement), None, 0.0)
    assert raised.value.refusal.unmet == (placement != Placement() and "draining" not in reason)


@pytest.mark.parametrize(
    "changes",
    [
        {"tokens": 0},
        {"tokens": 100},
        {"deadline_s": float("nan")},
        {"deadline_s": 0.0},
        {"hints": Hints(latency_sensitivity=float("nan"))},
        {"placement": Placement(prefer={"a=b": float("inf")})},
        {"policy": "fastest"},
        {"overrides": {"temperature": float("nan")}},
        {"overrides": {"prefill_weight": -1.0}},
        {"overrides": {"charm": 1.0}},
    ],
)
def test_bad_requests_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidRouteRequest):
        core("a").decide(request("1", TEN, **changes), None, 0.0)


def test_ties_are_broken_at_random() -> None:
    router = core(*"abcd")
    chosen = {router.decide(request("1", TEN), None, 0.0).chosen.instance for _ in range(100)}
    assert chosen == set("abcd")


def test_a_temperature_samples_by_cost() -> None:
    router = core("a", "b", temperature=1.0)
    held = overlaps({"a": (10,)})
    chosen = [router.decide(request("1", TEN), held, 0.0).chosen.instance for _ in range(2000)]
    # softmax over negated normalised costs 0 and 1: 1 / (1 + e^-1) = 0.731
    assert chosen.count("a") == pytest.approx(1462, abs=80)


def test_round_robin_takes_turns_and_survives_changes() -> None:
    router = core("a", "b", "c", policy="round-robin")
    turn = [router.decide(request("1", TEN), None, 0.0).chosen.instance for _ in range(6)]
    assert turn == ["a", "b", "c", "a", "b", "c"]
    router.leave("a")
    assert router.decide(request("1", TEN), None, 0.0).chosen.instance == "b"


def test_overlaps_of_unknown_ranks_are_ignored() -> None:
    router = core("a")
    decision = router.decide(request("1", TEN), overlaps({"gone": (9,), "a": (3,)}), 0.0)
    assert decision.chosen.overlap == [3, 0, 0, 0]
    assert router.decide(request("1", TEN), Overlaps([], b""), 0.0).chosen.overlap == [0] * 4


def test_of_many_candidates_the_cheapest_are_shown() -> None:
    router = core(*(f"w{i}" for i in range(40)))
    held = overlaps({"w7": (5,), "w9": (4,)})
    decision = router.decide(request("1", TEN), held, 0.0)
    assert decision.eligible == 40
    assert len(decision.candidates) == 16
    assert [c.instance for c in decision.candidates[:2]] == ["w7", "w9"]


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["place", "prefilled", "progress", "free", "expire", "leave", "join"]),
        st.integers(0, 8),
        st.integers(0, 40),
    ),
    max_size=80,
)


@given(EVENTS)
def test_load_is_conserved_under_any_events(events: list[tuple[str, int, int]]) -> None:
    router = core("a", "b", sequence_ttl_s=20.0, predicted_ttl_s=5.0)
    now = 0.0
    for kind, number, size in events:
        name, instance = str(number), "ab"[number % 2]
        now += size / 10
        match kind:
            case "place" if instance in router.table.cards:
                place(router, name, sequence(*range(number % 3, number + size + 3)), instance, now)
            case "prefilled":
                router.apply(SeqPrefilled(name), now)
            case "progress":
                router.apply(SeqProgress(name, size), now)
            case "free":
                router.apply(SeqFree(name), now)
            case "expire":
                router.expire(now)
            case "leave":
                router.leave(instance)
            case "join":
                router.join(worker(instance))
        table = router.table
        assert table.requests.sum() == len(router.active)
        assert (table.requests >= 0).all()
        assert (table.prefill_tokens >= 0).all()
        assert (table.active_blocks >= -1e-9).all()
    router.expire(now + 1000)
    assert len(router.active) == 0
    for column in (router.table.requests, router.table.prefill_tokens, router.table.active_blocks):
        assert not column.any()


def test_requests_of_a_departed_worker_are_dropped_after_a_grace() -> None:
    router = core("a", "b")
    for number in range(4):
        router.commit(router.decide(request(str(number), TEN), None, 0.0), 0.0)
    router.expire(1.0)
    router.leave("a")
    router.expire(2.0)
    assert len(router.active) == 4, "it may come back"
    assert router.expire(20.0) == []
    assert len(router.active) == 2
    assert [slot for slot in router.table.slot_of if slot[0] == "a"] == []


def test_requests_of_a_returning_worker_still_count() -> None:
    router = core("a")
    router.commit(router.decide(request("1", TEN), None, 0.0), 0.0)
    router.leave("a")
    router.expire(2.0)
    router.join(worker("a"))
    router.expire(20.0)
    assert len(router.active) == 1
