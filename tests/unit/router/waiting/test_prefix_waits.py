"""Requests wait, for a bounded time, while another one computes the prefix of their prompt."""

from random import Random
from typing import Any

import pytest
from msgspec.structs import replace
from support.routing import BLOCK, Hints, request, sequence, worker

from kvmesh.bus.messages import (
    Decision,
    PrefetchTerms,
    PrefixWait,
    Refused,
    SeqAdd,
    SeqEvent,
    SeqFree,
    SeqPrefilled,
    prefill_part,
)
from kvmesh.router.placement.router import RouterCore
from kvmesh.router.state.running_prefills import UNKNOWN_TOKEN_S, RunningPrefills
from kvmesh.router.waiting.queue import PlacementQueue, QueueActions
from kvmesh.router.waiting.ticket import Ticket
from kvmesh.settings.schema import RouterSettings

COMMON, OWN = 300, 10  # blocks
PROMPT_S = (COMMON + OWN) * BLOCK * UNKNOWN_TOKEN_S
BATCH = Hints(fair_class="batch")


class Routers:
    """Routers that see each other's events at once; worker "b" has `busy` blocks, "a" is idle."""

    def __init__(self, count: int = 1, busy: int = 600, **settings: Any) -> None:
        options = {"queue_threshold": 0.0, "prefill_weight": 1.0, **settings}
        self.queues = []
        for number in range(count):
            core = RouterCore("m", f"r{number}", RouterSettings(**options), Random(7))
            for name in "ab":
                core.join(worker(name))
            core.table.active_blocks[1] = busy
            self.queues.append(PlacementQueue(core, f"r{number}"))
        self.placed: dict[str, Decision] = {}
        self.refused: dict[str, Refused] = {}

    def submit(self, name: str, now: float = 0.0, at: int = 0, **changes: Any) -> Ticket:
        own = [hash(name) % 10**6 * 1000 + block for block in range(OWN)]
        blocks = sequence(*range(changes.pop("common", COMMON)), *own)
        ticket = Ticket(request(name, blocks, **changes), now)
        self._apply(self.queues[at].submit(ticket, now), now)
        return ticket

    def tell(self, now: float, *events: SeqEvent) -> None:
        for event in events:
            for queue in self.queues:
                queue.apply(event, now)
        self.step(now)

    def step(self, now: float) -> None:
        for queue in self.queues:
            self._apply(queue.place_ready(now), now)

    def _apply(self, actions: QueueActions, now: float) -> None:
        for event in actions.events:
            for queue in self.queues:
                queue.apply(event, now)
        for ticket in actions.done:
            if isinstance(ticket.result, Decision):
                self.placed[ticket.request.request] = ticket.result
            elif ticket.result is not None:
                self.refused[ticket.request.request] = ticket.result

    def load(self, instance: str, at: int = 0) -> tuple[float, float]:
        table = self.queues[at].core.table
        slot = table.slot(instance, 0)
        return float(table.prefill_tokens[slot]), float(table.requests[slot])

    def where(self) -> dict[str, str]:
        return {name: decision.chosen.instance for name, decision in self.placed.items()}


def test_siblings_wait_for_the_one_that_computes() -> None:
    routers = Routers()
    for number in range(4):
        routers.submit(str(number), 0.1 * number)
    assert list(routers.placed) == ["0"]
    assert routers.queues[0].waiting == 3
    assert routers.load("a") == ((COMMON + OWN + 3 * OWN) * BLOCK, 4)  # they count where they go
    routers.tell(0.5, SeqPrefilled("0"))
    assert routers.where() == dict.fromkeys("0123", "a")
    assert routers.load("a") == (3 * OWN * BLOCK, 4)
    assert routers.queues[0].waiting == 0
    second = routers.placed["1"]
    assert second.chosen.overlap == [COMMON, 0, 0, 0]
    assert second.wait_s == pytest.approx(0.4)
    [wait] = second.prefix_waits
    assert wait.seconds == pytest.approx(0.4)
    assert replace(wait, seconds=0.0) == PrefixWait(
        request="0", instance="a", worker="a", rank=0, blocks=COMMON, seconds=0.0, end="computed"
    )


