"""The demand of one model: forecasts count for the burst reserve only where they were made."""

from kvmesh.planner.core.demand import Demand
from kvmesh.planner.core.promises import Promise

PHASE_S = 600.0
PROMISES = [Promise("ttft", 0.95, 5.0)]


def bursts(demand: Demand, number: int) -> None:
    """Two requests per second in the second half of period `number`, none in the first."""
    begin = (2 * number + 1) * PHASE_S
    for place in range(int(2 * PHASE_S)):
        demand.arrived(begin + place / 2)


def test_a_planner_that_was_frozen_has_predicted_no_burst() -> None:
    demand = Demand("constant")
    for number in range(4):
        bursts(demand, number)
        now = 2 * (number + 1) * PHASE_S - 1.0
        demand.advance(now)  # the first decision since the last burst
        assert demand.forecast(60.0) > 1.5
    assert demand.reserved(60.0, 60.0, PROMISES) > 1.0
