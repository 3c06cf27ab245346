"""The answer to a planner's question: its candidate fleets, simulated one after another."""

from collections.abc import Callable, Sequence
from functools import partial
from math import inf, isfinite, isnan

from kvmesh.bus.messages import FleetAnswer, FleetCandidate, FleetQuestion, SimulatedPool
from kvmesh.oracle.warm_up import WarmedRequests
from kvmesh.planner.capacity.queueing import Latencies, ModelledEngine, RequestShape
from kvmesh.planner.capacity.step_times import FittedStepTimes
from kvmesh.planner.core.fleets import Aim, aims, kept_promises
from kvmesh.planner.core.promises import Promise
from kvmesh.settings.schema import RouterSettings
from kvmesh.simulator.mesh import Simulation
from kvmesh.simulator.options import SimulationOptions, WorkerOptions
from kvmesh.step_times.interface import DecodeLoad
from kvmesh.worker.enginecore.scheduler import SchedulerLimits
from kvmesh.worker.engines.mock.core import CoreOptions
from kvmesh.workload.capture import CapturedRound
from kvmesh.workload.errors import WorkloadError

FEWEST = 50
MOST_WORKERS = 256
MOST_FLEETS = 16
MOST_LEVEL = 1e6
MOST_BUDGET_S = 600.0
MOST_TOKENS = float(1 << 28)  # a simulated worker takes memory for its blocks
METRICS = {"ttft", "itl", "queue"}
SIZES = ("step_tokens", "max_sequences", "kv_tokens")
RESERVE = 0.8  # of the budget that the expected work may take
FIRST_RATE = 500.0  # requests simulated per second, until a rate is known


class QuestionError(Exception):
    """A question that cannot be answered; the message says why."""


class _BudgetSpent(Exception):
    """The budget has ended within a simulation."""


class LinearStepModel:
    """The step times of a question as a step model of the mock engine."""

    def __init__(self, times: FittedStepTimes) -> None:
        self._times = times

    def prefill(self, tokens: int) -> float:
        return self._times.prefill(tokens)

    def decode(self, load: DecodeLoad) -> float:
        return self._times.decode(load.sequences, load.active_tokens)


def answer(
    question: FleetQuestion,
    captured: Sequence[CapturedRound],
    router: RouterSettings,
    rate: float,
    clock: Callable[[], float],
) -> FleetAnswer:
    """Simulate the fleets on `captured`, sorted by arrival, until the budget is used.

    `rate` is the number of requests that a second of simulation is expected to take; the window is
    cut to its latest part accordingly. `clock` gives seconds. Raises QuestionError.
    """
    started = clock()
    check_question(question)
    most = max(int(rate * RESERVE * question.budget_s / len(question.fleets)), FEWEST)
    captured = captured[-most:]
    if len(captured) < FEWEST:
        raise QuestionError(
            f"{len(captured)} requests of {question.model} have ended in this window, fewer than"
            f" {FEWEST}"
        )
    deadline = started + question.budget_s
    candidates: list[FleetCandidate] = []
    try:
        scene = _Scene(question, captured, router)
        for fleet in question.fleets:
            if clock() + scene.slowest_s > deadline:
                break
            candidates.append(scene.evaluate(fleet, deadline, clock))
    except _BudgetSpent:
        pass
    except WorkloadError as error:
        raise QuestionError(str(error)) from error
    if not candidates:
        raise QuestionError(
            f"{len(captured)} requests take more than {question.budget_s:g} s on the first fleet"
        )
    return FleetAnswer(candidates=candidates, requests=len(captured), seconds=clock() - started)


def check_question(question: FleetQuestion) -> None:
    """Raise QuestionError for one that no requests could answer."""
    numbers = [
        ("level", question.level, MOST_LEVEL),
        ("budget_s", question.budget_s, MOST_BUDGET_S),
        *(("seconds", promise.seconds, inf) for promise in question.promises),
        *(("quantile", promise.quantile, 1.0) for promise in question.promises),
        *((size, getattr(p, size), MOST_TOKENS) for p in question.pools for size in SIZES),
    ]
    for name, value, most in numbers:
        if not 0 < value <= most:
            raise QuestionError(f"{name} is {value:g}, not above 0 and at most {most:g}")
    for pool in question.pools:
        if not all(isfinite(seconds) and seconds >= 0 for seconds in (*_seconds(pool), pool.cost)):
            raise QuestionError(f"pool {pool.name} has a step time or a cost below 0 or infinite")
    if wrong := {promise.metric for promise in question.promises} - METRICS:
        raise QuestionError(f"unknown metrics: {', '.join(sorted(wrong))}")
    if not 1 <= len(question.fleets) <= MOST_FLEETS:
        raise QuestionError(f"{len(question.fleets)} fleets, not 1 to {MOST_FLEETS}")
    for fleet in question.fleets:
        if len(fleet) != len(question.pools):
            raise QuestionError(f"fleet {fleet} has not one number for each pool")
        if min(fleet, default=0) < 0 or not 1 <= sum(fleet) <= MOST_WORKERS:
            raise QuestionError(f"fleet {fleet} does not have 1 to {MOST_WORKERS} workers")


