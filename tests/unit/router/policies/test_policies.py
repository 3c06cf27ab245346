"""Formula and behaviour of each policy on small cases computed by hand."""

import dataclasses
import logging
import sys
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from support.routing import overlaps, request, sequence, worker

from kvmesh.bus.messages import (
    Decision,
    Hints,
    Outcome,
    Placement,
    SeqFree,
    SeqPrefilled,
    Thresholds,
)
from kvmesh.router.errors import InvalidRouteRequest, NoWorkers, RouterConfigError, RouterOverloaded
from kvmesh.router.placement.router import RouterCore
from kvmesh.router.policies import registry
from kvmesh.router.policies.base import Policy
from kvmesh.router.policies.registry import BUILT_IN, make_policy
from kvmesh.router.scoring.candidates import Candidates, PolicyChoice
from kvmesh.router.scoring.cost import SHORTAGE_COST, CostModel, pick
from kvmesh.router.state.rank_table import USABLE_SHARE
from kvmesh.settings.schema import RouterSettings

TEN = sequence(*range(10))


def core(*names: str, **settings: Any) -> RouterCore:
    plain = {"predicted_ttl_s": 0.0, "prefill_weight": 1.0}
    router = RouterCore("m", "r", RouterSettings(**{**plain, **settings}), Random(7))
    for name in names:
        router.join(worker(name))
    return router


def candidates(
    overlap: list[int], decode: list[float], prefill: list[float] | None = None, prompt: int = 10
) -> Candidates:
    router = core(*"abcdefgh"[: len(overlap)])
    zeros = np.zeros(len(overlap))
    return Candidates(
        request=request("1", TEN),
        now=0.0,
        prompt=prompt,
        slots=np.arange(len(overlap)),
        overlap=np.array([[o, 0, 0, 0] for o in overlap], np.float64),
        prefill=zeros if prefill is None else np.array(prefill, np.float64),
        decode=np.array(decode, np.float64),
        requests=zeros,
        table=router.table,
        max_decode=max(decode),
    )


def choose(
    name: str, seen: Candidates, model: CostModel | None = None, **settings: Any
) -> PolicyChoice:
    return make_policy(name, RouterSettings(**settings)).choose(
        seen, model or CostModel(prefill_weight=1.0), Random(7)
    )


def place(
    router: RouterCore, name: str, blocks: bytes = TEN, now: float = 0.0, **changes: Any
) -> Decision:
    decision = router.decide(request(name, blocks, **changes), None, now)
    router.commit(decision, now)
    return decision


def test_the_documented_example_of_three_workers() -> None:
    # A prompt of 10 blocks; 2, 5 and 8 are cached, 10, 5 and 9 blocks will decode.
    choice = choose("kv", candidates([2, 5, 8], [10, 5, 9]), CostModel(prefill_weight=3.0))
    assert choice.cost.tolist() == [34, 20, 15]
    assert choice.chosen == 2


@pytest.mark.parametrize(
    ("ratio", "left"), [(0.0, 2.5), (0.2, 2.5), (0.5, 5.0), (2.0, 10.0), (1e9, 10.0)]
)
def test_a_block_of_the_node_saves_what_its_load_takes_less(ratio: float, left: float) -> None:
    seen = candidates([0, 0], [0, 0])
    seen.overlap[0] = [0, 10, 0, 0]
    seen.table.set_load_ratio(0, ratio)
    assert CostModel(prefill_weight=1.0).prefill(seen).tolist() == [left, 10]
    seen.overlap[0] = [10, 0, 0, 0]
    assert CostModel(prefill_weight=1.0).prefill(seen).tolist() == [0, 10]


