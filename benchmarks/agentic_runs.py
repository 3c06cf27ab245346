"""One run of a workload of agents under one policy, and its figures."""

from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import msgspec
import numpy as np
from agentic_orders import Belady, CostRule, Idleness, Order, OrderedRun, Recency, ToolTimes
from common import median, percentile
from numpy.typing import NDArray

from kvmesh.frontend.sessions.speculation_gate import SpeculationMode
from kvmesh.settings.schema import KvbmSettings, MockSettings, RouterSettings, WorkerSettings
from kvmesh.simulator.mesh import Simulation
from kvmesh.simulator.nodes.options import NodeOptions, node_options
from kvmesh.simulator.options import SimulationOptions, WorkerOptions
from kvmesh.simulator.report.figures import Figures, figures
from kvmesh.step_times.interface import DecodeLoad, StepModel
from kvmesh.worker.enginecore.scheduler import SchedulerLimits
from kvmesh.worker.enginecore.sequence import Sequence
from kvmesh.worker.enginecore.simulated_tiers import LowerTier, TierOptions
from kvmesh.worker.engines.mock.core import CoreOptions, MockCore
from kvmesh.worker.engines.mock.timing import PolynomialStepModel
from kvmesh.workload.generate.agents import AgentGenerator
from kvmesh.workload.generate.distributions import Quantiles
from kvmesh.workload.generate.profile import Agent, AgentProfile, ToolProfile
from kvmesh.workload.model import Workload

BLOCK = 256
ENDLESS_TIMES = 64
MOST_FAILED = 0.01  # of all rounds, for want of a placement before their deadline
GIB = 1 << 30


@dataclass(frozen=True)
class OfMemory:
    """The step times of an engine with `tokens` of memory, whatever memory it has."""

    model: StepModel
    tokens: int

    def prefill(self, tokens: int) -> float:
        return self.model.prefill(tokens)

    def decode(self, load: DecodeLoad) -> float:
        return self.model.decode(DecodeLoad(load.sequences, load.active_tokens, self.tokens))


@dataclass(frozen=True)
class Scene:
    """A fleet under a load. `memory` is in tokens per engine, `host` in multiples of it.

    Each engine and host memory are connected by a link of `host_bytes_per_s`. `speed` divides the
    waits; `engines` has how many times as fast as the default each engine is. Requests wait for a
    placement for `deadline_s` at most.
    """

    memory: int
    engines: tuple[float, ...] = (1.0,) * 4
    speed: float = 1.0
    host: int = 0
    host_bytes_per_s: float = 25e9
    deadline_s: float = 7200.0

    def pooled(self) -> "Scene":
        """One engine with the memory and the speed of all."""
        return replace(
            self, memory=self.memory * len(self.engines), engines=(float(sum(self.engines)),)
        )

    def node(self) -> NodeOptions:
        """One node with a block manager over the memory of all hosts."""
        settings, worker = MockSettings(), WorkerSettings()
        tokens = self.host * self.memory * len(self.engines)
        memory = KvbmSettings(host_bytes=tokens * settings.kv_bytes_per_token)
        options = node_options(1, memory, settings, worker, settings.transfer_bytes_per_s)
        return replace(options, links=replace(options.links, host=self.host_bytes_per_s))

    def options(self, router: RouterSettings, seed: int, times: int = 1) -> SimulationOptions:
        """The fleet with `times` the memory, at the step times of the present one."""
        blocks = self.memory // BLOCK
        core = CoreOptions(
            blocks * times,
            SchedulerLimits(block_size=BLOCK),
            OfMemory(PolynomialStepModel(), blocks * BLOCK),
            TierOptions(host_blocks=self.host * blocks, host_bytes_per_s=self.host_bytes_per_s),
        )
        speeds = Counter(self.engines)
        return SimulationOptions(
            router=router,
            workers=tuple(WorkerOptions(n, replace(core, speedup=s)) for s, n in speeds.items()),
            speed=self.speed,
            seed=seed,
            deadline_s=self.deadline_s,
        )


@dataclass(frozen=True)
class Policy:
    """The part of the mesh that a row compares.

    With a `prefill_weight` routers place by the linear cost, as Dynamo's do. Engines that are not
    `told` know no sessions. `order` makes the order of eviction; None is the
    mesh's own. `ttl_s` is a time to live with which clients mark each prompt. `filtered`: lower
    tiers take only blocks that were used before. `ahead` is the mode of speculative prefill.
    Routers make `forecasts` of returns, with `reports` from the agents' harnesses. With
    `shared`, a block manager holds the memory of all hosts for all engines.
    """

    name: str
    told: bool = True
    order: Callable[[Simulation], Order] | None = None
    ttl_s: float = 0.0
    pooled: bool = False
    endless: bool = False
    filtered: bool = False
    ahead: SpeculationMode = "off"
    forecasts: bool = False
    prefill_weight: float | None = None
    reports: bool = False
    shared: bool = False