def test_siblings_of_one_instant_wait_for_the_one_that_is_sent_first() -> None:
    routers = Routers(queue_threshold=16.0, gather_s=0.001)
    for number in range(4):
        routers.submit(str(number))
    assert not routers.placed
    routers.step(0.001)
    [leader] = routers.placed
    assert routers.queues[0].waiting == 3
    routers.tell(0.5, SeqPrefilled(leader))
    assert routers.where() == dict.fromkeys("0123", "a")
    assert routers.queues[0].waiting == 0


def test_the_tokens_of_siblings_that_wait_do_not_keep_back_the_one_that_computes() -> None:
    routers = Routers(queue_threshold=16.0, gather_s=0.001)
    routers.submit("before", common=0)
    routers.step(0.001)
    for number in range(4):
        routers.submit(str(number), 0.1)
    routers.step(0.101)
    assert list(routers.placed) == ["before"]
    assert routers.queues[0].waiting == 4
    routers.tell(0.2, SeqPrefilled("before"))
    assert len(routers.placed) == 2
    routers.tell(0.5, SeqPrefilled(list(routers.placed)[1]))
    assert routers.where() == dict.fromkeys(("before", *"0123"), "a")


@pytest.mark.parametrize(("others", "waits"), [(1, True), (31, True), (32, False)])
def test_a_sibling_goes_to_an_engine_that_has_more_to_compute_than_its_prefix(
    others: int, waits: bool
) -> None:
    """There it waits behind these others, and keeps its place."""
    routers = Routers(busy=6000)
    for number in range(others):
        routers.submit(f"other {number}", common=0)
    routers.submit("first", 0.1)
    routers.submit("second", 0.2)
    assert ("second" not in routers.placed) is waits
    assert set(routers.where().values()) == {"a"}


def test_the_one_that_computes_is_cancelled_before_it_is_sent() -> None:
    routers = Routers(queue_threshold=16.0, gather_s=0.001)
    routers.submit("before", common=0)
    routers.step(0.001)
    for number in range(3):
        routers.submit(str(number), 0.1)
    routers.step(0.101)
    queue = routers.queues[0]
    held = next(str(n) for n in range(3) if queue.core.prefills.waits(str(n)) is False)
    routers._apply(queue.cancel(held), 0.15)
    routers.tell(0.2, SeqPrefilled("before"))
    following = list(routers.placed)[1]
    assert following != held
    routers.tell(0.5, SeqPrefilled(following))
    assert sorted(routers.placed) == sorted({"before", *"012"} - {held})
    assert queue.waiting == 0
    assert queue.core.table.held_tokens.sum() == 0


def test_a_wait_ends_when_another_rank_would_have_computed_the_prompt() -> None:
    routers = Routers(busy=300)
    routers.submit("0")
    routers.submit("1")
    routers.submit("2", 0.1)
    routers.step(0.99 * PROMPT_S)
    assert list(routers.placed) == ["0"]
    routers.step(PROMPT_S)
    # The rank that is late still has its backlog, so the next one computes on the other.
    assert routers.where() == {"0": "a", "1": "b"}
    assert routers.placed["1"].prefix_waits[0].end == "late"
    routers.tell(PROMPT_S + 0.2, SeqPrefilled("1"))
    assert routers.where()["2"] == "b"
    assert [wait.end for wait in routers.placed["2"].prefix_waits] == ["lost", "computed"]


def test_a_short_prompt_that_ceases_to_wait_leaves_the_others_waiting() -> None:
    """It has the start in common with them, and computes it in less time than the leader needs."""
    routers = Routers()
    routers.submit("0")
    routers.submit("1", 0.01)
    routers.submit("short", 0.02, common=40)
    assert routers.queues[0].waiting == 2
    for now in (0.3, 0.4, 0.5):
        routers.step(now)
    assert list(routers.placed) == ["0", "short"]
    assert [wait.end for wait in routers.placed["short"].prefix_waits] == ["late"]
    routers.tell(0.9, SeqPrefilled("0"))
    assert [wait.end for wait in routers.placed["1"].prefix_waits] == ["computed"]
    assert routers.placed["1"].chosen.overlap[0] == COMMON


