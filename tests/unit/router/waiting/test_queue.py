"""Placement queue, computed by hand; replicas agree on one order."""

from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from support.routing import BLOCK, entry, overlaps, request, sequence, worker

from kvmesh.bus.messages import (
    BATCH_CLASS,
    Decision,
    Hints,
    Placement,
    Refused,
    RouteRequest,
    SeqAdd,
    SeqEvent,
    SeqFree,
    SeqPrefilled,
)
from kvmesh.router.placement.router import RouterCore
from kvmesh.router.waiting.common_queue import REPLICA_PATIENCE_S
from kvmesh.router.waiting.queue import PlacementQueue, QueueActions
from kvmesh.router.waiting.ticket import Ticket
from kvmesh.settings.schema import RouterSettings

STEP = 10 * BLOCK  # one prompt of ten blocks fills one engine step


def queue(*names: str, router: str = "r", **settings: Any) -> PlacementQueue:
    """A queue over workers with capacity for one prompt of ten blocks each."""
    options = {"predicted_ttl_s": 0.0, "queue_threshold": 0.5, "gather_s": 0.0, **settings}
    core = RouterCore("m", router, RouterSettings(**options), Random(7))
    for name in names or ("a",):
        core.join(worker(name, step=STEP))
    return PlacementQueue(core, router)


class Replicas:
    """Queues that receive each other's events in the stream's order."""

    def __init__(self, *replicas: PlacementQueue) -> None:
        self.replicas = replicas
        self.done: list[Ticket] = []
        self.events: list[SeqEvent] = []

    def apply_actions(self, steps: QueueActions, now: float) -> None:
        self.done += steps.done
        self.broadcast(now, *steps.events)

    def broadcast(self, now: float, *events: SeqEvent) -> None:
        for event in events:
            self.events.append(event)
            for replica in self.replicas:
                replica.apply(event, now)

    def submit(self, message: RouteRequest, now: float = 0.0, to: int = 0) -> Ticket:
        ticket = Ticket(message, now)
        self.apply_actions(self.replicas[to].submit(ticket, now), now)
        return ticket

    def place_ready(self, now: float = 0.0) -> None:
        for replica in self.replicas:
            self.apply_actions(replica.place_ready(now), now)

    @property
    def order(self) -> list[str]:
        return [t.request.request for t in self.done if isinstance(t.result, Decision)]


def prompt(name: str, blocks: int = 10, **hints: Any) -> RouteRequest:
    own = int.from_bytes(name.encode(), "little")
    return request(name, sequence(*(own * 1000 + i for i in range(blocks))), hints=Hints(**hints))


def prefill_done(mesh: Replicas, now: float = 0.0) -> None:
    """All placed requests reach their first token; then place the next ones."""
    for name in mesh.order:
        mesh.broadcast(now, SeqPrefilled(name))
    mesh.place_ready(now)


def drain(mesh: Replicas, now: float = 0.0) -> list[str]:
    for _ in range(100):
        prefill_done(mesh, now)
    return mesh.order


def test_requests_wait_only_while_every_worker_is_past_the_threshold() -> None:
    mesh = Replicas(queue("a", "b"))
    tickets = [mesh.submit(prompt(name)) for name in "123"]
    assert [isinstance(t.result, Decision) for t in tickets] == [True, True, False]
    mesh.place_ready()
    assert mesh.order == ["1", "2"]
    mesh.broadcast(0.0, SeqPrefilled("1"))
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
    mesh = Replicas(queue(queue_order=order))
    mesh.submit(prompt("0"))
    mesh.submit(prompt("p", 40), 1.0)
    mesh.submit(prompt("q", 20), 2.0)
    mesh.submit(prompt("r", 10), 3.0)
    mesh.submit(prompt("s", 60, priority=1), 4.0)
    assert drain(mesh, 5.0) == ["0", *expected]


