"""The workers that load an adapter, and those that are left alone; computed by hand."""

from typing import Any

import pytest
from msgspec.structs import replace
from support.routing import worker

from kvmesh.bus.messages import AdapterFiles, AdapterHost, Instance, Placement
from kvmesh.router.placement.adapter_loads import (
    CARD_S,
    COOL_S,
    DEMAND_S,
    ROOM_COOL_S,
    SPREAD_S,
    AdapterLoad,
    AdapterLoads,
)
from kvmesh.router.state.rank_table import RankTable
from kvmesh.router.state.running_prefills import RunningPrefills
from kvmesh.settings.schema import RouterSettings

POET, CRITIC = "poet@" + "1" * 16, "critic@" + "2" * 16
ANYWHERE = Placement()
WANTED = [(POET, ANYWHERE)]


def files(adapter: str = POET, size: int = 200_000_000, load_s: float = 0.5) -> AdapterFiles:
    return AdapterFiles(adapter=adapter, digest=f"copy of {adapter}", size=size, load_s=load_s)


def host(name: str, *loaded: str, limit: int = 2, **fields: Any) -> Instance:
    """A worker that loads adapters; of those that are loaded, only `removable` ones may leave."""
    offered = [files(each) for each in fields.pop("offers", ())]
    removable = list(fields.pop("removable", ()))
    card = worker(name, adapters=list(loaded), **fields)
    return replace(card, adapters=AdapterHost(limit=limit, removable=removable, files=offered))


class Loads:
    """The decision over some cards."""

    def __init__(self, *cards: Instance, **settings: Any) -> None:
        self.table = RankTable("m")
        self.prefills = RunningPrefills(60.0)
        self.core = AdapterLoads(RouterSettings(**settings), self.table, self.prefills)
        for card in cards:
            self.table.join(card)

    def orders(self, now: float = 0.0) -> list[AdapterLoad]:
        return self.core.missing(WANTED, now)

    def spread(self, now: float, queued: float = 0.0) -> list[AdapterLoad]:
        self.core.note(POET, ANYWHERE, now)
        return self.core.spread({POET: queued}, now)

    def busy(self, name: str, tokens: float) -> None:
        slot = self.table.find_slot(name, 0)
        assert slot is not None
        self.table.cells.prefill_tokens[slot] = tokens

    def fail(self, order: AdapterLoad, now: float, no_room: bool = False) -> None:
        self.core.ended(order, "because", no_room, 0.1, now)


def test_the_cheapest_worker_is_one_that_has_the_files_unless_it_is_busy() -> None:
    loads = Loads(host("near", offers=[POET]), host("far"))
    (order,) = loads.orders()
    assert (order.instance, order.files, order.elsewhere) == ("near", f"copy of {POET}", False)
    assert order.expected_s == pytest.approx(0.5)

    loads = Loads(host("near", offers=[POET]), host("far"))
    loads.busy("near", 50_000)  # ten seconds at the speed of an unknown rank
    (order,) = loads.orders()
    assert (order.instance, order.elsewhere) == ("far", True)
    assert order.expected_s == pytest.approx(1.5), "0.5 s in the engine, 1 s on the network"


def test_only_workers_that_can_load_it_are_asked() -> None:
    other = "poet@" + "9" * 16
    loads = Loads(
        worker("old"),
        host("fixed", limit=0),
        host("full", CRITIC, limit=1, offers=[POET]),
        host("other content", other),
        host("leaving", draining=True),
        host("prefills", serves="prefill"),
    )
    assert not loads.core.may_load(POET, ANYWHERE, 0.0)
    assert loads.orders() == []
    loads.table.join(host("full", CRITIC, limit=1, offers=[POET], removable=[CRITIC]))
    assert loads.core.may_load(POET, ANYWHERE, 0.0)
    assert not loads.core.may_load(POET, Placement(instance="old"), 0.0)
    assert not loads.core.may_load(CRITIC, ANYWHERE, 0.0), "nobody offers its files"
    assert [order.instance for order in loads.orders()] == ["full"]


def test_a_worker_with_room_goes_before_one_that_has_to_make_some() -> None:
    loads = Loads(
        host("full", CRITIC, limit=1, offers=[POET], removable=[CRITIC]),
        host("free", offers=[POET]),
    )
    assert [order.instance for order in loads.orders()] == ["free"]


def test_one_load_of_an_adapter_and_of_a_worker_is_on_its_way() -> None:
    loads = Loads(host("a", offers=[POET, CRITIC]))
    assert len(loads.orders()) == 1
    assert loads.orders(1.0) == []
    assert loads.core.missing([(CRITIC, ANYWHERE)], 1.0) == [], "the worker is loading"
    loads.table.join(host("a", POET, offers=[POET, CRITIC]))
    assert [o.adapter for o in loads.core.missing([(CRITIC, ANYWHERE)], 2.0)] == [CRITIC]