@pytest.mark.parametrize(
    ("name", "overlap", "decode", "prefill", "cost"),
    [
        ("kv", [0, 10], [10, 30], [0, 0], [20, 30]),
        ("kv", [0, 10], [10, 10], [0, 25], [20, 35]),
        ("kv-multiplicative", [2, 8], [9, 19], [0, 0], [80, 40]),
        ("kv-multiplicative", [2, 10], [9, 99], [0, 0], [80, 0]),
        ("load-aware", [0, 5], [10, 20], [0, 0], [0.5, 0.5]),
        ("load-aware", [0, 6], [10, 10], [0, 10], [0.5, 0.4]),
    ],
)
def test_cost_formulas(
    name: str, overlap: list[int], decode: list[float], prefill: list[float], cost: list[float]
) -> None:
    assert choose(name, candidates(overlap, decode, prefill)).cost.tolist() == pytest.approx(cost)


def test_without_a_weight_the_cost_counts_the_effect_on_others() -> None:
    seen = candidates([4, 4, 4], [97.28, 0, 0], [6, 0, 0])
    seen.requests = np.array([2.0, 0.0, 10.0])
    # 6 uncached blocks count 1 + 2, and 0.3 per active request; a tenth of 972.8 blocks is in use.
    cost = CostModel().cost(seen).tolist()
    assert cost == pytest.approx([6 + 6 * 3.6 + 97.28 * (0.05 + 0.08), 6 * 3, 6 * 6])


def test_slowness_multiplies_own_times_but_no_effect_on_others() -> None:
    seen = candidates([4, 4], [97.28, 97.28], [6, 6])
    seen.requests = np.array([2.0, 2.0])
    alike = CostModel().cost(seen)[0]
    slow = dataclasses.replace(seen, slowness=np.array([4.0, 1.0]), answer=np.array([50.0, 60.0]))
    # 6 blocks before its own 6 count twice, and its answer takes 200 instead of 60 blocks.
    assert CostModel().cost(slow).tolist() == pytest.approx([alike + 12 + 0.4 * 140, alike])
    linear = CostModel(prefill_weight=3.0)
    assert linear.cost(slow).tolist() == pytest.approx((linear.cost(seen) * [4, 1]).tolist())


def test_a_second_copy_of_a_prefix_costs_more_than_a_wait_of_its_length() -> None:
    waits = choose("kv", candidates([10, 0], [10, 10], [29, 0]), CostModel())
    assert waits.chosen == 0
    assert choose("kv", candidates([10, 0], [10, 10], [31, 0]), CostModel()).chosen == 1


def shares_of_a(running: int) -> int:
    """Of 200 prompts with a common prefix, those on rank a of two; so many run at a time."""
    router = core("a", "b", prefill_weight=None)
    common, held, chosen = list(range(8)), set[str](), list[str]()
    for turn in range(200):
        prompt = sequence(*common, 100 + 2 * turn, 101 + 2 * turn)
        known = overlaps(dict.fromkeys(sorted(held), (8,)))
        decision = router.decide(request(str(turn), prompt), known, float(turn))
        router.commit(decision, float(turn))
        router.apply(SeqPrefilled(str(turn)), float(turn))
        router.apply(SeqFree(str(turn - running)), float(turn))
        chosen.append(decision.chosen.instance)
        held.add(decision.chosen.instance)
    return chosen.count("a")


def test_idle_ranks_share_prompts_with_a_common_prefix() -> None:
    assert 80 <= shares_of_a(running=8) <= 120


def test_a_session_alone_stays_where_its_prefix_is() -> None:
    assert shares_of_a(running=0) in (0, 200)


def test_weights_scale_their_terms() -> None:
    seen = candidates([4, 0], [10, 10], [6, 0])
    model = CostModel(prefill_weight=2.0)
    assert model.cost(seen).tolist() == [2 * 12 + 10, 2 * 10 + 10]
    router = core("a", "b", request_weight=3.0)
    place(router, "1", placement=Placement(instance="a"))
    router.apply(SeqFree("1"), 0.0)
    place(router, "2", sequence(1), placement=Placement(instance="a"))
    decision = router.decide(request("3", TEN), None, 0.0)
    costs = {c.instance: c.cost for c in decision.candidates}
    assert costs == {"a": (1 + 10) + (1 + 10) + 3, "b": 20}