def test_priority_counts_as_an_earlier_arrival_and_never_as_a_later_one() -> None:
    mesh = Replicas(queue(priority_shift_s=2.0, latency_shift_s=5.0))
    mesh.submit(prompt("0"))
    mesh.submit(prompt("plain"), 1.0)
    mesh.submit(prompt("humble", priority=-5), 2.0)
    mesh.submit(prompt("vip", priority=1), 2.5)
    mesh.submit(prompt("urgent", latency_sensitivity=1.0), 3.0)
    mesh.submit(prompt("tier", strict_priority=1), 4.0)
    assert drain(mesh, 5.0) == ["0", "tier", "urgent", "vip", "plain", "humble"]


def test_tenants_take_turns() -> None:
    mesh = Replicas(queue(queue_quantum=STEP))
    mesh.submit(prompt("0"))
    for number in range(3):
        mesh.submit(prompt(f"x{number}", tenant="x"), 1.0)
    mesh.submit(prompt("y", tenant="y"), 2.0)
    assert drain(mesh, 5.0) == ["0", "x0", "y", "x1", "x2"]


def test_a_constrained_request_does_not_hold_up_the_others() -> None:
    mesh = Replicas(queue("a", "b"))
    mesh.submit(replace(prompt("1"), placement=Placement(instance="a")))
    pinned = mesh.submit(replace(prompt("2"), placement=Placement(instance="a")))
    free = mesh.submit(prompt("3"))
    assert (pinned.result, isinstance(free.result, Decision)) == (None, True)
    mesh.broadcast(0.0, SeqPrefilled("1"))
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
    mesh = Replicas(queue(starvation_s=1e9))
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
            mesh.broadcast(now, SeqPrefilled(mesh.order[-1]))
        mesh.place_ready(now)
        mesh.apply_actions(mesh.replicas[0].expire(now), now)

    def placed(tickets: list[Ticket]) -> float:
        return sum(isinstance(t.result, Decision) for t in tickets) / len(tickets)

    assert placed(plain) == pytest.approx(0.8, abs=0.05)
    assert placed(constrained) == pytest.approx(placed(plain), abs=0.05)


