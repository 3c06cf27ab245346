"""Recent requests as they would arrive under another level of load."""

from itertools import cycle, islice
from random import Random

from kvmesh.planner.capacity.queueing import RequestShape
from kvmesh.planner.core.arrivals import LoadSeries
from kvmesh.planner.core.traffic import ObservedTraffic

MOST_SHAPES = 1500
ENOUGH = 400  # requests of the steady part that suffice
SEED = 0


def scenario(
    traffic: ObservedTraffic,
    series: LoadSeries,
    level: float,
    fewest: int = 0,
    cold: bool = False,
) -> list[RequestShape]:
    """The latest requests with arrivals from 0 on, as dense as `level` (arrivals per second).

    Enough requests of the steady part of the load keep their gaps, scaled. Otherwise the gaps are
    drawn with the dispersion of that part (a gamma renewal process), from one seed: gaps of a ramp
    or a burst of the past would count as variation of today. Fewer than `fewest` are repeated.
    `cold` includes the prompt tokens that were computed because a worker was new.
    """
    requests = traffic.latest(MOST_SHAPES)
    if not requests or level <= 0:
        return []
    steady = [r for r in requests if r.arrived >= series.steady_since]
    if len(steady) >= max(ENOUGH, fewest) and series.level > 0:
        scale = series.level / level
        first = steady[0].arrived
        return [traffic.shape(r, (r.arrived - first) * scale, cold) for r in steady]
    rng, shape = Random(SEED), 1 / series.dispersion
    at = 0.0
    shapes: list[RequestShape] = []
    for request in islice(cycle(requests), max(len(requests), fewest)):
        at += rng.gammavariate(shape, 1 / (shape * level))
        shapes.append(traffic.shape(request, at, cold))
    return shapes