@pytest.mark.parametrize("count", [1, 2])
def test_the_next_one_computes_if_the_first_is_cancelled(count: int) -> None:
    routers = Routers(count)
    for number in range(4):
        routers.submit(str(number), 0.1 * number, at=number % count)
    assert list(routers.placed) == ["0"]
    routers.tell(0.5, SeqFree("0"))
    assert list(routers.placed) == ["0", "1"]
    assert sum(routers.placed["1"].chosen.overlap) == 0
    routers.tell(0.9, SeqPrefilled("1"))
    assert list(routers.placed) == ["0", "1", "2", "3"]
    assert all(sum(routers.placed[name].chosen.overlap) == COMMON for name in "23")
    for queue in routers.queues:
        assert queue.core.table.requests.sum() == 3


def test_the_next_one_computes_elsewhere_if_the_worker_goes() -> None:
    routers = Routers()
    for number in range(3):
        routers.submit(str(number))
    routers.queues[0].core.leave("a")
    routers.step(0.1)
    assert routers.where() == {"0": "a", "1": "b"}
    routers.tell(0.5, SeqPrefilled("1"))
    assert routers.where()["2"] == "b"


def test_all_routers_count_what_a_sibling_computes_after_its_leader_was_lost() -> None:
    routers = Routers(2)
    routers.submit("0")
    routers.submit("1", 0.1)
    routers.tell(0.5, SeqFree("0"))
    assert [routers.load("a", at) for at in range(2)] == [((COMMON + OWN) * BLOCK, 1)] * 2
    routers.tell(0.9, SeqPrefilled("1"), SeqFree("1"))
    assert [routers.load("a", at) for at in range(2)] == [(0, 0)] * 2


def test_all_routers_count_a_sibling_where_it_waits_next() -> None:
    """Its engine does not have it: its tokens keep no other prompt back."""
    routers = Routers(2)
    for number in range(3):
        routers.submit(str(number), 0.1 * number)
    for queue in routers.queues:
        queue.core.leave("a")
    routers.step(0.5)
    assert routers.where() == {"0": "a", "1": "b"}
    for queue in routers.queues:
        slot = queue.core.table.slot("b", 0)
        assert queue.core.prefills.waiting_tokens(slot) == OWN * BLOCK


def test_a_sibling_that_is_freed_while_it_waits_leaves_no_load() -> None:
    routers = Routers(2)
    routers.submit("0")
    routers.submit("1")
    routers.tell(0.1, SeqFree("1"))
    assert routers.queues[0].waiting == 0
    assert [routers.load("a", at) for at in range(2)] == [((COMMON + OWN) * BLOCK, 1)] * 2
    routers.tell(0.2, SeqPrefilled("0"))
    assert list(routers.placed) == ["0"]


def test_a_sibling_that_is_freed_before_its_wait_is_known_leaves_no_load() -> None:
    """Its sender has left, and nobody else would free it."""
    routers = Routers(2)
    routers.submit("0")
    ticket = Ticket(request("1", sequence(*range(COMMON), 1, 2, 3)), 0.1)
    actions = routers.queues[0].submit(ticket, 0.1)
    assert routers.queues[0].waiting == 1
    routers.tell(0.1, SeqFree("1"), *actions.events)
    routers.step(0.2)
    for at, queue in enumerate(routers.queues):
        assert routers.load("a", at) == ((COMMON + OWN) * BLOCK, 1)
        assert not queue.core.prefills.waits("1")
        assert queue.waiting == 0


def test_a_wait_ends_before_the_deadline() -> None:
    routers = Routers()
    routers.submit("0")
    routers.submit("1", deadline_s=1.2)
    routers.step(0.21)
    assert list(routers.placed) == ["0", "1"]
    assert not routers.refused