class _Scene:
    """The parts of a question that its fleets share."""

    def __init__(
        self, question: FleetQuestion, captured: Sequence[CapturedRound], router: RouterSettings
    ) -> None:
        sizes = {each.decision.block_size for each in captured}
        if len(sizes) != 1 or not min(sizes):
            raise QuestionError(f"the requests have no common block size: {sorted(sizes)}")
        self._block_size = sizes.pop()
        self._question = question
        self._router = router
        self._captured = captured
        self._span = captured[-1].arrival - captured[0].arrival
        if self._span <= 0:
            raise QuestionError("all requests arrived at once")
        self._speed = question.level * self._span / (len(captured) - 1)
        self._kinds = [_kind(pool) for pool in question.pools]
        self._aims = self._aimed()
        self._warmed = WarmedRequests(captured)
        self.slowest_s = 0.0

    def _aimed(self) -> list[Aim]:
        shapes = [
            RequestShape(
                at=(each.arrival - self._captured[0].arrival) / self._speed,
                uncached=max(each.decision.tokens - each.outcome.cached_tokens, 1),
                prompt=each.decision.tokens,
                output=max(each.outcome.output_tokens, 1),
                request_class=each.decision.hints.fair_class or each.decision.hints.tenant or "",
            )
            for each in self._captured
        ]
        promises = [
            Promise(p.metric, p.quantile, p.seconds, request_class=p.request_class)
            for p in self._question.promises
        ]
        return aims(shapes, self._kinds, promises)

    def evaluate(
        self, fleet: Sequence[int], deadline: float, clock: Callable[[], float]
    ) -> FleetCandidate:
        """Simulate one fleet; raises _BudgetSpent at `deadline`, a time of `clock`."""
        began = clock()
        pools = self._question.pools
        groups = tuple(
            WorkerOptions(count, self._core(pool), cost=pool.cost)
            for pool, count in zip(pools, fleet, strict=True)
            if count
        )
        step = max(pool.step_tokens for pool in pools)
        token_s = max(kind.times.prefill(step) / step for kind in self._kinds)
        workload, warm_up_s = self._warmed.workload(self._speed, token_s, sum(fleet))

        def check() -> None:
            if clock() > deadline:
                raise _BudgetSpent

        options = SimulationOptions(router=self._router, workers=groups, speed=self._speed)
        simulation = Simulation(workload, options, check)
        busy = [0.0, 0.0]
        end = warm_up_s + self._span / self._speed
        for place, at in enumerate((warm_up_s, end)):
            simulation.clock.at(at, partial(_sample, simulation, busy, place))
        simulation.run()
        if not busy[1]:  # every request had ended before
            _sample(simulation, busy, 1)
        kept = kept_promises(
            _latencies(simulation, len(self._captured)), self._aims, len(self._captured)
        )
        names = [str(aim.promise) for aim in self._aims]
        self.slowest_s = max(self.slowest_s, clock() - began)
        return FleetCandidate(
            workers={pool.name: count for pool, count in zip(pools, fleet, strict=True)},
            cost=sum(pool.cost * count for pool, count in zip(pools, fleet, strict=True)),
            shares=dict(zip(names, kept.shares, strict=True)),
            quantiles=dict(zip(names, kept.quantiles, strict=True)),
            busy=min((busy[1] - busy[0]) / (sum(fleet) * (end - warm_up_s)), 1.0),
            evaluated_by="simulation",
        )

    def _core(self, pool: SimulatedPool) -> CoreOptions:
        return CoreOptions(
            blocks=max(pool.kv_tokens // self._block_size, 1),
            limits=SchedulerLimits(
                block_size=self._block_size,
                max_sequences=pool.max_sequences,
                max_batched_tokens=pool.step_tokens,
            ),
            model=LinearStepModel(_times(pool)),
        )


def _times(pool: SimulatedPool) -> FittedStepTimes:
    return FittedStepTimes(*_seconds(pool))


def _seconds(pool: SimulatedPool) -> tuple[float, float, float, float]:
    return pool.step_s, pool.prefill_step_s, pool.token_s, pool.kv_token_s


def _kind(pool: SimulatedPool) -> ModelledEngine:
    return ModelledEngine(_times(pool), pool.step_tokens, pool.max_sequences, pool.kv_tokens)


def _sample(simulation: Simulation, busy: list[float], place: int) -> None:
    """Store the busy seconds of all workers until now."""
    busy[place] = sum(each.core.counters.busy_s for each in simulation.workers.values())


def _latencies(simulation: Simulation, count: int) -> Latencies:
    """The latencies of the first `count` rounds; infinite for those that were not served."""
    records = simulation.records
    ttft, itl, queue = [inf] * count, [-1.0] * count, [inf] * count
    for number in range(count):
        first, output = records.first_token[number], records.output[number]
        if records.error[number] is not None or isnan(first):
            continue
        ttft[number] = first - records.arrived[number]
        queue[number] = records.placed[number] - records.arrived[number]
        if output > 1:
            itl[number] = (records.ended[number] - first) / (output - 1)
    return Latencies(ttft, itl, queue, 0.0)