def test_credits_decay_with_excess_prefill() -> None:
    seen = candidates([8, 8], [10, 10], [0, 10])
    # On the second, one prompt of backlog more: its credit is halved.
    assert CostModel(credit_decay=1.0).prefill(seen).tolist() == [2, 16]
    assert CostModel().prefill(seen).tolist() == [2, 12]


def test_a_full_rank_comes_after_those_with_free_capacity() -> None:
    # Of 1,024 blocks 972.8 may be used, so what the rank with the whole prompt lacks outweighs it.
    seen = candidates([10, 0, 0], [973.0, 900.0, 950.0])
    choice = choose("kv", seen, CostModel(prefill_weight=3.0))
    assert choice.cost.tolist() == pytest.approx([0.2 * SHORTAGE_COST + 973, 930, 980], abs=1e-3)
    assert choice.chosen == 1
    assert choose("kv", seen, CostModel()).chosen == 1
    full = choose("kv", candidates([10, 0, 0], [1500.0, 1100.0, 1200.0]), CostModel())
    assert full.chosen == 1  # the one that lacks the fewest


def choose_between_waiting_and_computing(decode_s: float, running: float = 800.0) -> PolicyChoice:
    """The first rank has the whole prompt of 300 blocks, and not the memory; the second neither."""
    seen = candidates([300, 0], [300.0 + running, 500.0], prompt=300)
    seen.block_s = 0.01
    if decode_s:
        seen.table.record_decode(decode_s, 100.0)
    return choose("kv", seen, CostModel())


def test_a_short_wait_for_memory_is_cheaper_than_computing_a_prompt() -> None:
    choice = choose_between_waiting_and_computing(8.0)
    # 127.2 of 800 blocks are missing, which running requests free in 1.27 s: the time of 127 blocks
    # of prefill, which count four times.
    assert choice.chosen == 0
    assert choice.note == "waits about 1.3 s for memory"
    decode = 1100 * (0.05 + 0.5)
    assert choice.cost[0] == pytest.approx(decode + 4 * 127.2 / 800 * 8.0 / 0.01, abs=0.1)


def test_a_long_wait_for_memory_is_dearer_than_computing_a_prompt() -> None:
    choice = choose_between_waiting_and_computing(30.0)
    assert (choice.chosen, choice.note) == (1, None)


def test_a_full_rank_comes_last_while_nobody_knows_how_long_requests_generate() -> None:
    choice = choose_between_waiting_and_computing(0.0)
    assert choice.chosen == 1
    assert choice.cost[0] > 127 * SHORTAGE_COST


def test_blocks_that_running_requests_do_not_have_are_not_waited_for() -> None:
    choice = choose_between_waiting_and_computing(1e-3, running=740.0)
    assert choice.chosen == 0
    seen = candidates([1000, 0], [1020.0, 900.0], prompt=1000)
    seen.block_s = 0.01
    seen.table.record_decode(1e-3, 100.0)
    assert choose("kv", seen, CostModel()).chosen == 1


def test_a_request_that_must_wait_anywhere_says_so() -> None:
    choice = choose("kv", candidates([10, 0], [1500.0, 1100.0]), CostModel())
    assert (choice.chosen, choice.note) == (1, "waits for memory")


def test_the_shortage_depends_on_each_ranks_capacity() -> None:
    seen = candidates([10, 0, 0], [600.0, 700.0, 5000.0])
    seen.table.set_capacity(0, 500)
    seen.table.set_capacity(2, 0)  # unknown
    assert seen.shortage is not None
    assert seen.shortage.tolist() == [600 - USABLE_SHARE * 500, 0, 0]
    seen.table.set_capacity(0, 1000)
    seen.table.set_capacity(2, 6000)
    assert seen.shortage is not None
    assert not seen.shortage.any()


def test_the_shortage_is_not_computed_if_no_rank_can_be_short() -> None:
    seen = candidates([10, 0], [900.0, 972.0])
    assert seen.shortage is None
    for slot in range(2):
        seen.table.set_capacity(slot, 0)
    assert seen.table.min_usable_blocks == float("inf")
    assert seen.shortage is None