def test_requests_of_all_lanes_leave_in_one_order() -> None:
    mesh = Replicas(queue(), queue(router="s"))
    mesh.submit(prompt("0"))
    names = [str(number) for number in range(1, 7)]
    for number, name in enumerate(names):
        placement = Placement(exclude=["gone", name] if number % 2 else [])
        message = replace(prompt(name), placement=placement)
        mesh.submit(message, 1.0 + number, to=number // 3)
    assert drain(mesh, 9.0) == ["0", *names]


def test_a_new_request_does_not_overtake_a_ready_one_of_another_lane() -> None:
    mesh = Replicas(queue())
    mesh.submit(prompt("1"))
    waiting = mesh.submit(replace(prompt("2"), placement=Placement(instance="a")))
    mesh.broadcast(0.5, SeqPrefilled("1"))
    later = mesh.submit(prompt("3"), 0.6)
    mesh.place_ready(0.7)
    assert (isinstance(waiting.result, Decision), later.result) == (True, None)


def test_a_request_queued_elsewhere_before_keeps_its_position_and_passes_the_limit() -> None:
    mesh = Replicas(queue(queue_limit=1))
    mesh.submit(prompt("0"))
    mesh.submit(prompt("mine"), 5.0)
    moved = Ticket(replace(prompt("moved"), arrived=1.0), 6.0, queued_since=1.0)
    mesh.apply_actions(mesh.replicas[0].submit(moved, 6.0), 6.0)
    assert drain(mesh, 7.0) == ["0", "moved", "mine"]


def test_a_full_queue_refuses_with_the_time_it_needs() -> None:
    mesh = Replicas(queue(queue_limit=2))
    now = 0.0
    for number in range(30):  # 160 tokens each second go out
        now = float(number)
        mesh.submit(prompt(f"n{number}"), now)
        mesh.broadcast(now, SeqPrefilled(f"n{number}"))
    mesh.submit(prompt("blocker"), now)
    for name in ("w1", "w2"):
        assert mesh.submit(prompt(name, 50), now).result is None
    refused = mesh.submit(prompt("w3"), now).result
    assert isinstance(refused, Refused)
    assert refused.code == "overloaded"
    assert refused.retry_after_s == pytest.approx(2 * 800 / 160, rel=0.1)


def test_a_request_is_refused_at_its_deadline() -> None:
    mesh = Replicas(queue())
    mesh.submit(prompt("1"))
    ticket = mesh.submit(replace(prompt("2"), deadline_s=3.0), 1.0)
    assert mesh.replicas[0].expire(3.9).done == []
    mesh.apply_actions(mesh.replicas[0].expire(4.0), 4.0)
    assert isinstance(ticket.result, Refused)
    assert ticket.result.code == "deadline"
    assert mesh.replicas[0].waiting == 0


@pytest.mark.parametrize("gather_s", [0.0, 0.001])
def test_a_request_that_is_sent_again_survives_the_echo_of_its_first_end(gather_s: float) -> None:
    """Its refusal was lost with the connection: the frontend sends the same attempt again."""
    one = queue(gather_s=gather_s)

    def submit(ticket: Ticket, now: float) -> QueueActions:
        actions = one.submit(ticket, now)
        if one.gathering:
            actions = one.place_gathered(now)
        return actions

    running = submit(Ticket(prompt("run"), 0.0), 0.0).events
    first = Ticket(replace(prompt("again"), deadline_s=3.0), 0.0)
    waits = submit(first, 0.0).events
    ended = one.expire(4.0)
    assert ended.events == [SeqFree("again")]
    assert isinstance(first.result, Refused)
    second = Ticket(prompt("again"), 4.1)
    waits_again = submit(second, 4.1).events
    for event in (*running, *waits, *ended.events, *waits_again):
        one.apply(event, 4.2, own=True)
    assert one.waiting == 1
    one.apply(SeqFree("run"), 5.0)
    one.place_ready(5.0)
    assert isinstance(second.result, Decision)
    assert one.waiting == 0


def test_a_free_for_a_waiting_request_cancels_it() -> None:
    mesh = Replicas(queue(), queue(router="s"))
    mesh.submit(prompt("1"))
    ticket = mesh.submit(prompt("2"))
    assert [d.waiting for d in mesh.replicas] == [1, 1]
    mesh.broadcast(0.0, SeqFree("2"))
    drain(mesh)
    assert (ticket.result, [d.waiting for d in mesh.replicas]) == (None, [0, 0])


def test_workers_that_all_leave_end_the_wait() -> None:
    mesh = Replicas(queue())
    mesh.submit(prompt("1"))
    ticket = mesh.submit(prompt("2"))
    mesh.replicas[0].core.leave("a")
    mesh.place_ready()
    assert isinstance(ticket.result, Refused)
    assert ticket.result.code == "no_workers"
    assert mesh.replicas[0].waiting == 0


def test_overlaps_of_waiting_requests_are_refreshed() -> None:
    mesh = Replicas(queue(queue_order="wspt", rescore_s=5.0))
    replica = mesh.replicas[0]
    mesh.submit(prompt("1"))
    ticket = mesh.submit(prompt("2", 50))
    mesh.submit(prompt("3", 40))
    assert replica.due_for_rescore(5.0) == []
    assert [t.request.request for t in replica.due_for_rescore(5.1)] == ["2", "3"]
    mesh.apply_actions(replica.rescore(ticket, overlaps({"a": (45,)}), 5.1), 5.1)
    assert drain(mesh, 6.0) == ["1", "2", "3"]


def test_a_rescore_without_workers_leaves_the_request_in_the_queue() -> None:
    mesh = Replicas(queue())
    mesh.submit(prompt("1"))
    ticket = mesh.submit(prompt("2"))
    mesh.replicas[0].core.leave("a")
    mesh.apply_actions(mesh.replicas[0].rescore(ticket, None, 6.0), 6.0)
    assert not any(done is ticket for done in mesh.done)
    mesh.place_ready(6.0)
    assert isinstance(ticket.result, Refused)
    assert ticket.result.code == "no_workers"


def test_an_internal_error_fails_one_request_only(caplog: pytest.LogCaptureFixture) -> None:
    mesh = Replicas(queue())
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


def test_replicas_place_in_one_order() -> None:
    mesh = Replicas(*(queue(router=name) for name in "rst"))
    mesh.submit(prompt("0"))
    names = ["c", "a", "e", "b", "d", "f"]
    for number, name in enumerate(names):
        mesh.submit(prompt(name), 1.0 + number, to=number % 3)
    assert drain(mesh, 9.0) == ["0", *names]


def test_a_dead_replica_does_not_block_the_others() -> None:
    mesh = Replicas(queue(), queue(router="dead"))
    mesh.submit(prompt("0"))
    mesh.submit(prompt("lost"), 1.0, to=1)
    mine = mesh.submit(prompt("mine"), 2.0)
    mesh.broadcast(3.0, SeqPrefilled("0"))
    alive = mesh.replicas[0]
    assert alive.place_ready(3.0).done == []
    assert alive.place_ready(3.2).done == []
    assert [t.request.request for t in alive.place_ready(3.3).done] == ["mine"]
    assert isinstance(mine.result, Decision)
    assert alive.waiting == 0
    mesh.broadcast(4.0, replace(entry("back", router="dead"), arrived=4.0))
    assert alive.waiting == 1
    alive.retain_routers({"r"}, 8.9)
    assert alive.waiting == 1, "its card may still be on its way"
    alive.retain_routers({"r"}, 9.1)
    assert alive.waiting == 0


def test_a_skipped_replica_is_not_waited_for_again_soon() -> None:
    mesh = Replicas(queue(), queue(router="frozen"))
    mesh.submit(prompt("0"))
    mesh.submit(prompt("lost"), 1.0, to=1)
    mesh.submit(prompt("mine"), 2.0)
    mesh.submit(prompt("next"), 2.5)
    alive = mesh.replicas[0]
    mesh.broadcast(3.0, SeqPrefilled("0"))
    alive.place_ready(3.0)
    assert [t.request.request for t in alive.place_ready(3.3).done] == ["mine"]
    mesh.broadcast(3.4, entry("late", router="frozen", key=2.2, arrived=2.2), SeqPrefilled("mine"))
    assert [t.request.request for t in alive.place_ready(3.4).done] == ["next"]


def test_a_replica_is_waited_for_only_if_its_request_has_capacity() -> None:
    mesh = Replicas(queue("a", "b"), queue("a", "b", router="s"))
    for name in "ab":
        placement = Placement(instance=name)
        mesh.submit(replace(prompt(f"at {name}"), placement=placement))
    there = Placement(instance="a")
    theirs = mesh.submit(replace(prompt("theirs"), placement=there), 1.0, to=1)
    mine = mesh.submit(prompt("mine"), 2.0)
    mesh.broadcast(3.0, SeqPrefilled("at b"))
    mesh.apply_actions(mesh.replicas[0].place_ready(3.0), 3.0)
    assert (theirs.result, isinstance(mine.result, Decision)) == (None, True)


def test_a_slow_replica_keeps_its_turn_while_capacity_lacks() -> None:
    mesh = Replicas(queue(), queue(router="slow"))
    mesh.submit(prompt("0"))
    theirs = mesh.submit(prompt("theirs"), 1.0, to=1)
    mesh.submit(prompt("mine"), 2.0)
    for tenth in range(30):
        assert mesh.replicas[0].place_ready(3.0 + tenth / 10).done == []
    mesh.broadcast(6.0, SeqPrefilled("0"))
    assert mesh.replicas[0].place_ready(6.1).done == []
    assert mesh.replicas[1].place_ready(6.2).done == [theirs]


def test_an_entry_lost_by_the_stream_is_inserted_after_a_while() -> None:
    replica = queue()
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
        st.sampled_from(["submit", "prefilled", "free", "place", "later"]),
        st.integers(0, 30),
        st.integers(0, 2),
    ),
    max_size=80,
)


