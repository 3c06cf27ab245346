"""Workloads of the planner's benchmark: open-loop agent requests whose rate follows a curve."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import exp, pi, sin
from pathlib import Path
from random import Random

from kvmesh.simulator.options import WorkerOptions
from kvmesh.worker.enginecore.scheduler import SchedulerLimits
from kvmesh.worker.engines.mock.core import CoreOptions
from kvmesh.workload.formats.registry import load
from kvmesh.workload.model import Round, Session, Workload
from kvmesh.workload.tree import Tree

BLOCK_SIZE = 64
BLOCKS = 16_384
MINUTE = 60.0
HOUR = 3600.0
Rate = Callable[[float], float]


@dataclass(frozen=True)
class Scenario:
    """A workload with its promises, and the fleet that it starts with."""

    name: str
    workload: Workload
    ttft: str = "p95=2s"
    itl: str = "p95=50ms"
    speed: float = 1.0
    initial: int = 2
    most: int = 32
    kinds: tuple[WorkerOptions, ...] = ()
    flat: bool = False
    statics: tuple[int, ...] = ()


def engine(speedup: float = 1.0) -> CoreOptions:
    """The engine that Dynamo's replay was measured with, `speedup` times as fast."""
    return CoreOptions(BLOCKS, SchedulerLimits(block_size=BLOCK_SIZE), speedup=speedup)


def agents(rate: Rate, end: float, most: float, seed: int) -> Workload:
    """Requests of agents with a Poisson rate of `rate` (per second), at most `most`, until `end`.

    Three of four continue one of the 200 latest sessions with the previous output and about 1,500
    new tokens; the others start one from a system prompt of 4,096 tokens, of which there are ten.
    Outputs have 250 tokens in the mean, log-normally distributed.
    """
    rng, tree = Random(seed), Tree()
    systems = [tree.fork() for _ in range(10)]
    sessions: list[Session] = []
    rounds: list[Round] = []
    live: list[tuple[int, int, int]] = []  # session, branch, tokens
    at = 0.0
    while True:
        at += rng.expovariate(most)
        if at >= end:
            break
        if rng.random() * most > rate(at):
            continue
        if live and rng.random() < 0.75:
            place = rng.randrange(len(live))
            number, branch, tokens = live[place]
            tokens += _tokens(rng, 1500, 0.9)
        else:
            place, number = len(live), len(sessions)
            sessions.append(Session(name=f"agent-{number}"))
            branch = tree.fork(rng.choice(systems), 4096)
            tokens = 4096 + _tokens(rng, 4000, 0.9)
            live.append((number, branch, tokens))
        output = _tokens(rng, 250, 0.7)
        rounds.append(
            Round(
                session=number,
                branch=branch,
                output_branch=branch,
                input_tokens=tokens,
                output_tokens=output,
                at_s=at,
            )
        )
        live[place] = number, branch, tokens + output
        if tokens > 60_000:
            live.pop(place)
        elif len(live) > 200:
            live.pop(0)
    return Workload(tree=tree, sessions=sessions, rounds=rounds)


def resampled(source: Workload, rate: Rate, end: float, most: float, seed: int) -> Workload:
    """Sessions drawn from those of `source`, which begin at a Poisson rate of `rate` per second.

    Each keeps its lengths and its waits between rounds, and shares no prompt with others. A round
    begins when the one before has ended: the load depends on the fleet.
    """
    rng, tree = Random(seed), Tree()
    known: list[list[Round]] = [[] for _ in source.sessions]
    for each in source.rounds:
        known[each.session].append(each)
    sessions: list[Session] = []
    rounds: list[Round] = []
    at = 0.0
    while (at := at + rng.expovariate(most)) < end:
        if rng.random() * most > rate(at):
            continue
        branch = tree.fork()
        for place, each in enumerate(rng.choice(known)):
            rounds.append(
                Round(
                    session=len(sessions),
                    branch=branch,
                    output_branch=branch,
                    input_tokens=each.input_tokens,
                    output_tokens=each.output_tokens,
                    at_s=each.at_s if place else at,
                    after=(len(rounds) - 1,) if place else (),
                )
            )
        sessions.append(Session(name=f"session-{len(sessions)}", ends=True))
    return Workload(tree=tree, sessions=sessions, rounds=rounds)


def _tokens(rng: Random, mean: float, sigma: float) -> int:
    return max(int(mean * exp(rng.gauss(0.0, sigma) - sigma * sigma / 2)), 1)


def burst(at: float, grows: float, lasts: float, base: float, factor: float) -> Rate:
    """`base`, and `factor` times as much for `lasts` seconds from `at` on, within `grows`."""

    def rate(time: float) -> float:
        if not at <= time < at + lasts:
            return base
        return base * (1 + (factor - 1) * min((time - at) / grows, 1.0))

    return rate


def on_off(on: float, off: float, period: float) -> Rate:
    """`on` for the first half of each period, then `off`."""
    return lambda time: on if time % period < period / 2 else off


def day(length: float, low: float) -> Rate:
    """A day of `length` seconds: a third is night at `low`; the day has six times as much.

    Two humps, before and after noon, add up to 40 %; mornings and evenings take a twelfth.
    """

    def rate(time: float) -> float:
        share = time / length % 1.0
        if share < 1 / 3:
            return low
        daytime = (share - 1 / 3) * 1.5
        ramp = min(daytime * 8, (1 - daytime) * 8, 1.0)
        return low + 5 * low * ramp * (1 + 0.4 * abs(sin(2 * pi * daytime)))

    return rate


def tracelab(file: Path, seed: int) -> Scenario:
    """Sessions shaped like those of a TraceLab trace, three times as many for 20 minutes."""
    source, _ = load(str(file))
    rate = burst(20 * MINUTE, 2 * MINUTE, 20 * MINUTE, 0.2, 3.0)
    return Scenario(
        "TraceLab sessions",
        resampled(source, rate, HOUR, 0.6, seed),
        initial=2,
        kinds=(WorkerOptions(2, engine(0.1)),),
        statics=(1, 2, 3, 4, 6),
        ttft="p95=5s",
        itl="p95=250ms",
    )


def scenarios(seed: int) -> list[Scenario]:
    """The generated scenarios, on engines of a large model: a tenth of the default speed."""
    large = WorkerOptions(1, engine(0.1))

    def scenario(
        name: str, rate: Rate, end: float, most: float, initial: int, statics: tuple[int, ...] = ()
    ) -> Scenario:
        return Scenario(
            name,
            agents(rate, end, most, seed),
            initial=initial,
            kinds=(replace(large, count=initial),),
            statics=statics,
            flat=name == "flat",
            ttft="p95=5s",
            itl="p95=250ms",
        )

    unlike = scenario(
        "unlike GPUs", burst(15 * MINUTE, 10 * MINUTE, 20 * MINUTE, 0.8, 4.0), HOUR, 3.2, 1
    )
    fast = WorkerOptions(1, engine(0.2), cost=2.5)
    return [
        scenario("flat", lambda _: 1.6, HOUR, 1.6, 4, (2, 3, 4, 5, 6)),
        scenario(
            "burst", burst(20 * MINUTE, MINUTE, 10 * MINUTE, 0.9, 4.0), HOUR, 3.6, 3, (3, 5, 7, 9)
        ),
        scenario("day", day(6 * HOUR, 0.2), 6 * HOUR, 1.45, 1, (2, 3, 4, 5)),
        scenario("on/off", on_off(2.4, 0.2, 20 * MINUTE), 160 * MINUTE, 2.4, 1, (2, 4, 5, 6, 8)),
        replace(unlike, kinds=(large, fast)),
    ]