def test_a_temperature_draws_among_ranks_without_shortage() -> None:
    cost = np.array([10.0, 30.0, 5 * SHORTAGE_COST, 20.0])
    rng = Random(7)
    drawn = Counter(pick(cost, 1.0, rng) for _ in range(400))
    assert drawn[0] > drawn[3] > drawn[1] > 60
    assert drawn[2] == 0
    alone = np.array([5 * SHORTAGE_COST, 10.0, 5 * SHORTAGE_COST])
    assert {pick(alone, 1.0, rng) for _ in range(20)} == {1}


def test_overrides_hold_for_one_request_only() -> None:
    router = core("a", "b")
    held = overlaps({"a": (10,)})
    probe = request("1", TEN, overrides={"overlap_score_credit": 0.0, "prefill_weight": 3.0})
    assert {c.cost for c in router.decide(probe, held, 0.0).candidates} == {40.0}
    assert router.decide(request("2", TEN), held, 0.0).chosen.cost == 10.0


@pytest.mark.parametrize("name", ["overlap_score_weight", "prefill_load_scale", "prefill_weight"])
def test_the_overlap_weight_weighs_prefill_and_keeps_the_better_holder(name: str) -> None:
    router = core("a", "b")
    held = overlaps({"a": (10,), "b": (5,)})
    probe = request("1", TEN, overrides={name: 2.0})
    chosen = Counter(router.decide(probe, held, 0.0).chosen.instance for _ in range(40))
    assert chosen == {"a": 40}
    assert {c.cost for c in router.decide(probe, held, 0.0).candidates} == {10.0, 20.0}


def test_a_credit_above_one_counts_as_one() -> None:
    router = core("a", "b")
    held = overlaps({"a": (10,), "b": (5,)})
    probe = request("1", TEN, overrides={"overlap_score_credit": 2.0})
    chosen = Counter(router.decide(probe, held, 0.0).chosen.instance for _ in range(40))
    assert chosen == {"a": 40}


def test_least_loaded_counts_requests_then_blocks() -> None:
    router = core("a", "b", "c", policy="least-loaded")
    for number, (to, blocks) in enumerate((("a", 4), ("b", 9), ("c", 1), ("c", 1))):
        own = sequence(number, *range(100, 100 + blocks))
        place(router, str(number), own, placement=Placement(instance=to))
    assert router.decide(request("x", TEN), None, 0.0).chosen.instance == "a"


def test_power_of_two_spreads_but_avoids_the_loaded() -> None:
    router = core("a", "b", "c", "d", policy="power-of-two")
    for number in range(5):
        place(router, str(number), placement=Placement(instance="a"))
    chosen = Counter(
        router.decide(request("x", TEN), None, 0.0).chosen.instance for _ in range(300)
    )
    assert chosen["a"] == 0
    assert min(chosen[name] for name in "bcd") > 60


def test_random_is_uniform() -> None:
    router = core("a", "b", policy="random")
    held = overlaps({"a": (10,)})
    chosen = [router.decide(request("x", TEN), held, 0.0).chosen.instance for _ in range(1000)]
    assert 420 < chosen.count("a") < 580


def test_a_request_may_name_another_policy() -> None:
    router = core("a", "b")
    held = overlaps({"a": (10,)})
    turn = [
        router.decide(request("x", TEN, policy="round-robin"), held, 0.0).chosen.instance
        for _ in range(4)
    ]
    assert turn == ["a", "b", "a", "b"]
    with pytest.raises(InvalidRouteRequest, match="not the name of an installed policy"):
        router.decide(request("x", TEN, policy="os:system"), None, 0.0)


# --- predicted prefixes and approximate mode