def test_routers_wait_for_each_others_requests() -> None:
    routers = Routers(2)
    routers.submit("0", at=0)
    routers.submit("1", at=1)
    assert list(routers.placed) == ["0"]
    assert [routers.load("a", at) for at in range(2)] == [((COMMON + 2 * OWN) * BLOCK, 2)] * 2
    routers.tell(0.3, SeqPrefilled("0"))
    assert routers.where() == {"0": "a", "1": "a"}


def test_a_silent_router_delays_the_siblings_of_others_by_a_bounded_time() -> None:
    routers = Routers(2)
    routers.submit("0", 0.0, at=0)
    routers.submit("1", 0.1, at=1)
    routers.submit("2", 0.2, at=0)
    silent = routers.queues.pop()
    assert silent.waiting == 1
    routers.tell(0.3, SeqFree("0"))
    assert list(routers.placed) == ["0"]  # it is the turn of "1"
    routers.step(0.2 + PROMPT_S)
    assert list(routers.placed) == ["0", "2"]


@pytest.mark.parametrize(
    ("settings", "first", "second"),
    [
        ({"await_prefixes": False}, {}, {}),
        ({}, {"common": 20}, {"common": 20}),  # 320 tokens: 64 ms
        ({}, {}, {"common": 0}),
        ({}, {}, {"hints": Hints(priority=1)}),  # engines compute it before the first one
        ({}, {}, {"prefetch": PrefetchTerms(compute=1000)}),
        ({}, {"prefetch": PrefetchTerms(compute=1000)}, {}),
    ],
)
def test_nobody_waits_in_vain(
    settings: dict[str, Any], first: dict[str, Any], second: dict[str, Any]
) -> None:
    routers = Routers(**settings)
    routers.submit("0", **first)
    routers.submit("1", **second)
    assert list(routers.placed) == ["0", "1"]
    assert not routers.placed["1"].prefix_waits


def test_nobody_waits_for_batch_requests() -> None:
    routers = Routers(batch_classes=["batch"])
    routers.submit("0", hints=BATCH)
    routers.step(0.0)
    assert list(routers.placed) == ["0"]
    routers.submit("1")
    assert list(routers.placed) == ["0", "1"]


def test_measured_speed_decides_what_is_worth_a_wait() -> None:
    routers = Routers()
    routers.submit("0")
    routers.tell(0.02, SeqPrefilled("0"), SeqFree("0"))  # 4 µs for a token: all in 20 ms
    assert routers.queues[0].core.prefills.token_s(1) == pytest.approx(0.02 / 4960)
    for name in ("1", "2"):
        blocks = sequence(*range(5000, 5000 + COMMON), *(hash((name, own)) for own in range(OWN)))
        ticket = Ticket(request(name, blocks), 5.0)
        routers._apply(routers.queues[0].submit(ticket, 5.0), 5.0)
    assert list(routers.placed) == ["0", "1", "2"]


def test_a_request_waits_at_most_three_times() -> None:
    routers = Routers()
    for number in range(6):
        routers.submit(str(number), 0.01 * number)
    for number in range(4):
        routers.tell(0.1 + 0.1 * number, SeqFree(str(number)))
    assert len(routers.placed["4"].prefix_waits) == 3
    assert list(routers.placed) == ["0", "1", "2", "3", "4", "5"]


def test_no_more_requests_wait_for_prefixes_than_may_wait_in_the_queue() -> None:
    routers = Routers(queue_limit=2)
    for number in range(5):
        routers.submit(str(number))
    assert routers.queues[0].waiting == 2
    assert list(routers.placed) == ["0", "3", "4"]


