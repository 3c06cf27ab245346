"""A simulated fan-out of weights, and the ways beside it."""

import pytest

from kvmesh.simulator.options import SimulationError
from kvmesh.simulator.virtual_clock import VirtualClock
from kvmesh.simulator.weights.fanout import Fanout
from kvmesh.simulator.weights.links import FairNetwork, LinkEnd
from kvmesh.simulator.weights.options import FanoutOptions, Fault
from kvmesh.simulator.weights.topologies import TOPOLOGIES, central_store, least_time

SIZE, LINK = 1_000_000_000, 1e9


def options(targets: int, **changes: object) -> FanoutOptions:
    given = {"size": SIZE, "link_bytes_per_s": LINK, "discovery_s": 0.0, **changes}
    return FanoutOptions(targets=targets, **given)  # type: ignore[arg-type]


def test_eight_targets_need_little_more_than_one_transfer() -> None:
    given = options(8)
    result = Fanout(given).run()
    assert result.unfinished == 0
    assert least_time(given) <= result.last <= 1.25
    assert result.seed_copies < 1.2


@pytest.mark.parametrize("fault", ["killed", "frozen", "slow", "lying"])
def test_targets_end_although_some_workers_fail(fault: Fault) -> None:
    result = Fanout(options(8, size=300_000_000, faults={fault: 0.25})).run()
    assert result.unfinished == 0


def test_every_topology_takes_one_transfer_for_one_target() -> None:
    for topology in TOPOLOGIES.values():
        assert topology(options(1)).last == pytest.approx(1.0, rel=0.03)


def test_a_central_store_is_shared_by_its_readers() -> None:
    assert central_store(options(8, central_bytes_per_s=2e9)).last == pytest.approx(4.0, rel=0.01)


def test_a_flow_takes_what_others_leave_of_a_link() -> None:
    clock = VirtualClock()
    network = FairNetwork(clock)
    wide, narrow, free = LinkEnd(100.0), LinkEnd(10.0), LinkEnd(100.0)
    ended: dict[str, float] = {}
    network.transfer(wide, narrow, 100, lambda: ended.update(narrow=clock.now))
    network.transfer(wide, free, 900, lambda: ended.update(free=clock.now))
    clock.run()
    assert ended == pytest.approx({"narrow": 10.0, "free": 10.0}, rel=0.02)


def test_impossible_conditions_are_refused() -> None:
    with pytest.raises(SimulationError, match="at least 1"):
        options(0)
    with pytest.raises(SimulationError, match="shares of faults"):
        options(2, faults={"killed": 1.5})
