"""Requests of one instant: placed together, then sent to each rank in turn."""

from random import Random
from typing import Any

import pytest
from msgspec.structs import replace
from support.routing import BLOCK, overlaps, request, sequence, worker

from kvmesh.bus.messages import (
    Decision,
    Hints,
    Load,
    Placement,
    Refused,
    RouteRequest,
    SeqAdd,
    SeqFree,
    SeqPrefilled,
    SeqWait,
)
from kvmesh.placement_rules.holding import HOLD_S
from kvmesh.router.placement.router import RouterCore
from kvmesh.router.scoring.overlaps import Overlaps
from kvmesh.router.waiting.gathering import MOST_GATHERED
from kvmesh.router.waiting.queue import PlacementQueue, QueueActions
from kvmesh.router.waiting.ticket import Ticket
from kvmesh.settings.schema import RouterSettings

STEP = 100 * BLOCK
SOON = 0.001


def queue(*names: str, **settings: Any) -> PlacementQueue:
    """A queue over workers whose step is a hundred blocks."""
    options = {"predicted_ttl_s": 0.0, "gather_s": SOON, **settings}
    core = RouterCore("m", "r", RouterSettings(**options), Random(7))
    for name in names or ("a",):
        core.join(worker(name, step=STEP))
    return PlacementQueue(core, "r")


def load(instance: str, **changes: Any) -> Load:
    """The report of a rank's counters, with some fields set."""
    fields: dict[str, Any] = {
        "instance": instance,
        "rank": 0,
        "running": 40,
        "waiting": 0,
        "active_blocks": 100,
        "cached_blocks": 0,
        "total_blocks": 1024,
        "prefill_tokens": 0,
        "prompt_tokens": 0,
        "cached_tokens": 0,
        "requests": 1,
    }
    return Load(**(fields | changes))


def prompt(name: str, blocks: int, **hints: Any) -> RouteRequest:
    own = int.from_bytes(name.encode(), "little") * 100_000
    hashes = sequence(*range(own, own + blocks))
    return request(name, hashes, hints=Hints(**hints), deadline_s=60.0)


def submit(
    queue: PlacementQueue, message: RouteRequest, now: float, found: Overlaps | None = None
) -> Ticket:
    """Submit a request; it must be gathering afterwards."""
    ticket = Ticket(message, now, overlaps=found)
    assert queue.submit(ticket, now) == QueueActions()
    assert queue.gathering
    return ticket


def names(actions: QueueActions) -> list[str]:
    """The requests that were sent, in order."""
    assert [e.request for e in actions.events if type(e) is SeqAdd] == [
        ticket.request.request for ticket in actions.done
    ]
    return [ticket.request.request for ticket in actions.done]


def place(queue: PlacementQueue, sizes: dict[str, int], now: float = 0.0) -> QueueActions:
    for name, blocks in sizes.items():
        submit(queue, prompt(name, blocks), now)
    return queue.place_gathered(now + SOON)


def first_token(queue: PlacementQueue, name: str, now: float) -> list[str]:
    queue.apply(SeqPrefilled(name), now)
    return names(queue.place_ready(now))


def test_a_rank_gets_the_shortest_prompt_first_and_one_at_a_time() -> None:
    one = queue()
    actions = place(one, {"long": 90, "short": 40, "mid": 60})
    assert names(actions) == ["short"]
    assert [ticket.request.request for ticket in actions.parked] == ["long", "mid"]
    assert one.waiting == 2
    assert one.waiting_tokens == 150 * BLOCK
    assert names(one.place_ready(0.1)) == []
    assert first_token(one, "short", 0.2) == ["mid"]
    assert first_token(one, "mid", 0.4) == ["long"]
    assert one.waiting == 0


def test_what_waited_in_the_router_is_part_of_the_decisions_wait() -> None:
    one = queue()
    submit(one, prompt("x", 40), 0.0)
    late = submit(one, prompt("y", 90), 0.0)
    one.place_gathered(SOON)
    first_token(one, "x", 0.5)
    assert isinstance(late.result, Decision)
    assert late.result.time == pytest.approx(0.5)
    assert late.result.wait_s == pytest.approx(0.5)


