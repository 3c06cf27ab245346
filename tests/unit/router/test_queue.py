"""Who leaves the queue next, worked by hand; and that nobody is lost, starved or doubled."""

from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from support.routing import BLOCK, overlaps, request, sequence, worker

from kvmesh.bus.messages import (
    Decision,
    Hints,
    Placement,
    Refused,
    RouteRequest,
    SeqAdd,
    SeqEvent,
    SeqFree,
    SeqPrefilled,
    SeqWait,
)
from kvmesh.router.placement.fair_order import FairOrder
from kvmesh.router.placement.queue import PlacementQueue, QueueActions
from kvmesh.router.placement.router import RouterCore
from kvmesh.router.placement.ticket import Ticket
from kvmesh.settings.schema import RouterSettings

STEP = 10 * BLOCK  # one prompt of ten blocks fills one engine step


def entry(name: str, **changes: Any) -> SeqWait:
    fields: dict[str, Any] = {
        "request": name, "router": "r", "lane": "", "tier": 0, "fair_class": "", "key": 0.0,
        "cost": 100, "arrived": 0.0, "deadline": 60.0,
    }  # fmt: skip
    return SeqWait(**(fields | changes))


def lane(
    *entries: SeqWait, quantum: float = 100, weights: Any = None, bound: float = 1e9
) -> FairOrder:
    made = FairOrder(quantum, weights or {}, bound)
    for one in entries:
        made.push(one)
    return made


def leave(waiting: FairOrder, time: float = 0.0) -> list[str]:
    """The order in which all entries leave."""
    order = []
    while (head := waiting.head(time)) is not None:
        waiting.remove(head.request, placed=True)
        order.append(head.request)
    assert len(waiting) == 0
    return order


def test_lower_keys_leave_first_and_equal_ones_by_arrival() -> None:
    waiting = lane(entry("late", key=5), entry("b", key=1, arrived=2), entry("a", key=1, arrived=1))
    assert leave(waiting) == ["a", "b", "late"]


def test_a_higher_tier_always_leaves_first() -> None:
    waiting = lane(entry("a"), entry("b", tier=2, key=9), entry("c", tier=1), entry("d", tier=2))
    assert leave(waiting) == ["d", "b", "c", "a"]


def test_fair_classes_take_turns_by_cost() -> None:
    # Class x sends 100 tokens a turn, one request; class y, whose requests cost 50, two.
    waiting = lane(
        *(entry(f"x{i}", fair_class="x", key=i, cost=100) for i in range(3)),
        *(entry(f"y{i}", fair_class="y", key=i, cost=50) for i in range(4)),
    )
    assert leave(waiting) == ["x0", "y0", "y1", "x1", "y2", "y3", "x2"]


def test_a_large_request_saves_up_for_its_turn() -> None:
    waiting = lane(
        entry("big", fair_class="x", cost=250),
        *(entry(f"y{i}", fair_class="y", key=i, cost=100) for i in range(5)),
    )
    # x has 100, then 200, then 300 tokens to its credit.
    assert leave(waiting) == ["y0", "y1", "big", "y2", "y3", "y4"]


def test_many_rounds_without_a_sender_take_no_time() -> None:
    waiting = lane(
        entry("x", fair_class="x", cost=10**9),
        entry("y", fair_class="y", cost=10**9 - 5),
        entry("z", fair_class="z", cost=2 * 10**9),
        quantum=1,
    )
    assert leave(waiting) == ["y", "x", "z"]


def test_weights_multiply_the_quantum() -> None:
    waiting = lane(
        *(entry(f"g{i}", fair_class="gold", key=i) for i in range(4)),
        *(entry(f"f{i}", fair_class="free", key=i) for i in range(2)),
        weights={"gold": 2.0},
    )
    assert leave(waiting) == ["g0", "g1", "f0", "g2", "g3", "f1"]


def test_an_old_entry_goes_before_all_others() -> None:
    waiting = lane(entry("old", key=1e9, arrived=0.0), entry("vip", tier=9, arrived=25), bound=30.0)
    assert leave(waiting, time=31.0) == ["old", "vip"]


