"""Numbers of workers that serve as those of another pool than the one of their place."""

from kvmesh.planner.connectors.interface import PoolState
from kvmesh.planner.core.pools import parse_pools
from kvmesh.planner.homes import ELSEWHERE, Homes

POOLS = "pre:serves=prefill,kind=gpu,dec:serves=decode,kind=gpu,other"
PLACE = {
    "pre": PoolState(3, ("p-0", "p-1", "p-2")),
    "dec": PoolState(2, ("d-0", "d-1")),
    "other": PoolState(1, ("o-0",)),
}
OWN = {name: pool for pool, state in PLACE.items() for name in state.workers}


def homes(**serving: str) -> Homes:
    """The workers as they are at home, but those in `serving`, such as p_2="dec"."""
    made = Homes(parse_pools([POOLS]))
    roles = OWN | {name.replace("_", "-"): pool for name, pool in serving.items()}
    made.observe(PLACE, roles.get)
    return made


def test_numbers_at_home_are_those_of_the_place() -> None:
    made = homes()
    assert made.as_served() == {"pre": 3, "dec": 2, "other": 1}
    assert made.at_place({"pre": 2}, ["p-1"]) == {"pre": 2}
    assert made.knows("p-1")
    assert not made.knows("p-9")


def test_a_switch_changes_no_number_of_the_place() -> None:
    made = homes()
    made.switched("p-2", "dec")
    assert made.as_served() == {"pre": 2, "dec": 3, "other": 1}
    assert made.at_place({"pre": 2, "dec": 3}, []) == {}
    assert made.at_place({"pre": 2, "dec": 4}, []) == {"dec": 3}
    assert made.observe(PLACE, (OWN | {"p-2": "dec"}).get) == []


def test_a_worker_that_stops_leaves_its_home() -> None:
    made = homes(p_2="dec")
    assert made.at_place({"dec": 2}, ["p-2"]) == {"pre": 2}
    assert made.at_place({"dec": 1}, ["p-2", "d-1"]) == {"pre": 2, "dec": 1}


def test_a_worker_that_is_back_in_its_first_role_is_told_once() -> None:
    made = homes(p_2="dec")
    assert made.observe(PLACE, OWN.get) == [("dec", "pre")]
    assert made.observe(PLACE, OWN.get) == []
    made.switched("p-2", "dec")
    made.switched("p-2", "pre")
    assert made.as_served() == {"pre": 3, "dec": 2, "other": 1}


def test_a_worker_that_is_gone_counts_at_home() -> None:
    made = homes(p_2="dec")
    present = {name: pool for name, pool in OWN.items() if name != "p-2"}
    assert made.observe(PLACE, present.get) == [("dec", "pre")]
    assert made.observe({"dec": PLACE["dec"]}, OWN.get) == []


def test_a_worker_of_another_kind_stays_at_home() -> None:
    assert homes(o_0="dec").as_served() == {"pre": 3, "dec": 2, "other": 1}


def test_a_worker_that_serves_what_no_pool_does_counts_nowhere() -> None:
    made = homes(d_1=ELSEWHERE)
    assert made.as_served() == {"pre": 3, "dec": 1, "other": 1}
    assert made.at_place({"dec": 2}, []) == {"dec": 3}
    assert made.at_place({"dec": 0}, ["d-0"]) == {"dec": 1}
    assert made.observe(PLACE, OWN.get) == [(ELSEWHERE, "dec")]


def test_workers_that_are_not_ready_are_named_whatever_the_others_serve() -> None:
    made = homes(p_2="dec")
    assert made.starting(["pre", "other"], lambda name: name != "p-1") == ["p-1"]
    assert made.starting([], lambda _: False) == []
