"""Candidate fleets: numbers of workers by pool, and the promises that they would keep."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import inf, prod

from kvmesh.planner.capacity.queueing import (
    Latencies,
    ModelledEngine,
    RequestShape,
    latencies,
)
from kvmesh.planner.core.pools import Pool
from kvmesh.planner.core.promises import Promise, covers

Counts = tuple[int, ...]
MOST_VECTORS = 20_000
WARM_UP = 0.15  # of the requests, which meet a fleet that was idle before
RELAXED = 1.5
MOST_WORKERS = 128  # simulated at most: a decision takes a second or two at worst


@dataclass(frozen=True)
class Bounds:
    """Least and most workers of each pool, and devices of all pools together."""

    least: Counts
    most: Counts
    max_devices: float = inf


def efficient_fleets(
    pools: Sequence[Pool], speeds: Sequence[float], bounds: Bounds
) -> list[Counts]:
    """The fleets within bounds of which none has more capacity at the same cost, cheapest first.

    `speeds` are the pools' capacities per worker, relative to each other.
    """
    ranges = [(low, high) for low, high in zip(bounds.least, bounds.most, strict=True)]
    rated: list[tuple[float, float, Counts]] = []
    for counts in _vectors(ranges):
        devices = sum(n * pool.devices for n, pool in zip(counts, pools, strict=True))
        if devices <= bounds.max_devices:
            cost = sum(n * pool.cost for n, pool in zip(counts, pools, strict=True))
            capacity = sum(n * speed for n, speed in zip(counts, speeds, strict=True))
            rated.append((cost, -capacity, counts))
    rated.sort()
    chosen: list[Counts] = []
    most = -1.0
    for _, capacity, counts in rated:
        if -capacity > most:
            most = -capacity
            chosen.append(counts)
    return chosen


def _vectors(ranges: Sequence[tuple[int, int]]) -> Iterator[Counts]:
    """The combinations of numbers within the ranges; with too many, large ones are left out."""
    size = prod(max(high - low + 1, 0) for low, high in ranges)
    most = inf if size <= MOST_VECTORS else MOST_VECTORS ** (1 / len(ranges))
    return product(*(_numbers(low, high, most) for low, high in ranges))


def _numbers(low: int, high: int, most: float) -> list[int]:
    """The numbers from low to high; if more than `most`, evenly at first, then by equal ratios."""
    if high - low < most:
        return list(range(low, high + 1))
    dense = max(int(most / 2), 1)
    first = low + dense
    ratio = (high / first) ** (1 / dense)
    spaced = {int(first * ratio**step) for step in range(dense)}
    return sorted({*range(low, first), *spaced, high})


@dataclass(frozen=True)
class Kept:
    """The share of requests that keep each promise, and the quantile that it promises, seconds."""

    shares: tuple[float, ...]
    quantiles: tuple[float, ...]
    busy: float


@dataclass(frozen=True)
class Aim:
    """A promise, and the requests that it covers: their numbers, and the bound of each in seconds.

    `reachable` is False if too few of them keep the promise even when each is alone on a worker.
    """

    promise: Promise
    numbers: Sequence[int]
    bounds: Sequence[float]
    reachable: bool


def aims(
    shapes: Sequence[RequestShape], kinds: Sequence[ModelledEngine], promises: Sequence[Promise]
) -> list[Aim]:
    """The promises as bounds of each request.

    Where even an idle worker keeps a promise for too few requests, the bound of a request is at
    least RELAXED times its latency on the best idle worker.
    """
    idle = {
        "ttft": [min(_idle_ttft(shape, kind) for kind in kinds) for shape in shapes],
        "itl": [min(kind.times.decode(1, shape.prompt) for kind in kinds) for shape in shapes],
        "queue": [0.0] * len(shapes),
    }
    found = []
    for promise in promises:
        covered, quantile = covers(promise, promises), promise.quantile
        alone = idle[promise.metric]
        numbers = [n for n, shape in enumerate(shapes) if covered(shape.request_class)]
        kept = sum(alone[n] <= promise.seconds for n in numbers) / max(len(numbers), 1)
        bounds = [promise.seconds] * len(numbers)
        if numbers and kept < quantile + (1 - quantile) / 2:
            bounds = [max(promise.seconds, RELAXED * alone[n]) for n in numbers]
        found.append(Aim(promise, numbers, bounds, not numbers or kept >= quantile))
    return found


def fulfilment(
    shapes: Sequence[RequestShape], workers: Sequence[ModelledEngine], aimed: Sequence[Aim]
) -> Kept:
    """The shares of requests that keep each promise on a fleet, simulated on `shapes`.

    Of more than MOST_WORKERS workers an even part is simulated, at its part of the load.
    """
    if len(workers) > MOST_WORKERS:
        share = MOST_WORKERS / len(workers)
        workers = [workers[int(number / share)] for number in range(MOST_WORKERS)]
        shapes = [replace(shape, at=shape.at / share) for shape in shapes]
    return kept_promises(latencies(shapes, workers), aimed, len(shapes))


def kept_promises(found: Latencies, aimed: Sequence[Aim], count: int) -> Kept:
    """The promises that `count` requests have kept, without the first ones, which met idle workers.

    `found` and the numbers of the aims are in the order of arrival.
    """
    skipped = int(count * WARM_UP)
    metrics = {"ttft": found.ttft, "itl": found.itl, "queue": found.queue}
    shares, quantiles = [], []
    for aim in aimed:
        values = metrics[aim.promise.metric]
        pairs = [
            (values[number], bound)
            for number, bound in zip(aim.numbers, aim.bounds, strict=True)
            if number >= skipped and values[number] >= 0
        ]
        shares.append(sum(v <= bound for v, bound in pairs) / len(pairs) if pairs else 1.0)
        quantiles.append(_quantile([value for value, _ in pairs], aim.promise.quantile))
    return Kept(tuple(shares), tuple(quantiles), found.busy)


def _quantile(values: list[float], quantile: float) -> float:
    if not values:
        return 0.0
    return sorted(values)[min(int(len(values) * quantile), len(values) - 1)]


def _idle_ttft(shape: RequestShape, kind: ModelledEngine) -> float:
    """Seconds to the first token of a request that is alone on a worker; inf if it never fits."""
    if shape.prompt > kind.kv_tokens:
        return inf
    full, rest = divmod(shape.uncached, kind.step_tokens)
    return full * kind.times.prefill(kind.step_tokens) + kind.times.prefill(rest)


def prefill_only(shape: RequestShape) -> RequestShape:
    """The part of a request that a prefill worker computes."""
    return replace(shape, output=1)


def decode_only(shape: RequestShape) -> RequestShape:
    """The part of a request that is left to a decode worker."""
    return replace(shape, uncached=1)


def part_of(
    shapes: list[RequestShape], serves: Sequence[str], splits: bool, disagg_tokens: int
) -> list[RequestShape]:
    """The part of the requests that workers of a role compute.

    `splits`: prompts with at least `disagg_tokens` tokens to compute go to prefill workers.
    """
    if "prefill" in serves:
        return [prefill_only(shape) for shape in shapes if shape.uncached >= disagg_tokens]
    if not splits:
        return shapes
    return [decode_only(s) if s.uncached >= disagg_tokens else s for s in shapes]


def relative_speeds(kinds: Sequence[ModelledEngine], shapes: Sequence[RequestShape]) -> list[float]:
    """The capacity of a worker of each kind for the mean request; that of the fastest is 1."""
    mean_uncached = sum(s.uncached for s in shapes) / len(shapes)
    mean_output = sum(s.output for s in shapes) / len(shapes)
    mean_kv = sum(s.prompt + s.output / 2 for s in shapes) / len(shapes)
    speeds = []
    for kind in kinds:
        # a batch of 16 in the steady state stands for the balance of prefill and decode
        step = kind.times.decode(16, 16 * mean_kv) / 16
        speeds.append(1.0 / (kind.times.prefill(int(mean_uncached)) + mean_output * step))
    fastest = max(speeds)
    return [speed / fastest for speed in speeds]