def test_a_lost_order_is_given_up_and_a_card_may_come_late() -> None:
    loads = Loads(host("a", offers=[POET]), adapter_wait_s=20.0)
    (order,) = loads.orders()
    assert loads.orders(20.0 + CARD_S - 0.1) == []
    assert len(loads.orders(20.0 + CARD_S)) == 1
    loads.core.ended(order, "", False, 2.0, 30.0)
    assert loads.orders(30.0 + CARD_S - 0.1) == []
    assert len(loads.orders(30.0 + CARD_S)) == 1


def test_a_failed_worker_is_left_alone_for_longer_each_time() -> None:
    loads = Loads(host("a", offers=[POET]), host("b"))
    (first,) = loads.orders()
    loads.fail(first, 1.0)
    (second,) = loads.orders(1.0)
    assert {first.instance, second.instance} == {"a", "b"}
    loads.fail(second, 2.0)
    assert loads.orders(3.0) == []
    assert not loads.core.may_load(POET, ANYWHERE, 3.0), "both have failed"
    assert loads.core.reason(POET) == "because"
    (again,) = loads.orders(1.0 + COOL_S)
    assert again.instance == first.instance
    loads.fail(again, 17.0)
    assert [o.instance for o in loads.orders(17.5)] == [second.instance]
    loads.fail(second, 18.0)
    assert loads.orders(17.0 + 2 * COOL_S - 0.1) == []
    assert [o.instance for o in loads.orders(17.0 + 2 * COOL_S)] == [first.instance]


def test_a_worker_without_room_is_asked_again_soon_and_requests_wait() -> None:
    loads = Loads(host("a", CRITIC, limit=1, offers=[POET], removable=[CRITIC]))
    (order,) = loads.orders()
    loads.fail(order, 1.0, no_room=True)
    assert loads.orders(1.0) == []
    assert loads.core.may_load(POET, ANYWHERE, 1.0)
    assert len(loads.orders(1.0 + ROOM_COOL_S)) == 1


def test_the_time_of_loads_is_learned_apart_for_near_and_far_files() -> None:
    loads = Loads(host("near", offers=[POET]), host("far"))
    (near,) = loads.orders()
    loads.core.ended(near, "", False, 4.0, 0.0)
    (order,) = loads.orders(CARD_S)
    assert order.instance == "far", "4 s are too long"
    assert order.expected_s == pytest.approx(1.5)
    loads.core.ended(order, "", False, 9.0, CARD_S)
    (order,) = loads.orders(2 * CARD_S)
    assert order.instance == "near"
    assert order.expected_s == pytest.approx(4.0)


def test_one_more_worker_loads_it_if_the_queue_where_it_is_costs_more() -> None:
    loads = Loads(host("has", POET, offers=[POET]), host("free", offers=[POET]))
    assert loads.spread(0.0) == []
    loads.busy("has", 2_000)  # 0.4 s
    assert loads.spread(1.0) == [], "a load takes 0.5 s"
    loads.busy("has", 10_000)  # 2 s
    (order,) = loads.spread(2.0)
    assert order.instance == "free"
    assert order.cause == "requests wait 2.0 s where it is"
    loads.fail(order, 2.5, no_room=True)
    assert loads.spread(2.0 + SPREAD_S - 0.1) == []
    assert len(loads.spread(2.0 + SPREAD_S)) == 1


def test_waiting_requests_count_for_the_queue_and_old_demand_does_not() -> None:
    loads = Loads(host("has", POET, offers=[POET]), host("free", offers=[POET]))
    assert len(loads.spread(0.0, queued=10_000)) == 1
    loads = Loads(host("has", POET, offers=[POET]), host("free", offers=[POET]))
    loads.busy("has", 100_000)
    loads.core.note(POET, ANYWHERE, 0.0)
    assert loads.core.spread({}, DEMAND_S + 0.1) == []
    assert not loads.core.active


def test_a_busier_worker_is_no_relief() -> None:
    loads = Loads(host("has", POET, offers=[POET]), host("busy", offers=[POET]))
    loads.busy("has", 10_000)
    loads.busy("busy", 9_000)
    assert loads.spread(0.0) == []


def test_nothing_is_ordered_if_it_is_switched_off() -> None:
    loads = Loads(host("a", offers=[POET]), load_adapters=False)
    loads.core.note(POET, ANYWHERE, 0.0)
    assert not loads.core.active
    assert not loads.core.may_load(POET, ANYWHERE, 0.0)