@pytest.mark.parametrize("bound", [1e9, 0.0])
def test_an_entry_that_changes_its_lane_has_left_the_other(bound: float) -> None:
    waiting = lane(entry("a", lane="x"), entry("b", lane="x", key=1, arrived=1.0), bound=bound)
    waiting.push(entry("a", lane="y"))
    heads = [waiting.head(9.0, blocked) for blocked in ({"y"}, {"x"}, {"x", "y"})]
    assert [head.request if head is not None else None for head in heads] == ["b", "a", None]


def test_an_entry_can_move_and_be_cancelled() -> None:
    waiting = lane(entry("a", key=1), entry("b", key=2), entry("c", key=3))
    waiting.push(entry("c", key=0))
    waiting.push(entry("b", key=2, tier=1))
    waiting.remove("a", placed=False)
    assert leave(waiting) == ["b", "c"]


# --- the dispatcher


def dispatcher(*names: str, router: str = "r", **settings: Any) -> PlacementQueue:
    """Workers with room for one prompt of ten blocks each before requests wait."""
    options = {"predicted_ttl_s": 0.0, "queue_threshold": 0.5, **settings}
    core = RouterCore("m", router, RouterSettings(**options), Random(7))
    for name in names or ("a",):
        core.join(worker(name, step=STEP))
    return PlacementQueue(core, router)


class Replicas:
    """Dispatchers that hear each other's events in one order, as the stream gives it."""

    def __init__(self, *replicas: PlacementQueue) -> None:
        self.replicas = replicas
        self.done: list[Ticket] = []
        self.events: list[SeqEvent] = []

    def take(self, steps: QueueActions, now: float) -> None:
        self.done += steps.done
        self.tell(now, *steps.events)

    def tell(self, now: float, *events: SeqEvent) -> None:
        for event in events:
            self.events.append(event)
            for replica in self.replicas:
                replica.apply(event, now)

    def submit(self, message: RouteRequest, now: float = 0.0, to: int = 0) -> Ticket:
        ticket = Ticket(message, now)
        self.take(self.replicas[to].submit(ticket, now), now)
        return ticket

    def place_ready(self, now: float = 0.0) -> None:
        for replica in self.replicas:
            self.take(replica.place_ready(now), now)

    @property
    def order(self) -> list[str]:
        return [t.request.request for t in self.done if isinstance(t.result, Decision)]


def prompt(name: str, blocks: int = 10, **hints: Any) -> RouteRequest:
    own = int.from_bytes(name.encode(), "little")
    return request(name, sequence(*(own * 1000 + i for i in range(blocks))), hints=Hints(**hints))


def prefill_done(mesh: Replicas, now: float = 0.0) -> None:
    """Everything placed so far reaches its first token, then whoever may goes."""
    for name in mesh.order:
        mesh.tell(now, SeqPrefilled(name))
    mesh.place_ready(now)


def drain(mesh: Replicas, now: float = 0.0) -> list[str]:
    for _ in range(100):
        prefill_done(mesh, now)
    return mesh.order


def test_requests_wait_only_while_every_worker_is_past_the_threshold() -> None:
    mesh = Replicas(dispatcher("a", "b"))
    tickets = [mesh.submit(prompt(name)) for name in "123"]
    assert [isinstance(t.result, Decision) for t in tickets] == [True, True, False]
    mesh.place_ready()
    assert mesh.order == ["1", "2"]
    mesh.tell(0.0, SeqPrefilled("1"))
    mesh.place_ready(0.5)
    assert isinstance(tickets[2].result, Decision)
    assert tickets[2].result.wait_s == 0.5


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ("fcfs", ["p", "q", "r", "s"]),
        ("lcfs", ["s", "r", "q", "p"]),
        ("wspt", ["r", "q", "s", "p"]),
    ],
)
def test_queue_orders(order: str, expected: list[str]) -> None:
    mesh = Replicas(dispatcher(queue_order=order))
    mesh.submit(prompt("0"))
    mesh.submit(prompt("p", 40), 1.0)
    mesh.submit(prompt("q", 20), 2.0)
    mesh.submit(prompt("r", 10), 3.0)
    mesh.submit(prompt("s", 60, priority=1), 4.0)
    assert drain(mesh, 5.0) == ["0", *expected]