def _recency(_: Simulation) -> Order:
    return Recency()


def _belady(_: Simulation) -> Order:
    return Belady()


def _continuum(simulation: Simulation) -> Order:
    core = simulation.options.workers[0].core
    return ToolTimes(prefill_of(core), core.blocks * core.limits.block_size)


def _mori(_: Simulation) -> Order:
    return Idleness()


def _cost_rule(simulation: Simulation) -> Order:
    return CostRule(prefill_of(simulation.options.workers[0].core))


def prefill_of(core: CoreOptions) -> Callable[[int], float]:
    """Seconds in which an engine computes so many tokens, in full steps."""
    step = core.limits.max_batched_tokens
    full_s = core.model.prefill(step)

    def seconds(tokens: int) -> float:
        steps, rest = divmod(tokens, step)
        return (steps * full_s + core.model.prefill(rest)) / core.speedup

    return seconds


LINEAR = Policy("LRU, linear cost", told=False, order=_recency, prefill_weight=3.0)
LRU = Policy("LRU, told nothing", told=False, order=_recency)
TOLD = Policy("LRU, told what ended", order=_recency)
SHORT = Policy("time to live 5 min", told=False, ttl_s=300.0)
LONG = Policy("time to live 1 h", told=False, ttl_s=3600.0)
CONTINUUM = Policy("Continuum's times to live", order=_continuum)
MORI = Policy("MORI's idleness", order=_mori)
COST = Policy("cost rule", order=_cost_rule)
OURS = Policy("kvmesh", forecasts=True)
AHEAD = Policy("kvmesh, speculative prefill", ahead="auto", forecasts=True)
SHARED = Policy("kvmesh, shared block manager", forecasts=True, shared=True)
REPORTED = Policy("kvmesh, harnesses report tools", forecasts=True, reports=True)
FILTERED = Policy("LRU, only reused blocks below", told=False, order=_recency, filtered=True)
BELADY = Policy("Bélády", order=_belady)
BELADY_POOLED = Policy("Bélády, one pooled engine", order=_belady, pooled=True)
ENDLESS = Policy("endless memory", endless=True)


class Result(NamedTuple):
    """Figures of one run. TTFT of rounds that continue a session; GiB over each link.

    Of `ahead` tokens that were requested before their prompt, `wasted` were not used by it.

    `by_worker` has each worker's share of the computed and cached prompt tokens.
    """

    cached: float
    of_ideal: float
    ttft_p50: float
    ttft_p95: float
    latency: float
    tokens_per_s: float
    gib_up: float
    gib_down: float
    ahead: int
    wasted: int
    by_kind: dict[str, float]
    by_worker: list[float]


def play(workload: Workload, scene: Scene, policy: Policy, seed: int) -> Result:
    """Simulate a workload."""
    if policy.pooled:
        scene = scene.pooled()
    times = ENDLESS_TIMES if policy.endless else 1
    router = RouterSettings(forecast_returns=policy.forecasts, prefill_weight=policy.prefill_weight)
    fleet = replace(scene, host=0) if policy.shared else scene
    options = replace(
        fleet.options(router, seed, times),
        speculative_prefill=policy.ahead,
        tool_events=policy.reports,
        nodes=scene.node() if policy.shared else None,
    )
    simulation = Simulation(_as_told(workload, policy), options)
    for worker in simulation.workers.values():
        if policy.filtered:
            filter_tiers(worker.core)
    if policy.order is not None:
        OrderedRun(simulation, policy.order(simulation))
    cores = [worker.core for worker in simulation.workers.values()]
    simulation.run()
    return _result(simulation, cores)