@given(STEPS, st.sampled_from([1e-4, 0.1]))
def test_any_interleaving_conserves_requests_and_replicas_agree(
    steps: list[Step], tick: float
) -> None:
    mesh = Replicas(*(queue("a", "b", router=name) for name in "rst"))
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
            mesh.broadcast(now, SeqPrefilled(name))
        elif kind == "free":
            mesh.broadcast(now, SeqFree(name))
        elif kind == "place":
            mesh.apply_actions(mesh.replicas[replica].place_ready(now), now)
        else:
            now += number * tick
    counts = [tuple(d.core.table.requests[:2]) for d in mesh.replicas]
    assert len(set(counts)) == 1
    known = [set(d.common.order.entries) for d in mesh.replicas]
    waiting = {t.request.request for d in mesh.replicas for t in d.common.tickets}
    if now < REPLICA_PATIENCE_S:
        assert known == [waiting] * 3
    for replica_, entries in zip(mesh.replicas, known, strict=True):
        own = {ticket.request.request for ticket in replica_.common.tickets}
        assert own <= entries <= waiting, "only entries of a replica that was skipped are dropped"
    added = [e.request for e in mesh.events if isinstance(e, SeqAdd)]
    assert len(added) == len(set(added)), "placed twice"
    for name in tickets:
        mesh.broadcast(now, SeqFree(name))
    for replica_ in mesh.replicas:
        assert replica_.waiting == 0
        table = replica_.core.table
        assert not table.requests.any()
        assert not table.active_blocks.any()
        assert not table.prefill_tokens.any()