def test_siblings_of_a_burst_share_a_rank_before_any_event() -> None:
    router = core("a", "b", "c", "d", predicted_ttl_s=1.0)
    first = place(router, "1", now=0.0)
    sibling = sequence(*range(8), 55)
    router.expire(20.0)
    held = router.decide(request("2", sibling), None, 20.0).candidates
    assert {c.instance: c.overlap[0] for c in held}[first.chosen.instance] == 8
    router.apply(SeqPrefilled("1"), 20.0)
    router.expire(20.9)
    assert router.decide(request("2", sibling), None, 20.9).chosen.overlap == [8, 0, 0, 0]
    router.expire(21.1)
    later = router.decide(request("3", sibling), None, 21.1)
    assert {c.overlap[0] for c in later.candidates} == {0}
    assert first.chosen.overlap == [0, 0, 0, 0]


def test_a_burst_forgets_a_request_that_was_never_heard_of_again() -> None:
    router = core("a", "b", predicted_ttl_s=1.0, sequence_ttl_s=60.0)
    place(router, "1", now=0.0)
    router.expire(60.1)
    later = router.decide(request("2", TEN), None, 60.1)
    assert {c.overlap[0] for c in later.candidates} == {0}


def test_predicted_blocks_extend_the_indexs_overlap() -> None:
    router = core("a", predicted_ttl_s=5.0)
    place(router, "1", sequence(*range(6)))
    held = overlaps({"a": (2, 5)})
    assert router.decide(request("2", TEN), held, 1.0).chosen.overlap == [6, 1, 0, 0]


def test_without_kv_events_placed_prompts_count_as_cached() -> None:
    router = core("a", "b", kv_events=False, approximate_ttl_s=120.0)
    first = place(router, "1", now=0.0)
    router.apply(SeqFree("1"), 1.0)
    router.expire(119.0)
    again = router.decide(request("2", TEN), None, 119.0)
    assert (again.chosen.instance, again.chosen.overlap[0]) == (first.chosen.instance, 10)
    router.leave(first.chosen.instance)
    assert router.decide(request("3", TEN), None, 119.0).chosen.overlap[0] == 0


# --- sessions


def session(router: RouterCore, name: str, now: float, **hints: Any) -> Decision:
    return place(router, name, now=now, hints=Hints(**hints))


def add_load(router: RouterCore, instance: str, blocks: int) -> None:
    place(router, f"load-{instance}", sequence(*range(1000, 1000 + blocks)),
          placement=Placement(instance=instance))  # fmt: skip


def test_a_hard_session_stays_whatever_the_load() -> None:
    router = core("a", "b", policy="session", session_mode="hard")
    home = session(router, "1", 0.0, session="s").chosen.instance
    add_load(router, home, 500)
    assert session(router, "2", 1.0, session="s").chosen.instance == home
    router.leave(home)
    assert session(router, "3", 2.0, session="s").chosen.instance != home


def test_a_soft_session_stays_unless_another_rank_is_cheaper_by_the_spill() -> None:
    router = core("a", "b", policy="session", session_mode="soft", session_spill=1.0)
    home = session(router, "1", 0.0, session="s").chosen.instance
    router.apply(SeqFree("1"), 0.0)
    add_load(router, home, 4)  # 8 dearer there, less than the prompt of 10
    stays = session(router, "2", 1.0, session="s")
    assert (stays.chosen.instance, stays.note) == (home, "session affinity")
    router.apply(SeqFree("2"), 1.0)
    router.apply(SeqFree(f"load-{home}"), 1.0)
    add_load(router, home, 6)  # 12 dearer
    leaves = session(router, "3", 2.0, session="s")
    assert (leaves.chosen.instance != home, leaves.note) == (True, "session spilled over")


def test_a_binding_lapses_and_is_refreshed_by_use() -> None:
    router = core("a", "b", policy="session", session_mode="hard", session_ttl_s=10.0)
    home = session(router, "1", 0.0, session="s").chosen.instance
    add_load(router, home, 500)
    assert session(router, "2", 9.0, session="s").chosen.instance == home
    assert session(router, "3", 18.0, session="s").chosen.instance == home
    assert session(router, "4", 40.0, session="s").chosen.instance != home


