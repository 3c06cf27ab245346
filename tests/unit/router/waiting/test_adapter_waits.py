"""Requests that wait for their adapter, from the queue's point of view."""

from random import Random
from typing import Any

from msgspec.structs import replace
from support.routing import request, sequence, worker

from kvmesh.bus.messages import (
    AdapterFiles,
    AdapterHost,
    Decision,
    Instance,
    PrefetchTerms,
    Refused,
    SeqFree,
)
from kvmesh.router.placement.router import RouterCore
from kvmesh.router.waiting.queue import PlacementQueue, QueueActions
from kvmesh.router.waiting.ticket import Ticket
from kvmesh.settings.schema import RouterSettings

POET = "poet@" + "1" * 16
PROMPT = sequence(1, 2, 3)


def host(name: str, *loaded: str) -> Instance:
    files = [AdapterFiles(adapter=POET, digest="copy", size=1000)]
    card = worker(name, adapters=list(loaded))
    return replace(card, adapters=AdapterHost(limit=2, files=files))


class Router:
    """A queue over some cards."""

    def __init__(self, *cards: Instance, **settings: Any) -> None:
        options = {"predicted_ttl_s": 0.0, "gather_s": 0.0, **settings}
        self.core = RouterCore("m", "r", RouterSettings(**options), Random(7))
        for card in cards:
            self.core.join(card)
        self.queue = PlacementQueue(self.core, "r")

    def submit(self, name: str, now: float = 0.0, **fields: Any) -> tuple[Ticket, QueueActions]:
        ticket = Ticket(request(name, PROMPT, adapter=POET, deadline_s=100.0, **fields), now)
        return ticket, self.queue.submit(ticket, now)


def test_a_request_waits_until_the_card_lists_its_adapter() -> None:
    router = Router(host("a"))
    ticket, actions = router.submit("one")
    assert (actions.parked, actions.done) == ([ticket], [])
    (order,) = actions.loads
    assert (order.instance, order.adapter) == ("a", POET)
    second, actions = router.submit("two", 0.5)
    assert actions.loads == [], "one load is on its way"
    assert router.queue.waiting == 2
    assert router.queue.place_ready(1.0).done == []
    router.core.join(host("a", POET))
    actions = router.queue.place_ready(2.0)
    assert actions.done == [ticket, second]
    assert isinstance(ticket.result, Decision)
    assert ticket.result.note == "waited 2.00 s until a worker had loaded poet"
    assert ticket.result.chosen.instance == "a"
    assert router.queue.waiting == 0


def test_gathered_requests_wait_too() -> None:
    router = Router(host("a"), gather_s=0.002)
    ticket, actions = router.submit("one")
    assert actions.loads == []
    actions = router.queue.place_gathered(0.002)
    assert ticket in actions.parked
    (order,) = actions.loads
    assert router.queue.expire(0.1).loads == []
    assert order.adapter == POET
    router.core.join(host("a", POET))
    router.queue.place_ready(0.2)
    assert isinstance(ticket.result, Decision)


def test_a_wait_is_bounded_and_the_refusal_says_why() -> None:
    router = Router(host("a"), adapter_wait_s=5.0)
    ticket, actions = router.submit("one")
    router.core.adapters.ended(actions.loads[0], "a: no room", True, 0.1, 1.0)
    assert router.queue.expire(4.9).done == []
    assert router.queue.expire(5.0).done == [ticket]
    assert isinstance(ticket.result, Refused)
    assert ticket.result.code == "no_workers"
    expected = "no worker has loaded the adapter 'poet' within 5 s: a: no room"
    assert ticket.result.reason == expected


def test_a_request_is_refused_at_once_if_all_workers_have_failed() -> None:
    router = Router(host("a"))
    ticket, actions = router.submit("one")
    router.core.adapters.ended(actions.loads[0], "a: its rank is too large", False, 0.1, 1.0)
    assert router.queue.expire(1.1).done == [ticket]
    late, actions = router.submit("late", 2.0)
    assert actions.done == [late]
    assert isinstance(late.result, Refused)
    assert "no worker of this model has the adapter" in late.result.reason


def test_the_request_of_a_lost_worker_waits_for_another_one_to_load() -> None:
    router = Router(host("a", POET), host("b"))
    ticket, actions = router.submit("one")
    assert actions.done == [ticket]
    router.core.leave("a")
    second, actions = router.submit("two", 1.0)
    assert [order.instance for order in actions.loads] == ["b"]
    router.core.join(host("b", POET))
    assert router.queue.place_ready(2.0).done == [second]


def test_a_queued_request_waits_if_its_adapter_leaves() -> None:
    router = Router(host("a", POET), queue_threshold=0.0001)
    slot = router.core.table.find_slot("a", 0)
    assert slot is not None
    router.core.table.cells.prefill_tokens[slot] = 100_000
    ticket, actions = router.submit("one")
    assert ticket.waiting is not None
    for event in actions.events:
        router.queue.apply(event, 0.0, own=True)
    router.core.join(host("a"))
    actions = router.queue.place_ready(1.0)
    assert [event for event in actions.events if isinstance(event, SeqFree)], "for the replicas"
    assert ticket.result is None
    router.core.table.cells.prefill_tokens[slot] = 0
    router.core.join(host("a", POET))
    assert router.queue.place_ready(2.0).done == [ticket]


def test_cancelled_requests_and_prefetches_do_not_wait() -> None:
    router = Router(host("a"))
    router.submit("one")
    assert router.queue.cancel("one").events == [SeqFree("one")]
    assert router.queue.waiting == 0
    router.core.join(host("a"))
    ticket, actions = router.submit("ahead", prefetch=PrefetchTerms())
    assert actions.done == [ticket]
    assert isinstance(ticket.result, Refused)