def test_a_queued_request_waits_for_a_prefix_when_it_is_its_turn() -> None:
    routers = Routers(queue_threshold=0.5, gather_s=0.0)
    core = routers.queues[0].core
    core.table.prefill_tokens[:2] = 10_000.0
    routers.submit("0")
    routers.submit("1")
    core.table.prefill_tokens[:2] = 0.0
    routers.step(0.5)
    assert list(routers.placed) == ["0"]
    assert routers.queues[0].waiting == 1
    routers.tell(0.7, SeqPrefilled("0"))
    assert routers.where() == {"0": "a", "1": "a"}
    assert routers.placed["1"].wait_s == pytest.approx(0.7)


def test_an_event_of_an_older_router_has_no_wait() -> None:
    routers = Routers()
    routers.tell(0.0, SeqAdd("x", "a", 0, sequence(*range(COMMON)), COMMON * BLOCK, 0, 0, 0.0))
    routers.submit("1")
    assert not routers.placed
    routers.tell(0.4, SeqPrefilled("x"))
    assert routers.where() == {"1": "a"}


def test_a_request_that_is_sent_again_does_not_wait_for_itself() -> None:
    """The reply to the first time was lost."""
    routers = Routers()
    routers.submit("0")
    del routers.placed["0"]
    routers.submit("0", 0.2)
    assert list(routers.placed) == ["0"]
    assert not routers.placed["0"].prefix_waits


def test_many_siblings_of_a_lost_leader_wait_for_the_first_of_them() -> None:
    routers = Routers()
    prefills = routers.queues[0].core.prefills
    for number in range(20):
        routers.submit(f"{number:02}", 0.001 * number)
    routers.tell(0.1, SeqFree("00"))
    assert list(routers.placed) == ["00", "01"]
    assert prefills.successor("01") == "02"
    assert routers.queues[0].waiting == 18


class ApartRouters(Routers):
    """Worker "p", and the busy "q", compute prompts for "d", which only generates."""

    def __init__(self, count: int = 1) -> None:
        super().__init__(count, disagg_tokens=1)
        for queue in self.queues:
            core = queue.core
            for name in "ab":
                core.leave(name)
            core.table.active_blocks[:2] = 0
            core.join(worker("d", serves="decode", needs_handoff=True))
            for name in "pq":
                core.join(worker(name, serves="prefill"))
            core.table.prefill_tokens[core.table.slot("q", 0)] = 8000


def test_a_prefix_that_is_computed_apart_is_known_once_its_prefill_has_ended() -> None:
    routers = ApartRouters(2)
    for number in range(3):
        routers.submit(str(number), at=number % 2)
    assert list(routers.placed) == ["0"]
    routers.tell(0.5, SeqFree(prefill_part("0")))
    assert sorted(routers.placed) == ["0", "1", "2"]
    leader = routers.placed["0"].prefill
    assert leader is not None
    for name in "12":
        found = routers.placed[name].prefill
        assert found is not None
        assert (found.instance, found.overlap[0]) == (leader.instance, COMMON)
        assert [wait.end for wait in routers.placed[name].prefix_waits] == ["computed"]


def test_a_sibling_that_is_freed_while_its_prefix_is_computed_apart_leaves_nothing() -> None:
    routers = ApartRouters(2)
    for number in range(3):
        routers.submit(str(number), at=number % 2)
    routers.tell(0.1, SeqFree("1"))
    for queue in routers.queues:
        prefills = queue.core.prefills
        assert not prefills.waits(prefill_part("1"))
        assert prefills.successor(prefill_part("0")) == "2"
        slots = range(queue.core.table.size)
        assert sum(prefills.waiting_tokens(slot) for slot in slots) == OWN * BLOCK


def test_an_engine_that_stalled_once_does_not_make_others_wait_for_long() -> None:
    prefills = RunningPrefills(300.0)
    for slot, seconds in ((0, 0.2), (0, 200.0), (1, 200.0)):
        prefills.start(SeqAdd("x", "a", 0, b"", 1000, 0, 0, 0.0), slot, 1000.0, 0.0)
        prefills.computed("x", seconds)
    assert prefills.token_s(0) < 2 * 0.2 / 1000
    assert prefills.token_s(1) < 8 * 0.2 / 1000