def test_priority_counts_as_an_earlier_arrival_and_never_as_a_later_one() -> None:
    mesh = Replicas(dispatcher(priority_shift_s=2.0, latency_shift_s=5.0))
    mesh.submit(prompt("0"))
    mesh.submit(prompt("plain"), 1.0)
    mesh.submit(prompt("humble", priority=-5), 2.0)
    mesh.submit(prompt("vip", priority=1), 2.5)
    mesh.submit(prompt("urgent", latency_sensitivity=1.0), 3.0)
    mesh.submit(prompt("tier", strict_priority=1), 4.0)
    assert drain(mesh, 5.0) == ["0", "tier", "urgent", "vip", "plain", "humble"]


def test_tenants_take_turns() -> None:
    mesh = Replicas(dispatcher(queue_quantum=STEP))
    mesh.submit(prompt("0"))
    for number in range(3):
        mesh.submit(prompt(f"x{number}", tenant="x"), 1.0)
    mesh.submit(prompt("y", tenant="y"), 2.0)
    assert drain(mesh, 5.0) == ["0", "x0", "y", "x1", "x2"]


@pytest.mark.parametrize("weight", [1.0, 2.0])
def test_to_say_many_classes_gains_a_tenant_nothing(weight: float) -> None:
    greedy = [entry(f"x{n}", fair_class=f"x\x1fown{n}") for n in range(12)]
    modest = [entry(f"y{n}", fair_class="y") for n in range(12)]
    mixed = [one for pair in zip(greedy, modest, strict=True) for one in pair]
    order = [name[0] for name in leave(lane(*mixed, weights={"x": weight}))]
    share = weight / (weight + 1)
    for count in range(1, round(12 / share)):
        assert abs(order[:count].count("x") - share * count) <= 2


def test_a_constrained_request_does_not_hold_up_the_others() -> None:
    mesh = Replicas(dispatcher("a", "b"))
    mesh.submit(replace(prompt("1"), placement=Placement(instance="a")))
    pinned = mesh.submit(replace(prompt("2"), placement=Placement(instance="a")))
    free = mesh.submit(prompt("3"))
    assert (pinned.result, isinstance(free.result, Decision)) == (None, True)
    mesh.tell(0.0, SeqPrefilled("1"))
    mesh.place_ready()
    assert isinstance(pinned.result, Decision)


CONSTRAINED: dict[str, dict[str, Any]] = {
    "adapter": {"adapter": "lora"},
    "migration": {"placement": Placement(exclude=["lost"])},
    "label": {"placement": Placement(labels={"zone": "x"})},
    "instance": {"placement": Placement(instance="a")},
}


@pytest.mark.parametrize("kind", CONSTRAINED)
def test_constrained_requests_get_their_share_of_a_worker_that_is_never_idle(kind: str) -> None:
    mesh = Replicas(dispatcher(starvation_s=1e9))
    mesh.replicas[0].core.join(worker("a", step=STEP, adapters=["lora"], labels={"zone": "x"}))
    plain: list[Ticket] = []
    constrained: list[Ticket] = []
    for step in range(600):  # five requests a second come, four go
        now = step / 5
        message = replace(prompt(f"{kind}{step}"), deadline_s=60.0)
        if step % 10 == 5:
            message = replace(message, **CONSTRAINED[kind])
        (constrained if step % 10 == 5 else plain).append(mesh.submit(message, now))
        if step % 5 and mesh.order:
            mesh.tell(now, SeqPrefilled(mesh.order[-1]))
        mesh.place_ready(now)
        mesh.take(mesh.replicas[0].expire(now), now)

    def placed(tickets: list[Ticket]) -> float:
        return sum(isinstance(t.result, Decision) for t in tickets) / len(tickets)

    assert placed(plain) == pytest.approx(0.8, abs=0.05)
    assert placed(constrained) == pytest.approx(placed(plain), abs=0.05)