def _result(simulation: Simulation, cores: list[MockCore]) -> Result:
    whole, records = figures(simulation), simulation.records
    if whole.failed > MOST_FAILED * len(simulation.workload):
        raise RuntimeError(f"{whole.failed} rounds failed: {whole.errors}")
    waited = records.column("first_token") - records.column("arrived")
    returning = waited[returns(simulation.workload) & ~np.isnan(waited)].tolist()
    prompts = np.array([worker.prompt_tokens for worker in whole.workers], np.float64)
    total, ahead = whole.latency.total_s, simulation.speculation.record
    return Result(
        cached=whole.cache.cached_share,
        of_ideal=whole.cache.share_of_ideal,
        ttft_p50=median(returning),
        ttft_p95=percentile(returning, 0.95),
        latency=total.mean if total else float("nan"),
        tokens_per_s=whole.steady_tokens_per_s,
        gib_up=(_moved(whole, "to_engines") or sum(map(_loaded, cores))) / GIB,
        gib_down=(_moved(whole, "from_engines") or sum(map(_written, cores))) / GIB,
        ahead=ahead.computed_tokens,
        wasted=ahead.computed_tokens - ahead.useful_tokens,
        by_kind=dict(_by_kind(simulation)),
        by_worker=(prompts / prompts.sum()).tolist(),
    )


def _moved(whole: Figures, link: str) -> int:
    """Bytes over the links between the engines and the memory of their node."""
    return whole.tiers.moved.get(link, 0)


def _loaded(core: MockCore) -> int:
    return sum(core.tiers.loaded) * core.tiers.block_bytes


def _written(core: MockCore) -> int:
    return sum(tier.written for tier in core.tiers.lower) * core.tiers.block_bytes


def returns(workload: Workload) -> NDArray[np.bool_]:
    """True for each round that continues its session."""
    chosen = np.zeros(len(workload), np.bool_)
    chosen[[after for after in workload.following() if after is not None]] = True
    return chosen


def _by_kind(simulation: Simulation) -> Iterator[tuple[str, float]]:
    """Each kind of agent with its share of the ideal hits."""
    cached, ideal = Counter[str](), Counter[str]()
    sessions, records = simulation.workload.sessions, simulation.records
    for index, round_ in enumerate(simulation.workload.rounds):
        kind = sessions[round_.session].kind
        cached[kind] += records.cached[index]
        ideal[kind] += records.ideal[index]
    for kind, tokens in ideal.items():
        yield kind, cached[kind] / max(tokens, 1)


def _as_told(workload: Workload, policy: Policy) -> Workload:
    """The workload of clients that say as much as the policy allows."""
    rounds = workload.rounds
    if policy.ttl_s:
        rounds = [
            msgspec.structs.replace(r, marks=((r.input_tokens, policy.ttl_s),)) for r in rounds
        ]
    elif policy.order is not None:
        rounds = [msgspec.structs.replace(r, marks=()) if r.marks else r for r in rounds]
    sessions = workload.sessions
    if not policy.told:
        sessions = [msgspec.structs.replace(s, name="", ends=False) for s in sessions]
    return msgspec.structs.replace(workload, rounds=rounds, sessions=sessions)


class FilteredTier(LowerTier):
    """Stores the blocks of a sequence that an earlier sequence has used, as offload filters do."""

    def __init__(self, tier: LowerTier, core: MockCore) -> None:
        super().__init__(tier.capacity, core.options.retention, tier.tier, core.blocks)
        self._seen: set[int] = set()

    def store(self, sequence: Sequence, priority: int) -> None:
        hashes = sequence.sequence_hashes[: min(sequence.full_blocks, self.capacity)]
        again = next((n for n, h in enumerate(hashes) if h not in self._seen), len(hashes))
        self._seen.update(hashes[again:])
        stored = hashes[:again]
        held = self.lock_prefix(stored)
        new = slice(held, again)
        if held < again:
            self.allocate(again - held, sequence.request.id)
            parent = stored[held - 1] if held else None
            local: array[int] = sequence.local_hashes[new]
            self.promote(parent, sequence.request.salt, stored[new], local)
            self.written += again - held
        self.unlock(stored)


def filter_tiers(core: MockCore) -> None:
    """Give an engine that has not started lower tiers that filter."""
    core.tiers.lower = [FilteredTier(tier, core) for tier in core.tiers.lower]


def paced_agents(sessions: int, steps: int, seed: int) -> Workload:
    """Sessions that return about every ten seconds, one more each second."""
    tool = ToolProfile(name="timer", weight=1.0, wait_s=Quantiles(p50=10.0, p90=12.0))
    agent = Agent(
        name="paced",
        share=1.0,
        prompt_tokens=8000,
        task=1000,
        steps=steps,
        output=200,
        result=800,
        tools=[tool],
    )
    profile = AgentProfile(description="paced", sessions=sessions, per_minute=60.0, agents=[agent])
    return AgentGenerator(profile, seed).workload()