def test_subagents_start_beside_their_parent_and_a_final_request_unbinds() -> None:
    router = core("a", "b", "c", policy="session", session_mode="hard")
    home = session(router, "1", 0.0, session="lead").chosen.instance
    add_load(router, home, 500)
    child = session(router, "2", 1.0, session="sub", parent_session="lead")
    assert child.chosen.instance == home
    session(router, "3", 2.0, session="lead", session_final=True)
    assert session(router, "4", 3.0, session="lead").chosen.instance != home
    assert session(router, "5", 4.0, session="sub", parent_session="lead").chosen.instance == home


# --- filters that need settings


@pytest.mark.parametrize(
    "limits",
    [Thresholds(blocks=10), Thresholds(blocks_share=10 / 1024), Thresholds(prefill_tokens=160)],
)
def test_a_rank_past_any_busy_threshold_is_left_out(limits: Thresholds) -> None:
    router = core("a", "b")
    router.choice.limits = limits
    home = place(router, "1").chosen.instance
    held = overlaps({home: (10,)})
    assert router.decide(request("2", TEN), held, 0.0).chosen.instance != home
    place(router, "2", sequence(*range(50, 60)))
    with pytest.raises(RouterOverloaded):
        router.decide(request("3", TEN), None, 0.0)
    router.choice.limits = Thresholds()
    assert router.decide(request("3", TEN), held, 0.0).chosen.instance == home


def test_a_taint_excludes_requests_that_do_not_tolerate_it() -> None:
    router = core()
    router.join(worker("spot", labels={"taint.spot": "1"}))
    with pytest.raises(NoWorkers):
        router.decide(request("1", TEN), None, 0.0)
    tolerant = request("1", TEN, placement=Placement(tolerate=["spot"]))
    assert router.decide(tolerant, None, 0.0).chosen.instance == "spot"
    router.join(worker("a"))
    assert router.decide(request("1", TEN), None, 0.0).chosen.instance == "a"


def test_a_preference_scales_the_cost_within_bounds() -> None:
    router = core("a")
    router.join(worker("b", labels={"zone": "1"}))
    probe = request("1", TEN, placement=Placement(prefer={"zone=1": 100.0}))
    costs = {c.instance: c.cost for c in router.decide(probe, None, 0.0).candidates}
    assert costs == pytest.approx({"a": 20.0, "b": 20.0 / np.e})


def test_an_incompatible_worker_is_left_out_until_the_others_leave() -> None:
    router = core("a")
    router.join(worker("b", block_size=32))
    assert router.decide(request("1", TEN), None, 0.0).eligible == 1
    assert "block size 32 differs from 16 of a" in router.table.incompatible["b"]
    router.leave("a")
    assert router.table.block_size == 32
    decision = router.decide(request("1", sequence(1, 2), tokens=64), None, 0.0)
    assert (decision.chosen.instance, router.table.incompatible) == ("b", {})


def test_the_oldest_lease_wins_whenever_it_is_seen() -> None:
    router = core()
    router.join(worker("young", block_size=32, started=2.0))
    router.join(worker("old", started=1.0))
    assert router.decide(request("1", TEN), None, 0.0).chosen.instance == "old"
    assert "young" in router.table.incompatible


# --- disaggregated placement


def test_only_a_long_uncached_prompt_is_disaggregated() -> None:
    router = core(disagg_tokens=100)
    router.join(worker("p1", serves="prefill"))
    router.join(worker("d1", serves="decode"))
    router.join(worker("d2", serves="decode"))
    long = router.decide(request("1", TEN), None, 0.0)
    assert long.prefill is not None
    assert (long.prefill.instance, long.chosen.instance[0]) == ("p1", "d")
    short = router.decide(request("2", sequence(1, 2)), None, 0.0)
    hot = router.decide(request("3", TEN), overlaps({"d2": (9,)}), 0.0)
    assert (short.prefill, hot.prefill, hot.chosen.instance) == (None, None, "d2")