def test_requests_under_different_constraints_leave_in_one_order() -> None:
    mesh = Replicas(dispatcher(), dispatcher(router="s"))
    mesh.submit(prompt("0"))
    names = [str(number) for number in range(1, 7)]
    for number, name in enumerate(names):
        placement = Placement(exclude=["gone", name] if number % 2 else [])
        message = replace(prompt(name), placement=placement)
        mesh.submit(message, 1.0 + number, to=number // 3)
    assert drain(mesh, 9.0) == ["0", *names]


def test_a_new_request_does_not_pass_one_of_another_lane_that_there_is_room_for() -> None:
    mesh = Replicas(dispatcher())
    mesh.submit(prompt("1"))
    waiting = mesh.submit(replace(prompt("2"), placement=Placement(instance="a")))
    mesh.tell(0.5, SeqPrefilled("1"))
    later = mesh.submit(prompt("3"), 0.6)
    mesh.place_ready(0.7)
    assert (isinstance(waiting.result, Decision), later.result) == (True, None)


def test_what_was_asked_elsewhere_before_keeps_its_place_and_is_not_one_too_many() -> None:
    mesh = Replicas(dispatcher(queue_limit=1))
    mesh.submit(prompt("0"))
    mesh.submit(prompt("mine"), 5.0)
    moved = Ticket(replace(prompt("moved"), arrived=1.0), 6.0, queued_since=1.0)
    mesh.take(mesh.replicas[0].submit(moved, 6.0), 6.0)
    assert drain(mesh, 7.0) == ["0", "moved", "mine"]


def test_a_full_queue_refuses_with_the_time_it_needs() -> None:
    mesh = Replicas(dispatcher(queue_limit=2))
    now = 0.0
    for number in range(30):  # 160 tokens each second go out
        now = float(number)
        mesh.submit(prompt(f"n{number}"), now)
        mesh.tell(now, SeqPrefilled(f"n{number}"))
    mesh.submit(prompt("blocker"), now)
    for name in ("w1", "w2"):
        assert mesh.submit(prompt(name, 50), now).result is None
    refused = mesh.submit(prompt("w3"), now).result
    assert isinstance(refused, Refused)
    assert refused.code == "overloaded"
    assert refused.retry_after_s == pytest.approx(2 * 800 / 160, rel=0.1)


def test_a_deadline_in_the_queue_is_kept() -> None:
    mesh = Replicas(dispatcher())
    mesh.submit(prompt("1"))
    ticket = mesh.submit(replace(prompt("2"), deadline_s=3.0), 1.0)
    assert mesh.replicas[0].expire(3.9).done == []
    mesh.take(mesh.replicas[0].expire(4.0), 4.0)
    assert isinstance(ticket.result, Refused)
    assert ticket.result.code == "deadline"
    assert mesh.replicas[0].waiting == 0


def test_a_free_for_a_waiting_request_cancels_it() -> None:
    mesh = Replicas(dispatcher(), dispatcher(router="s"))
    mesh.submit(prompt("1"))
    ticket = mesh.submit(prompt("2"))
    assert [d.waiting for d in mesh.replicas] == [1, 1]
    mesh.tell(0.0, SeqFree("2"))
    drain(mesh)
    assert (ticket.result, [d.waiting for d in mesh.replicas]) == (None, [0, 0])


def test_workers_that_all_leave_end_the_wait() -> None:
    mesh = Replicas(dispatcher())
    mesh.submit(prompt("1"))
    ticket = mesh.submit(prompt("2"))
    mesh.replicas[0].core.leave("a")
    mesh.place_ready()
    assert isinstance(ticket.result, Refused)
    assert ticket.result.code == "no_workers"
    assert mesh.replicas[0].waiting == 0


def test_long_waiters_are_scored_anew() -> None:
    mesh = Replicas(dispatcher(queue_order="wspt", rescore_s=5.0))
    replica = mesh.replicas[0]
    mesh.submit(prompt("1"))
    ticket = mesh.submit(prompt("2", 50))
    mesh.submit(prompt("3", 40))
    assert replica.due_for_rescore(5.0) == []
    assert [t.request.request for t in replica.due_for_rescore(5.1)] == ["2", "3"]
    mesh.take(replica.rescore(ticket, overlaps({"a": (45,)}), 5.1), 5.1)
    assert drain(mesh, 6.0) == ["1", "2", "3"]


def test_looking_again_when_all_workers_have_left_leaves_the_request_to_its_turn() -> None:
    mesh = Replicas(dispatcher())
    mesh.submit(prompt("1"))
    ticket = mesh.submit(prompt("2"))
    mesh.replicas[0].core.leave("a")
    mesh.take(mesh.replicas[0].rescore(ticket, None, 6.0), 6.0)
    assert not any(done is ticket for done in mesh.done)
    mesh.place_ready(6.0)
    assert isinstance(ticket.result, Refused)
    assert ticket.result.code == "no_workers"


def test_a_defect_costs_one_request_and_holds_up_nobody(caplog: pytest.LogCaptureFixture) -> None:
    mesh = Replicas(dispatcher())
    broken: dict[str, Any] = {"tokens": None}  # as no message on the bus can be
    at_once = mesh.submit(replace(prompt("0"), **broken))
    mesh.submit(prompt("1"))
    waiting, behind = mesh.submit(prompt("2")), mesh.submit(prompt("3"))
    waiting.request = replace(waiting.request, **broken)
    drain(mesh)
    for ticket in (at_once, waiting):
        assert isinstance(ticket.result, Refused)
        assert ticket.result.code == "unavailable"
        assert "TypeError" in ticket.result.reason
    assert isinstance(behind.result, Decision)
    assert mesh.replicas[0].waiting == 0
    assert len([r for r in caplog.records if "could not be routed" in r.message]) == 1


# --- replicas


def test_replicas_release_in_one_order() -> None:
    mesh = Replicas(*(dispatcher(router=name) for name in "rst"))
    mesh.submit(prompt("0"))
    names = ["c", "a", "e", "b", "d", "f"]
    for number, name in enumerate(names):
        mesh.submit(prompt(name), 1.0 + number, to=number % 3)
    assert drain(mesh, 9.0) == ["0", *names]


def test_a_dead_replica_does_not_hold_up_the_others() -> None:
    mesh = Replicas(dispatcher(), dispatcher(router="dead"))
    mesh.submit(prompt("0"))
    mesh.submit(prompt("lost"), 1.0, to=1)
    mine = mesh.submit(prompt("mine"), 2.0)
    mesh.tell(3.0, SeqPrefilled("0"))
    alive = mesh.replicas[0]
    assert alive.place_ready(3.0).done == []
    assert alive.place_ready(3.2).done == []
    assert [t.request.request for t in alive.place_ready(3.3).done] == ["mine"]
    assert isinstance(mine.result, Decision)
    assert alive.waiting == 0
    mesh.tell(4.0, replace(entry("back", router="dead"), arrived=4.0))
    assert alive.waiting == 1
    alive.retain_routers({"r"}, 8.9)
    assert alive.waiting == 1, "its card may still be on its way"
    alive.retain_routers({"r"}, 9.1)
    assert alive.waiting == 0


def test_a_replica_that_was_passed_over_is_not_waited_for_again() -> None:
    mesh = Replicas(dispatcher(), dispatcher(router="frozen"))
    mesh.submit(prompt("0"))
    mesh.submit(prompt("lost"), 1.0, to=1)
    mesh.submit(prompt("mine"), 2.0)
    mesh.submit(prompt("next"), 2.5)
    alive = mesh.replicas[0]
    mesh.tell(3.0, SeqPrefilled("0"))
    alive.place_ready(3.0)
    assert [t.request.request for t in alive.place_ready(3.3).done] == ["mine"]
    mesh.tell(3.4, entry("late", router="frozen", key=2.2, arrived=2.2), SeqPrefilled("mine"))
    assert [t.request.request for t in alive.place_ready(3.4).done] == ["next"]


def test_a_replica_is_waited_for_only_where_there_is_room_for_its_request() -> None:
    mesh = Replicas(dispatcher("a", "b"), dispatcher("a", "b", router="s"))
    for name in "ab":
        placement = Placement(instance=name)
        mesh.submit(replace(prompt(f"at {name}"), placement=placement))
    there = Placement(instance="a")
    theirs = mesh.submit(replace(prompt("theirs"), placement=there), 1.0, to=1)
    mine = mesh.submit(prompt("mine"), 2.0)
    mesh.tell(3.0, SeqPrefilled("at b"))
    mesh.take(mesh.replicas[0].place_ready(3.0), 3.0)
    assert (theirs.result, isinstance(mine.result, Decision)) == (None, True)


def test_a_slow_replica_keeps_its_turn_while_there_is_no_room() -> None:
    mesh = Replicas(dispatcher(), dispatcher(router="slow"))
    mesh.submit(prompt("0"))
    theirs = mesh.submit(prompt("theirs"), 1.0, to=1)
    mesh.submit(prompt("mine"), 2.0)
    for tenth in range(30):
        assert mesh.replicas[0].place_ready(3.0 + tenth / 10).done == []
    mesh.tell(6.0, SeqPrefilled("0"))
    assert mesh.replicas[0].place_ready(6.1).done == []
    assert mesh.replicas[1].place_ready(6.2).done == [theirs]


def test_an_entry_that_the_stream_lost_is_entered_after_a_while() -> None:
    replica = dispatcher()
    replica.submit(Ticket(prompt("1"), 0.0), 0.0)
    ticket = Ticket(prompt("2"), 0.0)
    replica.submit(ticket, 0.0)  # its event never comes back
    replica.apply(SeqPrefilled("1"), 0.1)
    assert replica.place_ready(0.1).done == []
    replica.expire(0.6)
    assert replica.place_ready(0.6).done == [ticket]


Step = tuple[str, int, int]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["submit", "prefilled", "free", "pump", "later"]),
        st.integers(0, 30),
        st.integers(0, 2),
    ),
    max_size=80,
)