# --- batch requests


def batches(*names: str, router: str = "r", **settings: Any) -> PlacementQueue:
    share = {"batch_blocks_share": 0.1}
    return queue(*names, router=router, batch_classes=["batch"], **{**share, **settings})


def batch(name: str, blocks: int = 10, **hints: Any) -> RouteRequest:
    return prompt(name, blocks, **{"fair_class": "batch", **hints})


def test_a_batch_request_gets_room_that_nobody_needs() -> None:
    mesh = Replicas(batches("a", "b", "c"))
    for name in "123":
        mesh.submit(batch(name))
    mesh.place_ready()
    assert sorted(mesh.order) == ["1", "2"], "one prompt for each rank, and one rank stays free"
    prefill_done(mesh)
    assert sorted(mesh.order) == ["1", "2", "3"]


def test_batch_requests_have_all_ranks_of_an_idle_fleet() -> None:
    mesh = Replicas(batches("a", "b", "c"))
    mesh.submit(prompt("0"), 0.0)
    mesh.broadcast(1.0, SeqPrefilled("0"), SeqFree("0"))
    for name in "123":
        mesh.submit(batch(name, fair_class=BATCH_CLASS), 30.0)
    mesh.replicas[0].expire(30.0)
    mesh.place_ready(30.0)
    assert mesh.order == ["0", "1", "2"]
    mesh.replicas[0].expire(32.0)
    mesh.place_ready(32.0)
    assert mesh.order == ["0", "1", "2", "3"]