def test_remote_prefill_counts_until_the_first_token() -> None:
    router = core(disagg_tokens=100, disagg_backlog=0.015)
    router.join(worker("p", serves="prefill"))
    router.join(worker("d", serves="decode"))
    decision = router.decide(request("1", TEN), None, 0.0)
    router.commit(decision, 0.0)
    table = router.table
    p, d = table.slot("p", 0), table.slot("d", 0)
    assert (table.prefill_tokens[p], table.prefill_tokens[d]) == (160, 0)
    assert (table.active_blocks[p], table.active_blocks[d]) == (10, 10)
    assert router.decide(request("2", TEN), None, 0.0).prefill is None, "the backlog is too long"
    router.apply(SeqFree("1"), 1.0)
    assert (table.active_blocks[p], table.active_blocks[d]) == (0, 0)


def test_a_rank_that_needs_handoffs_gets_no_prompt_without_one() -> None:
    router = core(disagg_tokens=100, disagg_backlog=0.015)
    router.join(worker("d", serves="decode", needs_handoff=True))
    with pytest.raises(NoWorkers, match="no prefill worker"):
        router.decide(request("1", sequence(1, 2)), None, 0.0)
    router.join(worker("p", serves="prefill"))
    for name in "23":  # short prompts, the second in spite of a backlog
        decision = router.decide(request(name, sequence(1, 2)), None, 0.0)
        assert decision.prefill is not None
        assert (decision.prefill.instance, decision.chosen.instance) == ("p", "d")
        router.commit(decision, 0.0)
    router.join(worker("a"))
    hot = router.decide(request("4", TEN), overlaps({"a": (9,)}), 0.0)
    assert (hot.prefill, hot.chosen.instance) == (None, "a")


def test_a_worker_with_a_changed_role_keeps_its_load_and_its_requests() -> None:
    router = core("a", "b", disagg_tokens=100)
    assert router.decide(request("0", TEN), None, 0.0).prefill is None
    router.commit(router.decide(request("1", TEN), None, 0.0), 0.0)
    router.commit(router.decide(request("2", TEN), None, 0.0), 0.0)
    table = router.table
    slots = {name: table.slot(name, 0) for name in "ab"}
    tokens, blocks = table.prefill_tokens.tolist(), table.active_blocks.tolist()
    assert sorted(tokens[:2]) == [160, 160]

    router.join(worker("a", serves="prefill"))
    assert table.eligible(Placement(), None, "all").tolist() == [slots["b"]]
    assert router.decide(request("3", TEN), None, 0.0).chosen.instance == "b"
    router.join(worker("b", serves="decode"))
    split = router.decide(request("4", TEN), None, 0.0)
    assert split.prefill is not None
    assert (split.prefill.instance, split.chosen.instance) == ("a", "b")
    assert {name: table.slot(name, 0) for name in "ab"} == slots
    assert (table.prefill_tokens.tolist(), table.active_blocks.tolist()) == (tokens, blocks)

    for name in "ab":
        router.join(worker(name))
    assert not table.disaggregated
    assert router.decide(request("5", TEN), None, 0.0).prefill is None
    for name in "12":
        router.apply(SeqFree(name), 1.0)
    assert not table.active_blocks.any()


# --- foreign policies


class RaisingPolicy(Policy):
    def choose(self, candidates: Candidates, model: CostModel, rng: Random) -> PolicyChoice:
        raise RuntimeError("no idea")


class OutOfRangePolicy(Policy):
    def choose(self, candidates: Candidates, model: CostModel, rng: Random) -> PolicyChoice:
        return PolicyChoice(99, np.zeros(len(candidates)))


class ShortCostsPolicy(Policy):
    """Returns the cost of the chosen candidate only."""

    def choose(self, candidates: Candidates, model: CostModel, rng: Random) -> PolicyChoice:
        return PolicyChoice(0, np.zeros(1))


class ListCostsPolicy(Policy):
    """Returns costs as a list."""

    def choose(self, candidates: Candidates, model: CostModel, rng: Random) -> PolicyChoice:
        return PolicyChoice(1, [3, 2])  # type: ignore[arg-type]