@given(STEPS)
def test_any_interleaving_conserves_requests_and_replicas_agree(steps: list[Step]) -> None:
    mesh = Replicas(*(dispatcher("a", "b", router=name) for name in "rst"))
    tickets: dict[str, Ticket] = {}
    now = 0.0
    for kind, number, replica in steps:
        name = f"n{number}"
        if kind == "submit" and name not in tickets:
            hints = {"strict_priority": number % 3, "tenant": "xy"[number % 2]}
            placement = Placement(exclude=["b"] if number % 5 == 0 else [])
            message = replace(prompt(name, 1 + number, **hints), placement=placement)
            tickets[name] = mesh.submit(message, now, replica)
        elif kind == "prefilled":
            mesh.tell(now, SeqPrefilled(name))
        elif kind == "free":
            mesh.tell(now, SeqFree(name))
        elif kind == "pump":
            mesh.take(mesh.replicas[replica].place_ready(now), now)
        else:
            now += number / 10
    counts = [tuple(d.core.table.requests[:2]) for d in mesh.replicas]
    assert len(set(counts)) == 1
    assert len({d.waiting for d in mesh.replicas}) == 1
    added = [e.request for e in mesh.events if isinstance(e, SeqAdd)]
    assert len(added) == len(set(added)), "placed twice"
    for name in tickets:
        mesh.tell(now, SeqFree(name))
    for replica_ in mesh.replicas:
        assert replica_.waiting == 0
        table = replica_.core.table
        assert not table.requests.any()
        assert not table.active_blocks.any()
        assert not table.prefill_tokens.any()


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 5), st.integers(1, 400)),
        min_size=1,
        max_size=60,
    ),
    st.randoms(use_true_random=False),
)
def test_the_order_depends_on_the_events_alone(
    drawn: list[tuple[int, int, int]], rng: Random
) -> None:
    entries = [
        entry(f"e{i}", tier=tier, fair_class=str(fair), key=float(i), cost=cost, arrived=float(i))
        for i, (tier, fair, cost) in enumerate(drawn)
    ]
    quiet, asked = lane(), lane()
    for one in entries:
        quiet.push(one)
        asked.push(one)
        if rng.random() < 0.5:
            asked.head(0.0)
    assert leave(quiet) == leave(asked)