def test_routers_learn_the_speed_of_a_rank_from_when_it_got_a_prompt() -> None:
    """Else the time for which a router holds prompts would make the ranks look slow."""
    one, replica = queue(), queue()
    slot = replica.core.table.slot("a", 0)

    def computed(name: str, now: float) -> None:
        actions = one.place_ready(now)
        for event in (*actions.events, SeqPrefilled(name)):
            for each in (one, replica):
                each.apply(event, now)

    for event in place(one, {"x": 50, "y": 60, "z": 90}).events:
        replica.apply(event, SOON)
    computed("x", SOON + 0.5)
    computed("y", 1.7)
    computed("", 1.7)
    computed("z", 1.7 + 0.9)
    for each in (one, replica):
        assert each.core.prefills.token_s(slot) == pytest.approx(0.01 / BLOCK, rel=0.15)


def test_short_prompts_share_a_step() -> None:
    """Of 12 · 4 blocks √(48 · 12.5) ≈ 24 are sent at a time: six prompts."""
    one = queue()
    sent = names(place(one, {f"p{number}": 4 for number in range(12)}))
    assert len(sent) == 6


def decode(queue: PlacementQueue, seconds: int) -> None:
    """Both ranks report steps of 50 ms for so long, whether they compute prompts or not."""
    speeds = queue.core.speeds
    for second in range(seconds):
        for slot, name in enumerate("ab"):
            work = {"steps": 20 * second, "busy_s": float(second), "output_tokens": 800 * second}
            computed = 4000 * (second // 2)
            report = load(name, prefill_steps=second // 2, computed_tokens=computed, **work)
            speeds.observe(slot, report, float(second))
        speeds.update(float(second), 2)


def test_more_prompts_share_a_step_where_decoding_makes_steps_long() -> None:
    sent = {}
    for seconds in (0, 20):
        two = queue("a", "b")
        decode(two, seconds)
        for number in range(20):
            names(place(two, {f"d{number}": 1}, float(number)))
            first_token(two, f"d{number}", number + 0.5)
        sent[seconds] = len(names(place(two, {f"p{number}": 4 for number in range(24)}, 30.0)))
    assert sent[0] == 12
    assert sent[20] >= 18


def test_the_prompt_with_the_longest_cached_prefix_chooses_first() -> None:
    two = queue("a", "b")
    fresh = submit(two, prompt("fresh", 80), 0.0)
    cached = submit(two, prompt("cached", 80), 0.0, overlaps({"a": (70,)}))
    two.place_gathered(SOON)
    assert isinstance(cached.result, Decision)
    assert isinstance(fresh.result, Decision)
    assert cached.result.chosen.instance == "a"
    assert fresh.result.chosen.instance == "b"


def test_a_prompt_of_a_higher_tier_chooses_first() -> None:
    two = queue("a", "b")
    held = overlaps({"a": (70,)})
    low = submit(two, prompt("low", 80), 0.0, held)
    high = submit(two, prompt("high", 80, strict_priority=1), 0.0, overlaps({"a": (60,)}))
    two.place_gathered(SOON)
    assert isinstance(high.result, Decision)
    assert high.result.chosen.instance == "a"
    assert high.result.chosen.prefill == 0
    assert low.result is None, "it has less to compute, and yet comes later"


def test_a_held_prompt_is_sent_after_a_while_in_any_case() -> None:
    one = queue()
    place(one, {"x": 40, "y": 90})
    assert names(one.place_ready(HOLD_S)) == []
    assert names(one.place_ready(SOON + HOLD_S)) == ["y"]


@pytest.mark.parametrize(
    ("hints", "order"),
    [({"strict_priority": 1}, "fcfs"), ({"priority": 100}, "fcfs"), ({}, "wspt")],
)
def test_prompts_that_go_first_delay_a_held_one_by_a_bounded_time(
    hints: dict[str, Any], order: str
) -> None:
    """Every rank has one to compute, and the router another that goes first, all the time."""
    one = queue(queue_order=order)
    low = submit(one, prompt("low", 60), 0.0)
    for name in ("h0", "h1", "h2"):
        submit(one, prompt(name, 40, **hints), 0.0)
    running = names(one.place_gathered(0.0))
    now = 0.0
    while low.result is None and now < 4 * HOLD_S:
        now += HOLD_S / 4
        submit(one, prompt(f"h{now}", 40, **hints), now)
        running += names(one.place_gathered(now)) + first_token(one, running.pop(0), now)
    assert isinstance(low.result, Decision)
    assert now == pytest.approx(HOLD_S, abs=HOLD_S / 4)


def test_the_event_of_an_earlier_placement_does_not_lose_a_held_prompt() -> None:
    """Its reply was lost with a connection, and the sender repeats the request."""
    one = queue()
    place(one, {"x": 40, "y": 90})
    hashes = prompt("y", 90).sequence_hashes
    one.apply(SeqAdd("y", "a", 0, hashes, 90 * BLOCK, 0, 0, 0.0), 0.1)
    assert one.waiting == 1
    assert first_token(one, "x", 0.2) == ["y"]
    assert one.core.table.held_tokens[0] == 0


def test_half_the_deadline_bounds_the_wait() -> None:
    one = queue()
    submit(one, prompt("x", 40), 0.0)
    submit(one, replace(prompt("y", 90), deadline_s=1.0), 0.0)
    one.place_gathered(0.0)
    assert names(one.place_ready(0.5)) == ["y"]


def test_long_prompts_are_not_overtaken_for_ever() -> None:
    one = queue()
    place(one, {"first": 40, "long": 95})
    now = 0.0
    for number in range(200):
        now += 0.01
        submit(one, prompt(f"s{number}", 20), now)
        sent = names(one.place_gathered(now))
        running = "first" if not number else f"s{number - 1}"
        sent += first_token(one, running, now)
        if "long" in sent:
            break
    assert now < 0.5


def test_held_prompts_count_as_load_but_not_as_unreported() -> None:
    """The router does not take its load for lost because the engine does not report held ones."""
    one = queue()
    place(one, {"x": 40, "y": 90})
    table = one.core.table
    assert table.prefill_tokens[0] == 130 * BLOCK
    for second in range(8):
        report = Load(
            instance="a", rank=0, running=1, waiting=0, active_blocks=40, cached_blocks=0,
            total_blocks=1024, prefill_tokens=40 * BLOCK, steps=0,
            prompt_tokens=0, cached_tokens=0, output_tokens=0, requests=1,
        )  # fmt: skip
        one.core.apply_load(report, float(second))
    assert table.correction_tokens[0] == 0
    assert table.correction_blocks[0] == 0


def test_a_freed_request_is_neither_placed_nor_sent() -> None:
    one = queue()
    submit(one, prompt("gone", 10), 0.0)
    one.apply(SeqFree("gone"), 0.0)
    assert not one.gathering
    place(one, {"x": 40, "y": 90})
    one.apply(SeqFree("y"), 0.1)
    assert one.waiting == 0
    assert one.core.table.prefill_tokens[0] == 40 * BLOCK
    assert first_token(one, "x", 0.2) == []


def test_prompts_held_for_a_lost_worker_go_to_another() -> None:
    two = queue("a", "b")
    pinned = Placement(instance="a")
    submit(two, replace(prompt("x", 40), placement=pinned), 0.0)
    ticket = submit(two, replace(prompt("y", 90), placement=Placement(prefer={})), 0.0)
    submit(two, replace(prompt("z", 95), placement=pinned), 0.0)
    two.place_gathered(0.0)
    two.core.leave("a")
    actions = two.place_ready(0.1)
    assert ticket.result is not None
    refused = [t for t in actions.done if isinstance(t.result, Refused)]
    assert [t.request.request for t in refused] == ["z"]


def test_an_engine_that_loads_blocks_has_time_for_others() -> None:
    """The prompt that loads is sent at once, and the next one is not held because of it."""
    one = queue()
    submit(one, prompt("loads", 90), 0.0, overlaps({"a": (0, 80)}))
    assert names(one.place_gathered(0.0)) == ["loads"]
    assert names(place(one, {"x": 90}, 0.1)) == ["x"]
    one.apply(SeqPrefilled("loads"), 0.2)
    assert names(place(one, {"y": 90}, 0.2)) == []


def test_a_burst_does_not_pass_the_queue() -> None:
    """Requests above the threshold wait in fair order: other tenants come between."""
    one = queue()
    for number in range(20):
        submit(one, prompt(f"p{number}", 90, tenant="crowd"), 0.0)
    actions = one.place_gathered(SOON)
    for event in actions.events:
        one.apply(event, SOON)
    assert one.core.table.prefill_tokens[0] <= 3 * STEP
    other = Ticket(prompt("other", 90, tenant="other"), 0.1)
    for event in one.submit(other, 0.1).events:
        one.apply(event, 0.1)
    running = names(QueueActions([e for e in actions.events if type(e) is SeqAdd], actions.done))
    now, computed = 0.1, 0
    while other.result is None and computed < 20:
        now, computed = now + 0.1, computed + 1
        one.apply(SeqPrefilled(running.pop(0)), now)
        more = one.place_ready(now)
        for event in more.events:
            one.apply(event, now)
        running += [ticket.request.request for ticket in more.done]
    assert computed <= 7  # a quantum of the crowd


def test_without_fair_classes_a_burst_waits_for_its_ranks_and_not_in_the_queue() -> None:
    one = queue()
    actions = place(one, {f"p{number}": 90 for number in range(20)})
    assert not [event for event in actions.events if type(event) is SeqWait]
    assert one.waiting == 19
    submit(one, prompt("tenant", 90, tenant="t"), 0.1)
    later = one.place_gathered(0.1 + SOON)
    assert [event.request for event in later.events if type(event) is SeqWait] == ["tenant"]


def test_a_request_that_loads_blocks_and_is_sent_again_counts_once() -> None:
    one = queue()
    for _ in range(3):
        submit(one, prompt("loads", 90), 0.0, overlaps({"a": (0, 20)}))
        assert names(one.place_gathered(0.0)) == ["loads"]
    one.apply(SeqPrefilled("loads"), 0.2)
    assert names(place(one, {"x": 40}, 0.2)) == ["x"]
    assert names(place(one, {"y": 90}, 0.2)) == []


def test_a_prefill_worker_gets_its_prompts_at_once() -> None:
    """The router learns of their ends after the handoffs, and the engine would idle meanwhile."""
    pair = queue("d", disagg_tokens=1)
    pair.core.join(worker("d", step=STEP, serves="decode", needs_handoff=True))
    pair.core.join(worker("p", step=STEP, serves="prefill"))
    done = place(pair, {"x": 40, "y": 90}).done
    assert [ticket.request.request for ticket in done] == ["y", "x"]
    assert pair.waiting == 0


@pytest.mark.parametrize("gone", [True, False])
def test_prompts_held_for_a_worker_that_goes_are_placed_anew(gone: bool) -> None:
    pair = queue("p")
    place(pair, {"x": 40, "y": 90})
    pair.core.join(worker("q", step=STEP))
    if gone:
        pair.core.leave("p")
    else:
        pair.core.join(replace(worker("p", step=STEP), draining=True))
    [ticket] = pair.place_ready(0.1).done + pair.place_ready(0.2).done
    assert ticket.request.request == "y"
    assert isinstance(ticket.result, Decision)
    assert ticket.result.chosen.instance == "q"


def test_a_held_prompt_outlives_its_entry_in_the_queue_of_a_router_that_is_gone() -> None:
    one = queue()
    place(one, {"first": 90})
    ticket = submit(one, prompt("x", 90), 0.0)
    one.place_gathered(SOON)
    one.apply(SeqWait("x", "gone", "", 0, "", 0.0, 10, arrived=-60.0, deadline=60.0), 0.1)
    one.retain_routers({"r"}, 0.2)
    assert one.common.order.head(0.2) is None
    assert ticket.result is None
    assert first_token(one, "first", 0.3) == ["x"]


def test_a_gathering_is_bounded() -> None:
    one = queue()
    for number in range(MOST_GATHERED - 1):
        submit(one, prompt(f"p{number}", 1), 0.0)
    actions = one.submit(Ticket(prompt("last", 1), 0.0), 0.0)
    assert actions.done
    assert not one.gathering


def test_a_lone_request_is_placed_at_once() -> None:
    one = queue()
    ticket = Ticket(prompt("x", 40), 0.0, alone=True)
    assert names(one.submit(ticket, 0.0)) == ["x"]
    assert not one.gathering


def test_a_lone_request_joins_those_that_are_gathered() -> None:
    one = queue("a", "b")
    submit(one, prompt("x", 40), 0.0)
    ticket = Ticket(prompt("y", 40), SOON / 2, alone=True)
    assert one.submit(ticket, SOON / 2) == QueueActions()
    assert sorted(names(one.place_gathered(SOON))) == ["x", "y"]


@pytest.mark.parametrize("settings", [{"gather_s": 0.0}, {"queue_threshold": 0.0}])
def test_without_gathering_each_request_is_sent_at_once(settings: dict[str, float]) -> None:
    one = queue(**settings)
    for name in "xyz":
        ticket = Ticket(prompt(name, 40), 0.0)
        assert names(one.submit(ticket, 0.0)) == [name]