def test_as_many_ranks_stay_free_as_others_have_needed_at_once() -> None:
    mesh = Replicas(batches("a", "b", "c"))
    for name in "01":
        mesh.submit(prompt(name))
    mesh.broadcast(1.0, *(event(name) for name in "01" for event in (SeqPrefilled, SeqFree)))
    for name in "23":
        mesh.submit(batch(name), 1.0)
    mesh.place_ready(1.0)
    assert mesh.order == ["0", "1", "2"]
    mesh.broadcast(2.0, SeqPrefilled("2"))
    mesh.place_ready(2.0)
    assert mesh.order == ["0", "1", "2", "3"]


def test_the_class_is_that_of_the_key_too() -> None:
    mesh = Replicas(batches())
    mesh.submit(prompt("0"))
    mesh.submit(batch("1", tenant="batch", fair_class=None))
    mesh.submit(prompt("2"))
    assert drain(mesh) == ["0", "2", "1"]


def test_batch_requests_wait_for_all_others_however_long() -> None:
    mesh = Replicas(batches(starvation_s=1.0))
    mesh.submit(prompt("0"))
    mesh.submit(batch("early", strict_priority=9, priority=9))
    mesh.submit(prompt("1"), 50.0)
    mesh.submit(prompt("2"), 60.0)
    assert drain(mesh, 100.0) == ["0", "1", "2", "early"]


def test_prompts_of_batch_requests_do_not_make_others_wait() -> None:
    mesh = Replicas(batches())
    mesh.submit(batch("large", 100))
    mesh.place_ready()
    tickets = [mesh.submit(prompt(name)) for name in "12"]
    assert mesh.order == ["large", "1"]
    assert tickets[1].result is None, "the prompt of the first one counts"
    mesh.broadcast(0.0, SeqPrefilled("large"), SeqPrefilled("1"))
    mesh.place_ready()
    assert mesh.order == ["large", "1", "2"]


def test_a_rank_without_memory_to_spare_gets_no_batch_request() -> None:
    mesh = Replicas(batches(batch_blocks_share=0.1))
    mesh.submit(prompt("0", 110))
    mesh.broadcast(0.0, SeqPrefilled("0"))
    mesh.submit(batch("1"))
    mesh.place_ready()
    assert mesh.order == ["0"]
    mesh.broadcast(1.0, SeqFree("0"))
    mesh.place_ready(1.0)
    assert mesh.order == ["0", "1"]


def test_batch_requests_have_a_queue_limit_of_their_own() -> None:
    mesh = Replicas(batches(queue_limit=2))
    mesh.submit(prompt("0"))
    refused = [mesh.submit(batch(str(number))).result for number in range(1, 4)]
    assert [isinstance(each, Refused) for each in refused] == [False, False, True]
    assert [mesh.submit(prompt(name)).result for name in "xy"] == [None, None]
    assert isinstance(mesh.submit(prompt("z")).result, Refused)


def test_without_a_queue_batch_requests_still_wait() -> None:
    mesh = Replicas(batches(queue_threshold=0.0))
    mesh.submit(prompt("0"))
    mesh.submit(batch("1"))
    mesh.place_ready()
    assert mesh.order == ["0"]
    prefill_done(mesh)
    assert mesh.order == ["0", "1"]


def test_a_batch_request_without_any_worker_is_refused() -> None:
    replica = batches("a")
    mesh = Replicas(replica)
    replica.core.leave("a")
    ticket = mesh.submit(batch("1"))
    mesh.place_ready()
    assert isinstance(ticket.result, Refused)
    assert ticket.result.code == "no_workers"


def test_replicas_agree_about_batch_requests() -> None:
    mesh = Replicas(batches("a", router="r1"), batches("a", router="r2"))
    mesh.submit(batch("1", 60), to=0)
    mesh.submit(prompt("2"), to=1)
    mesh.submit(batch("3"), to=1)
    mesh.submit(prompt("4"), to=0)
    mesh.place_ready()
    placed = drain(mesh)
    assert placed.index("4") < placed.index("3")
    assert sorted(placed) == ["1", "2", "3", "4"]
    assert [replica.waiting for replica in mesh.replicas] == [0, 0]