@given(
    st.lists(
        st.tuples(
            st.integers(0, 3), st.integers(0, 5), st.integers(1, 400), st.sampled_from("abc")
        ),
        min_size=1,
        max_size=40,
    )
)
def test_where_no_lane_is_blocked_nobody_is_passed_over(
    drawn: list[tuple[int, int, int, str]],
) -> None:
    waiting = lane()
    for i, (tier, fair, cost, name) in enumerate(drawn):
        waiting.push(entry(f"e{i}", tier=tier, fair_class=str(fair), key=i, cost=cost, lane=name))
    while (head := waiting.head(0.0)) is not None:
        assert waiting.head(0.0, {"none of them"}) == head
        others = waiting.head(0.0, {head.lane})
        assert others is None or others.lane != head.lane
        waiting.remove(head.request, placed=True)
    assert not waiting.lanes


@given(st.integers(1, 40), st.integers(0, 200))
def test_nobody_starves_past_the_bound(crowd: int, age: int) -> None:
    waiting = lane(bound=100.0)
    waiting.push(entry("plain", key=1e9, arrived=0.0))
    for number in range(crowd):
        waiting.push(entry(f"vip{number}", tier=5, key=-1e9, arrived=float(age)))
    first = waiting.head(float(age) + 0.5)
    assert first is not None
    assert (first.request == "plain") == (age + 0.5 > 100)