def test_costs_may_be_a_plain_list() -> None:
    router = core("a", "b", policy=f"{__name__}:ListCostsPolicy")
    decision = router.decide(request("1", TEN), None, 0.0)
    assert (decision.chosen.instance, decision.chosen.cost, decision.note) == ("b", 2.0, None)
    assert not router.policies.failures


@pytest.mark.parametrize("policy", [RaisingPolicy, OutOfRangePolicy, ShortCostsPolicy])
def test_a_failing_policy_falls_back_is_counted_and_logged_once(
    policy: type[Policy], caplog: pytest.LogCaptureFixture
) -> None:
    name = f"{__name__}:{policy.__name__}"
    router = core("a", "b", policy=name)
    held = overlaps({"b": (10,)})
    with caplog.at_level(logging.ERROR):
        decisions = [router.decide(request("1", TEN), held, 0.0) for _ in range(3)]
    assert {d.chosen.instance for d in decisions} == {"b"}
    assert "kv in place of" in (decisions[0].note or "")
    assert router.policies.failures[name] == 3
    assert len([r for r in caplog.records if "failed" in r.message]) == 1


@pytest.mark.parametrize(
    "name", ["fastest", "kvmesh.nowhere:X", "json:nothing", "json:JSONDecoder"]
)
def test_an_unknown_policy_is_refused_at_start(name: str) -> None:
    with pytest.raises(RouterConfigError, match="policy"):
        make_policy(name, RouterSettings())


@pytest.mark.parametrize(
    ("code", "cause"),
    [
        ("class P(", "SyntaxError"),
        ("import no_such_module", "No module named 'no_such_module'"),
        ("rate = 1 / 0", r"ZeroDivisionError: .*broken_policies.py:1\)"),
        ("class P:\n  def __init__(self):\n    self.x = y", r"NameError: .*broken_policies.py:3\)"),
        ("class P:\n  def __init__(self, beta):\n    pass", "missing .* 'beta'"),
    ],
)
def test_a_policy_that_fails_to_load_is_refused_with_its_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, cause: str
) -> None:
    (tmp_path / "broken_policies.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "broken_policies", raising=False)
    with pytest.raises(RouterConfigError, match=cause):
        make_policy("broken_policies:P", RouterSettings())


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_every_policy_chooses_an_eligible_rank(name: str) -> None:
    router = core("a", "b", "c", policy=name)
    for number in range(30):
        decision = router.decide(request(str(number), TEN, hints=Hints(session="s")), None, 0.0)
        router.commit(decision, float(number))
        assert decision.chosen.instance in "abc"
        router.apply_route_event(
            Outcome(request=str(number), instance=decision.chosen.instance, time=float(number),
                    cached_tokens=0, output_tokens=9, ttft_s=0.1, total_s=0.5, finish="stop"),
            float(number),
        )  # fmt: skip
    alone = router.decide(request("x", TEN, placement=Placement(exclude=["a", "b"])), None, 31.0)
    assert alone.chosen.instance == "c"


def test_an_installed_policy_is_found_by_its_entry_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "other-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    entry_point = f"astray = {__name__}:OutOfRangePolicy"
    (info / "entry_points.txt").write_text(f"[kvmesh.policies]\n{entry_point}\n")
    monkeypatch.syspath_prepend(tmp_path)
    registry._entry_points.cache_clear()
    assert type(make_policy("astray", RouterSettings())).__name__ == "OutOfRangePolicy"
    router = core("a")
    assert router.decide(request("1", TEN, policy="astray"), None, 0.0).policy == "astray"
    with pytest.raises(RouterConfigError, match="astray"):
        make_policy("nonsense", RouterSettings())
    registry._entry_points.cache_clear()


def test_entry_points_are_read_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks = 0

    def look() -> dict[str, str]:
        nonlocal looks
        looks += 1
        return {}

    monkeypatch.setattr(registry, "installed", look)
    registry._entry_points.cache_clear()
    router = core("a")
    for number in range(5):
        with pytest.raises(InvalidRouteRequest):
            router.decide(request("1", TEN, policy=f"nobody's {number}"), None, 0.0)
    assert looks == 1
    registry._entry_points.cache_clear()
